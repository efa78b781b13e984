"""Which images a page may show: those that were certified, found without a download."""

import shutil

import numpy as np
import pytest

from dpcert.cli import main
from dpcert.report.tables import read_run
from dpcert.runs.images import TestImages
from tests.conftest import blobs

SMALL = ("model.name=linear", "train.batch_size=10", "train.epochs=1", "data.classes=3", "certify.n=100", "data.validation=40")
ROWS = "certificates-sigma0.50.tsv"


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    np.savez(folder / "blobs.npz", **blobs(0))
    chosen = [word for setting in (f"data.path={folder / 'blobs.npz'}", *SMALL) for word in ("--set", setting)]
    assert call("run", "mnist/dp-gaussian", *chosen, "--examples", 20, "--out", folder / "run") == 0
    return folder / "run"


def test_a_run_shows_its_images(run):
    images, reason = TestImages().of(run, ROWS)
    assert reason == "" and images.shape == (60, 1, 8, 8)
    assert "<img" in (run / "report.html").read_text() and (run / "figures" / "radii.svg").is_file()


def test_other_images_are_not_shown(run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    data = run.parent / "blobs.npz"
    original = data.read_bytes()
    try:
        np.savez(data, **{**blobs(0), "x_test": blobs(1)["x_test"]})
        assert TestImages().of(copy, ROWS) == (None, "the data set on this machine is not the one that was certified")
        data.write_bytes(b"nothing of the kind")
        assert TestImages().of(copy, ROWS) == (None, "the data set on this machine cannot be read")
        data.unlink()
        assert TestImages().of(copy, ROWS)[0] is None
        assert call("report", copy, "--html", tmp_path / "page.html") == 0
    finally:
        data.write_bytes(original)
    page = (tmp_path / "page.html").read_text()
    assert "<img" not in page and "No pictures: the data file is not at the path in config.toml." in page
    assert 'data-group="most-robust"' in page  # the rows are shown all the same


def test_certificates_that_do_not_say_of_what_show_no_image(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / ROWS).with_suffix(".json").write_text("{}")
    assert TestImages().of(copy, ROWS) == (None, "the sidecar of the certificates does not record which images were certified")


def test_nothing_is_downloaded(run, tmp_path, monkeypatch):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    text = (
        (copy / "config.toml")
        .read_text()
        .replace(f'path = "{run.parent / "blobs.npz"}"\n', "")
        .replace('name = "mnist"', 'name = "cifar10"', 1)
    )
    (copy / "config.toml").write_text(text)
    monkeypatch.setenv("DPCERT_DATA", str(tmp_path / "empty"))
    monkeypatch.setattr("dpcert.runs.images.missing_files", lambda source: list(source.digests))
    monkeypatch.setattr("dpcert.data.fetch.download", lambda *a, **k: pytest.fail("a report must not download"))
    assert TestImages().of(copy, ROWS) == (None, "the data set is not on this machine (download it with dpcert data fetch)")


def test_held_out_records_are_never_examples(run, tmp_path):
    """The validation split are training records, which epsilon does not cover: the page shows neither rows nor images."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    assert call("certify", copy, "--sigma", 0.25, "--n", 100, "--examples", 10, "--split", "validation") == 0
    facts = read_run(copy)
    assert [c.is_of_test_set for c in facts.certified] == [False, True] and facts.main is facts.certified[1]
    only = [c for c in facts.certified if not c.is_of_test_set]
    from dataclasses import replace

    from dpcert.report.html import render

    page = render([replace(facts, certified=only, images=np.zeros((60, 1, 8, 8)))])
    assert "<img" not in page and "(validation)" not in page and "certificates-validation" not in page
