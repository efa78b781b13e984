"""Runs whose model has noise inside: every command certifies with that noise, and an outsider can check the law."""

import json
import shutil

import numpy as np
import pytest
import torch

import dpcert
from dpcert.certification.laws import smoothing_of
from dpcert.release.verify import FAILED, verify
from dpcert.rounding import floor_text
from dpcert.store.durable import write_checked_json
from dpcert.store.metrics import read_metrics
from dpcert.store.public import read_directory
from dpcert.store.records import CertificateRow, InnerNoiseRow, read_rows, text_of
from tests.conftest import blobs
from tests.release.conftest import call, settings
from tests.runs import own_models

MODELS = {"hidden": "noise_inside", "both": "noise_at_both_sites"}
SMALL = ["train.batch_size=20", "train.epochs=3", "data.classes=3", "certify.n=300", "train.learning_rate=0.3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run with noise after the first layer, one with noise on the image too."""
    folder = tmp_path_factory.mktemp("inner")
    np.savez(folder / "blobs.npz", **blobs(0))
    for site, name in MODELS.items():
        options = [*settings(f"data.path={folder / 'blobs.npz'}", *SMALL), "--model", f"tests.runs.own_models:{name}"]
        assert call("run", "mnist/dp-gaussian", *options, "--examples", 20, "--seed", 1, "--out", folder / site) == 0
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained / "hidden", tmp_path / "copy")
    return tmp_path / "copy"


def certificates(run):
    (file,) = run.glob("certificates-*.tsv")
    return file


def model_option(site):
    return ["--model", f"tests.runs.own_models:{MODELS[site]}"]


@pytest.mark.parametrize("site", list(MODELS))
def test_the_files_carry_the_law(trained, site):
    run, file = trained / site, certificates(trained / site)
    model = dpcert.open_run(run, model=getattr(own_models, MODELS[site])).model
    law = smoothing_of(model)
    assert file.name == f"certificates-{site}-sigma{'0.212132' if site == 'hidden' else '0.320156'}.tsv"
    assert f"{law.sigma:g}" in file.name
    facts, (entry,) = json.loads(file.with_suffix(".json").read_text()), read_metrics(run / "metrics.json")["certification"]
    assert facts["smoothing"] == entry["smoothing"] == json.loads(json.dumps(law.facts)) and entry["sigma"] == law.sigma
    rows = read_rows(CertificateRow, file)
    assert len(rows) == 20 and all(isinstance(row, InnerNoiseRow) for row in rows)
    assert 0.0 < entry["pixeldp"]["acr"] < entry["acr"] and max(row.radius for row in rows) > 0.0


@pytest.mark.parametrize("site", list(MODELS))
def test_an_outsider_recomputes_the_law(trained, site, capsys, tmp_path):
    assert call("verify", trained / site) == 0
    assert "computed from the weights" in " ".join(capsys.readouterr().out.split())
    assert call("export", trained / site, tmp_path / "bundle.zip") == 0
    assert call("verify", tmp_path / "bundle.zip") == 0


def rewrite(run, change):
    """Change an entry of metrics.json and its sidecar in the same way, with right checksums."""
    file, metrics = certificates(run), read_metrics(run / "metrics.json")
    change(metrics["certification"][0])
    write_checked_json(run / "metrics.json", metrics)
    facts = json.loads(file.with_suffix(".json").read_text())
    change(facts)
    facts.pop("checksum", None)
    write_checked_json(file.with_suffix(".json"), facts)


def smaller_norm(entry):
    """Twice the radius, consistently: sigma is what the smaller norm is worth."""
    entry["smoothing"]["whitened_norm"] /= 2
    entry["sigma"] *= 2


def no_convolution(entry):
    """As a linear layer, the kernel would have a smaller norm."""
    entry["smoothing"]["geometry"] = []


def other_groups(entry):
    entry["smoothing"]["geometry"][-1] = [4]


