"""More --examples extend the certificates, fewer change nothing: published figures keep the images they were made from."""

import json
import shutil

import pytest

from dpcert.certification.metrics import even_subset
from dpcert.cli import main
from dpcert.runs import certify as certifying
from dpcert.runs.certify import indices_to_certify
from dpcert.store.durable import write_checked_json
from dpcert.store.records import CertificateRow, header, read_rows, text_of
from tests.faults import scene

VOTES = ("--n0", 10, "--n", 100)
ROWS = scene.ROWS


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    data = scene.write_data(folder)
    scene.train(data, folder / "run")
    return data, folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained[1], tmp_path / "run")


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def snapshot(run):
    return {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}


def published(run):
    return {entry["file"]: entry["examples"] for entry in json.loads((run / "metrics.json").read_text())["certification"]}


def test_fewer_examples_change_nothing_and_say_so(run, capsys):
    assert call("certify", run, *VOTES, "--examples", 12) == 0
    assert "keeping them" not in capsys.readouterr().out
    before = snapshot(run)
    for fewer in (1, 5, 6, 11):  # divisors of 12 and others: the smaller set need not be a part of the larger one
        assert call("certify", run, *VOTES, "--examples", fewer) == 0
        out = capsys.readouterr().out
        assert f"{ROWS} already has 12 certified images; keeping them" in out and "of 12 abstained" in out
        assert snapshot(run) == before


def test_the_default_number_is_a_smaller_request_too(run, capsys, monkeypatch):
    monkeypatch.setattr(certifying, "DEFAULT_EXAMPLES", 4)
    assert call("certify", run, *VOTES, "--examples", "all") == 0
    before = snapshot(run)
    capsys.readouterr()
    assert call("certify", run, *VOTES) == 0
    assert "already has 12 certified images; keeping them" in capsys.readouterr().out and snapshot(run) == before


def test_run_after_a_larger_certify_keeps_the_larger_set(trained, run, capsys):
    chosen = scene.assignments(trained[0], certify__examples=4)
    request = ["run", "mnist/dp-gaussian", *(word for k, v in chosen.items() for word in ("--set", f"{k}={v}")), "--out", run]
    assert call(*request) == 0 and published(run) == {ROWS: 4}
    assert call("certify", run, *VOTES, "--examples", 8) == 0 and published(run) == {ROWS: 8}
    before = {name: data for name, data in snapshot(run).items() if name != "report.html"}
    capsys.readouterr()
    assert call(*request) == 0
    assert "already has 8 certified images; keeping them" in capsys.readouterr().out
    assert before == {name: data for name, data in snapshot(run).items() if name != "report.html"}


def test_answers_at_a_radius_are_kept_as_well(run, capsys):
    assert call("certify", run, *VOTES, "--examples", 12, "--radius", 0.1) == 0
    before = snapshot(run)
    capsys.readouterr()
    assert call("certify", run, *VOTES, "--examples", 4, "--radius", 0.1) == 0
    out = capsys.readouterr().out
    assert "already has 12 certified images; keeping them" in out and "of 12 images" in out and snapshot(run) == before


def test_more_examples_extend_and_others_have_files_of_their_own(run, capsys):
    for examples in (4, 5, 12):
        assert call("certify", run, *VOTES, "--examples", examples) == 0
        assert published(run)[ROWS] == examples
    assert call("certify", run, *VOTES, "--examples", 4, "--sigma", 0.25) == 0
    assert call("certify", run, *VOTES, "--examples", 4, "--simultaneous") == 0
    assert call("certify", run, *VOTES, "--examples", 3, "--simultaneous") == 0
    assert sorted(published(run).values()) == [3, 4, 4, 12]
    assert "keeping them" not in capsys.readouterr().out


def test_rows_that_were_cut_off_are_made_again_not_forgotten(run):
    """metrics.json speaks of 12: a request for 4 does not turn them into 4 because some were lost."""
    assert call("certify", run, *VOTES, "--examples", 12) == 0
    before, lines = snapshot(run), (run / ROWS).read_text().splitlines(keepends=True)
    (run / ROWS).write_text("".join(lines[:7]) + lines[7][:5])
    assert call("certify", run, *VOTES, "--examples", 4) == 0
    assert published(run)[ROWS] == 12 and scene.without_time((run / ROWS).read_text()) == scene.without_time(
        before[ROWS].decode()
    )


def test_metrics_that_were_lost_come_back_with_the_larger_set(trained, run):
    assert call("certify", run, *VOTES, "--examples", 12) == 0
    (run / "metrics.json").unlink()
    scene.train(trained[0], run)
    assert call("certify", run, *VOTES, "--examples", 4) == 0 and published(run)[ROWS] == 12


def test_an_interrupted_extension_publishes_only_whole_subsets(run):
    assert call("certify", run, *VOTES, "--examples", 4) == 0
    four = set((run / ROWS).read_text().splitlines())
    assert call("certify", run, *VOTES, "--examples", 12) == 0
    rows = read_rows(CertificateRow, run / ROWS)
    some = [row for row in rows if text_of(row) in four or row.idx < 3]
    (run / ROWS).write_text("\n".join([header(CertificateRow), *map(text_of, some)]) + "\n")
    found = indices_to_certify(CertificateRow, run / ROWS, 12, 3)
    assert found == even_subset(12, len(found)) and {row.idx for row in some} >= set(found) and len(found) >= 4


def test_figures_of_images_that_were_chosen_otherwise_are_kept_as_they_are(run, capsys):
    """Published by a version that chose other images: their figures are not recomputed for other ones, nor are they dropped."""
    assert call("certify", run, *VOTES, "--examples", 12) == 0
    metrics = json.loads((run / "metrics.json").read_text())
    del metrics["check"]
    metrics["certification"][0] |= {"examples": 7, "stride": 1, "subset": "the first 7 images"}
    write_checked_json(run / "metrics.json", metrics)
    before = snapshot(run)
    assert call("certify", run, *VOTES, "--examples", 5) == 0
    assert "already has 7 certified images; keeping them" in capsys.readouterr().out and snapshot(run) == before


def test_a_deleted_file_is_a_new_start(run):
    assert call("certify", run, *VOTES, "--examples", 12) == 0
    for name in (ROWS, ROWS.replace(".tsv", ".json")):
        (run / name).unlink()
    assert call("certify", run, *VOTES, "--examples", 4) == 0 and published(run)[ROWS] == 4


def test_twin_that_takes_the_request_as_it_is_is_caught(run, monkeypatch):
    """As it was."""
    assert call("certify", run, *VOTES, "--examples", 12) == 0
    before = snapshot(run)
    monkeypatch.setattr(certifying, "kept_indices", lambda *arguments: None)
    monkeypatch.setattr(certifying, "indices_to_certify", lambda kind, file, size, asked, least=0: even_subset(size, asked))
    assert call("certify", run, *VOTES, "--examples", 4) == 0
    assert snapshot(run) != before and published(run)[ROWS] == 4