def not_normalized(entry):
    entry["smoothing"]["normalized"] = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (smaller_norm, "whitened norm"),
        (no_convolution, "does not fit the geometry"),
        (other_groups, "does not fit images"),
        (not_normalized, "whitened norm"),
    ],
)
def test_a_tampered_law_fails(copied, change, words):
    rewrite(copied, change)
    law = next(check for check in verify(read_directory(copied)) if check.name.endswith("smoothing law"))
    assert law.outcome == FAILED and words in law.detail
    assert call("verify", copied) != 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: {"radius_pixeldp": row.radius_pixeldp + 0.01}, "PixelDP radius"),
        (lambda row: {"votes": "300,0,0" if row.predict else "0,300,0"}, "votes do not agree"),
        (lambda row: {"votes": ""}, "votes do not agree"),
        (lambda row: {"radius": row.radius * 1.1}, "radius"),
    ],
)
def test_a_tampered_row_fails(copied, capsys, change, words):
    file = certificates(copied)
    lines = file.read_text().splitlines()
    rows = read_rows(InnerNoiseRow, file)
    place = next(place for place, row in enumerate(rows) if row.predict >= 0 and row.radius_pixeldp > 0)
    lines[place + 1] = text_of(InnerNoiseRow(**{**vars(rows[place]), **change(rows[place])}))
    file.write_text("\n".join(lines) + "\n")
    assert call("verify", copied) != 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_finished_work_changes_nothing_and_more_images_extend_it(copied):
    before = {file.name: file.read_bytes() for file in copied.glob("certificates-*")}
    assert call("certify", copied, "--n", 300, "--examples", 20, *model_option("hidden")) == 0
    assert {file.name: file.read_bytes() for file in copied.glob("certificates-*")} == before
    assert call("certify", copied, "--n", 300, "--examples", 30, *model_option("hidden")) == 0
    assert read_metrics(copied / "metrics.json")["certification"][0]["examples"] == 30
    assert call("verify", copied) == 0


def test_every_way_to_certify_uses_the_noise_of_the_model(copied, tmp_path, capsys):
    run = dpcert.open_run(copied, model=own_models.noise_inside)
    law = smoothing_of(run.model)
    found = run.certify(20, n=300)
    assert found.sigma == law.sigma and run.smoothed().smoothing == law
    x = torch.as_tensor(blobs(0)["x_test"][:3])[:, None]
    np.save(tmp_path / "images.npy", x.numpy())
    assert run.predict(x, n=300).shape == (3,)
    capsys.readouterr()
    assert call("predict", copied, tmp_path / "images.npy", "--n", 300, *model_option("hidden")) == 0
    most = law.radius(0.001 ** (1 / 300))
    assert floor_text(most, 2)[:3] in capsys.readouterr().out  # an image with all votes has the largest radius of this law
    assert call("certify", copied, "--n", 300, "--examples", 5, "--radius", 0.05, *model_option("hidden")) == 0
    assert list(copied.glob("robust-hidden-sigma*-r0.05.tsv"))
    assert call("report", copied, "--html", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "noise after the first layer" in page and "PixelDP" in page and "PixelDP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["certify", "--sigma", 0.5], "has noise inside its model, worth"),
        (["attack", "--smoothed", "--attack", "pgd-l2", "--sigma", 0.3], "has noise inside its model, worth"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(copied, capsys, arguments, words):
    command, *options = arguments
    before = sorted(file.name for file in copied.iterdir())
    assert call(command, copied, *options, *model_option("hidden")) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and "\n" not in error
    assert sorted(file.name for file in copied.iterdir()) == before


@pytest.mark.parametrize("site", list(MODELS))
def test_an_attack_on_the_vote_uses_the_noise_of_the_model(trained, tmp_path, site):
    """Weaker than the certificates allow, and stronger with strength; the rows name what the noise is worth."""
    shutil.copytree(trained / site, tmp_path / "run")
    run = dpcert.open_run(tmp_path / "run", model=getattr(own_models, MODELS[site]))
    found = run.attack("pgd-l2", (0.1, 4.0), smoothed=True, examples=20)
    assert [row.sigma for row in found.rows] == [float(f"{run.smoothing().sigma:g}")] * 2
    assert found.certified[0] is not None and found.rows[0].accuracy >= found.certified[0] and not found.contradictions
    assert found.rows[1].accuracy < 0.5
    assert call("verify", tmp_path / "run") == 0


def test_runs_with_noise_inside_do_not_share_a_pass(trained, tmp_path, capsys):
    """Heads on one trunk share votes only if the noise is on the image; the rows are those of each run alone."""
    for name in ("one", "two"):
        shutil.copytree(trained / "hidden", tmp_path / name)
    runs = [tmp_path / "one", tmp_path / "two"]
    assert call("certify", *runs, "--n", 200, "--examples", 5, "--seed", 3, *model_option("hidden")) == 0
    assert "share none" in capsys.readouterr().out
    first, second = (next(run.glob("certificates-*-n200-*.tsv")) for run in runs)
    columns = [[row.split("\t")[:5] for row in file.read_text().splitlines()] for file in (first, second)]
    assert columns[0] == columns[1] and len(columns[0]) == 6


@pytest.mark.parametrize("site", list(MODELS))
@pytest.mark.parametrize("how", [("--port", 0), ("--export", "demo")])
def test_the_service_refuses_noise_that_it_does_not_draw(trained, tmp_path, monkeypatch, capsys, site, how):
    monkeypatch.chdir(tmp_path)
    assert call("serve", trained / site, *how, *model_option(site)) == 2
    assert "has noise inside, which the service does not draw; use dpcert predict" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
