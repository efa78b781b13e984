"""`dpcert analyze` and `dpcert attack`: rows, resuming, other requests, and one clear line for every wrong one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpcert.analysis.correlate import correlation
from dpcert.certification.bounds import confidence_interval
from dpcert.certification.metrics import earned_radius
from dpcert.certification.sweep import Request
from dpcert.cli import main
from dpcert.privacy.ledger import Ledger
from dpcert.report.tables import read_run
from dpcert.runs import attack as attacking
from dpcert.runs import certify as certifying
from dpcert.runs.analyze import AnalyzeRequest, analyze
from dpcert.runs.open import open_run
from dpcert.runs.resolve import read_config
from dpcert.store.durable import read_checked_json, write_checked_json
from dpcert.store.records import METRICS, AttackRow, CertificateRow, RobustRow, SampleRow, header, read_rows, text_of
from dpcert.training.state import model_bytes, read_model
from tests.conftest import blobs
from tests.fuzz.readers import chained

PUBLISHED = Path(__file__).parents[2] / "results" / "mnist-dp-gaussian"
SMALL = ["model.name=linear", "train.batch_size=10", "train.epochs=3", "data.classes=3", "certify.n=200"]


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyze")
    np.savez(folder / "blobs.npz", **blobs(0))
    settings = [word for one in (f"data.path={folder / 'blobs.npz'}", *SMALL) for word in ("--set", one)]
    assert call("run", "mnist/dp-gaussian", *settings, "--examples", 20, "--seed", 1, "--out", folder / "run") == 0
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def files(run):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir() if path.is_file()}


# ------------------------------------------------------------------ analyze


def test_rows_stand_beside_their_certificates(run, capsys):
    assert call("analyze", run) == 0
    out = capsys.readouterr().out
    assert "lipschitz" in out and "rank correlation" in out and "below | above 0.5" in out and "samples.tsv" in out
    rows = read_rows(SampleRow, run / "samples.tsv")
    certificates = read_rows(CertificateRow, run / "certificates-sigma0.50.tsv")
    assert [row.idx for row in rows] == [row.idx for row in certificates] == list(range(0, 60, 3))
    for row, certificate in zip(rows, certificates, strict=True):
        assert (row.label, row.radius, row.correct) == (certificate.label, certificate.radius, certificate.correct)
        assert row.sigma == 0.5 and row.hessian_norm >= 0 and row.hessian_residual <= 1e-3 and row.lipschitz > 0
    before = files(run)
    assert call("analyze", run) == 0
    assert files(run) == before


def write_certificates(run, rows):
    (run / "certificates-sigma0.50.tsv").write_text("\n".join([header(CertificateRow), *map(text_of, rows)]) + "\n")


def test_each_row_is_about_its_own_image(run):
    """Radii, answers and metrics that differ from image to image, worked out by hand: a row that is shifted by a place shows."""
    certificates = read_rows(CertificateRow, run / "certificates-sigma0.50.tsv")
    distinct = [replace(row, radius=(10 + row.idx) / 1000, correct=row.idx // 3 % 2) for row in certificates]
    write_certificates(run, distinct)
    assert call("analyze", run, "--batch", 7) == 0
    (weight, bias), images = (
        (read_model(run / "model.safetensors")[0][f"1.{name}"].double() for name in ("weight", "bias")),
        blobs(0),
    )
    rows = read_rows(SampleRow, run / "samples.tsv")
    for row, certificate in zip(rows, distinct, strict=True):
        x, label = torch.from_numpy(images["x_test"][row.idx]).double().flatten(), int(images["y_test"][row.idx])
        logits = weight @ x + bias
        slope = weight.T @ (logits.softmax(dim=0) - torch.eye(3, dtype=torch.float64)[label])
        assert (row.idx, row.label, row.predict) == (certificate.idx, label, int(logits.argmax()))
        assert row.gradient_norm == pytest.approx(float(slope.norm()), rel=1e-5)
        assert (row.radius, row.correct) == (certificate.radius, certificate.correct)
    assert len({row.gradient_norm for row in rows}) == len(rows) == 20


def test_cut_anywhere_it_goes_on_to_the_same_bytes_with_any_batch(run):
    assert call("analyze", run) == 0
    whole = (run / "samples.tsv").read_bytes()
    for cut in (0, len(whole) // 3, len(whole) - 5):
        (run / "samples.tsv").write_bytes(whole[:cut])
        assert call("analyze", run, "--batch", 3) == 0
        assert (run / "samples.tsv").read_bytes() == whole


def test_fewer_examples_are_evenly_spaced_and_more_extend(run, capsys):
    assert call("analyze", run, "--examples", 5) == 0
    few = (run / "samples.tsv").read_text().splitlines()
    assert [int(line.split("\t")[0]) for line in few[1:]] == [0, 12, 24, 36, 48]
    assert call("analyze", run, "--examples", "all") == 0
    assert set(few) <= set((run / "samples.tsv").read_text().splitlines())
    assert call("certify", run, "--n", 200, "--examples", 60) == 0
    assert call("analyze", run, "--examples", 60) == 0  # certificates that were extended are the same certificates
    assert len(read_rows(SampleRow, run / "samples.tsv")) == 60
    capsys.readouterr()
    assert call("analyze", run, "--examples", 5) == 0
    assert "5 images" in capsys.readouterr().out and len(read_rows(SampleRow, run / "samples.tsv")) == 60


def refused(capsys, *arguments):
    capsys.readouterr()
    code, err = call(*arguments), capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1
    return err


def test_another_request_model_or_certificate_is_refused(run, capsys):
    assert call("analyze", run) == 0
    before = files(run)
    assert "seed: 0 -> 7" in refused(capsys, "analyze", run, "--seed", 7)
    assert "layer: input of 1 -> 0" in refused(capsys, "analyze", run, "--layer", 0)
    assert files(run) == before
    facts = read_checked_json(run / "samples.json", what="", remedy="")
    write_checked_json(run / "samples.json", {**facts, "model_sha256": "0" * 64})
    assert "model_sha256" in refused(capsys, "analyze", run)
    (run / "samples.json").unlink()
    assert "has no samples.json" in refused(capsys, "analyze", run)
    write_checked_json(run / "samples.json", facts)
    for file in ("certificates-sigma0.50.tsv", "certificates-sigma0.50.json"):
        (run / file).unlink()
    assert call("certify", run, "--n", 200, "--examples", 20, "--seed", 5) == 0
    assert "certificates_sha256" in refused(capsys, "analyze", run)


def test_certificates_of_another_model_or_other_images_are_refused(run, capsys):
    sidecar = run / "certificates-sigma0.50.json"
    facts = read_checked_json(sidecar, what="", remedy="")
    for name, word in (("model_sha256", "a different model"), ("images_sha256", "different images")):
        write_checked_json(sidecar, {**facts, name: "0" * 64})
        assert word in refused(capsys, "analyze", run)
        assert word in refused(capsys, "attack", run, "--smoothed")
    assert not (run / "samples.tsv").exists() and not (run / "attacks.tsv").exists()


def test_a_run_without_certificates(run, capsys):
    metrics = json.loads((run / "metrics.json").read_text())
    del metrics["check"]
    write_checked_json(run / "metrics.json", {**metrics, "certification": []})
    message = refused(capsys, "analyze", run)
    assert "has no certificates at its sigma 0.5" in message and f"dpcert certify {run}" in message
    assert call("attack", run, "--examples", 10) == 0  # needs none


@pytest.mark.parametrize("command", ["analyze", "attack"])
def test_half_finished_of_other_data_or_from_a_newer_version(command, run, finished, capsys):
    whole = {name: (run / name).read_bytes() for name in ("model.safetensors", "ledger.jsonl", "config.toml")}
    (run / "model.safetensors").unlink()
    assert "finish its training with" in refused(capsys, command, run)
    weights, facts = read_model(finished / "model.safetensors")
    layers = torch.nn.Module()
    layers.state_dict = lambda: weights
    (run / "model.safetensors").write_bytes(model_bytes(layers, {**facts, "format": "dpcert-2"}))
    assert "'dpcert-2', this version reads 'dpcert-1'; it is from a newer version" in refused(capsys, command, run)
    (run / "model.safetensors").write_bytes(whole["model.safetensors"])
    events = [json.loads(line)["data"] for line in whole["ledger.jsonl"].decode().splitlines()]
    (run / "ledger.jsonl").write_bytes(chained([{**events[0], "format": 4}, *events[1:]]))
    assert "this version reads up to 3: made by a newer version" in refused(capsys, command, run)
    assert Ledger.load(finished / "ledger.jsonl").is_closed
    (run / "ledger.jsonl").write_bytes(b"".join(whole["ledger.jsonl"].splitlines(keepends=True)[:-1]))
    assert "not finished" in refused(capsys, command, run)
    (run / "ledger.jsonl").write_bytes(whole["ledger.jsonl"])
    other = {key: np.pad(value, ((0, 0), (1, 0), (0, 0))) if value.ndim == 3 else value for key, value in blobs(0).items()}
    data, original = finished.parent / "blobs.npz", (finished.parent / "blobs.npz").read_bytes()
    try:
        np.savez(data, **other)
        assert "is 9 x 8, the model takes 8 x 8" in refused(capsys, command, run)
    finally:
        data.write_bytes(original)
    assert "is not a run directory" in refused(capsys, command, run / "absent")
    assert "the test set has 60" in refused(capsys, command, run, "--examples", 61)


def test_more_than_are_certified(run, capsys):
    assert "--examples is 30, only 20 images are certified; certify more with: dpcert certify" in refused(
        capsys, "analyze", run, "--examples", 30
    )


def test_an_unknown_layer_and_a_loss_that_is_not_finite(run, capsys, monkeypatch):
    assert "choose one of: 0, 1" in refused(capsys, "analyze", run, "--layer", "conv1")
    assert not (run / "samples.tsv").exists()
    monkeypatch.setattr("dpcert.analysis.examples.losses_of_labels", lambda logits, labels: logits.sum(dim=1) * torch.nan)
    assert "at test image 0 are not finite" in refused(capsys, "analyze", run)
    assert read_rows(SampleRow, run / "samples.tsv") == []


def test_other_votes_at_the_same_sigma_do_not_take_the_place_of_the_first(run):
    assert call("certify", run, "--n", 100, "--examples", 5) == 0
    assert json.loads((run / "metrics.json").read_text())["certification"][0]["n"] == 100
    assert call("analyze", run) == 0
    assert len(read_rows(SampleRow, run / "samples.tsv")) == 20


def test_other_certificates_do_not_take_the_place_of_the_main_ones(run):
    """Without noisy views the config's sigma is the main one, not the smallest; a simultaneous file is not the main one."""
    metrics = json.loads((run / "metrics.json").read_text())
    del metrics["check"]
    write_checked_json(run / "metrics.json", {**metrics, "sigma_train": None})
    assert call("analyze", run) == 0
    before = (run / "samples.tsv").read_bytes()
    assert call("certify", run, "--n", 200, "--examples", 20, "--sigma", 0.25) == 0
    assert call("certify", run, "--n", 200, "--examples", 20, "--simultaneous") == 0
    assert call("analyze", run) == 0 and (run / "samples.tsv").read_bytes() == before
    shown = read_run(run).main.figures
    assert shown["file"] == read_checked_json(run / "samples.json", what="", remedy="")["certificates"]
    assert shown["file"] == "certificates-sigma0.50.tsv"


def test_a_request_that_made_nothing_binds_nobody(run):
    assert call("analyze", run) == 0
    (run / "samples.tsv").unlink()
    assert call("analyze", run, "--seed", 7) == 0
    assert read_checked_json(run / "samples.json", what="", remedy="")["seed"] == 7


def test_the_papers_signs_on_mnist(tmp_path):
    """The certified radius falls with each of the three metrics (Section 5.2 of the paper); 50 images, two seconds."""
    shutil.copytree(PUBLISHED, tmp_path / "run")
    rows = analyze(open_run(tmp_path / "run"), AnalyzeRequest(examples=50)).rows
    radius = earned_radius(np.array([r.radius for r in rows]), np.array([r.correct for r in rows]))
    shuffled = np.random.default_rng(0).permutation(radius)
    for name in METRICS:
        values = np.array([getattr(row, name) for row in rows])
        assert correlation(values, radius).rank < -0.4 and correlation(values, radius).pearson < -0.4
        assert abs(correlation(values, shuffled).rank) < 0.35  # the twin
    assert max(row.hessian_residual for row in rows) <= 1e-3


# ------------------------------------------------------------------ attack


def test_rows_of_attacks_and_what_is_done_is_not_done_again(run, capsys):
    assert call("attack", run, "--strengths", "0.5,0.01", "--examples", 20) == 0
    out = capsys.readouterr().out
    assert "fgsm" in out and "95 % interval" in out and "attacks.tsv" in out
    rows = read_rows(AttackRow, run / "attacks.tsv")
    assert [(r.attack, r.target, r.sigma, r.strength, r.steps, r.starts, r.examples) for r in rows] == [
        ("fgsm", "base", None, 0.01, 1, 1, 20),
        ("fgsm", "base", None, 0.5, 1, 1, 20),
    ]
    for row in rows:
        low, high = confidence_interval(round(20 * row.accuracy), 20)
        assert (row.low, row.high) == pytest.approx((low, high), abs=1e-6)
    before = files(run)
    assert call("attack", run, "--strengths", "0.5", "--examples", 20) == 0
    assert files(run) == before
    lines = (run / "attacks.tsv").read_bytes().splitlines(keepends=True)
    (run / "attacks.tsv").write_bytes(b"".join(lines[:2]) + lines[2][:10])  # a torn row is made again
    assert call("attack", run, "--strengths", "0.01,0.5", "--examples", 20) == 0
    assert (run / "attacks.tsv").read_bytes() == b"".join(lines)
    assert call("attack", run, "--attack", "pgd-linf", "--attack", "pgd-l2", "--strengths", "0.1", "--examples", 20) == 0
    assert len(read_rows(AttackRow, run / "attacks.tsv")) == 4


def test_the_smoothed_model_beside_its_certificates(run, capsys):
    pgd = ["--attack", "pgd-l2", "--steps", 3, "--starts", 1, "--examples", 20]
    assert call("attack", run, *pgd, "--strengths", "0.1,0.25") == 0
    assert call("attack", run, *pgd, "--strengths", "0.1,0.25", "--smoothed", "--n", 200) == 0
    shown = capsys.readouterr()
    assert "smoothed, sigma 0.5" in shown.out and "warning" not in shown.err
    certificates = read_rows(CertificateRow, run / "certificates-sigma0.50.tsv")
    rows = [row for row in read_rows(AttackRow, run / "attacks.tsv") if row.target == "smoothed"]
    assert [row.sigma for row in rows] == [0.5, 0.5]
    for row in rows:
        certified = np.mean([c.correct and c.radius >= row.strength for c in certificates])
        assert certified <= row.accuracy and f"{100 * certified:.2f} %" in shown.out


def test_an_attack_that_beats_a_certificate_is_told(run, capsys):
    """A forged radius of 40 sigma: the attack finds it out."""
    file = run / "certificates-sigma0.50.tsv"
    forged = [CertificateRow(r.idx, r.label, r.label, 20.0, 1, r.time, r.n, r.n, 1.0) for r in read_rows(CertificateRow, file)]
    write_certificates(run, forged)
    pgd = ["--attack", "pgd-l2", "--steps", 5, "--starts", 1, "--examples", 20, "--smoothed", "--n", 100]
    assert call("attack", run, *pgd, "--strengths", "8") == 0
    assert "below the certified accuracy 1.0000" in capsys.readouterr().err


def test_other_images_and_the_base_model_are_not_compared(run):
    for smoothed, examples, compared in ((True, 20, True), (False, 20, False)):
        request = attacking.request_for(
            read_config(run), ("pgd-l2",), (0.1,), steps=2, starts=1, smoothed=smoothed, votes=100, examples=examples, batch=7
        )
        assert (attacking.run_attacks(open_run(run), request).certified != [None]) == compared
    request = attacking.request_for(
        read_config(run), ("pgd-l2",), (0.2,), steps=2, starts=1, smoothed=True, votes=100, examples=25
    )
    assert attacking.run_attacks(open_run(run), request).certified == [None]


def test_certificates_in_l2_say_nothing_of_an_attack_in_another_norm(run):
    for name in ("pgd-linf", "fgsm"):
        steps, starts = (None, None) if name == "fgsm" else (2, 1)
        request = attacking.request_for(
            read_config(run), (name,), (0.1,), steps=steps, starts=starts, smoothed=True, votes=100, examples=20
        )
        assert attacking.run_attacks(open_run(run), request).certified == [None]


def test_answers_at_a_radius_are_counted_by_kind(run, monkeypatch):
    """Robust and right, robust and wrong, not robust, not decided: four figures that are not to be mixed up."""
    kinds = [(1, 1)] * 5 + [(1, 0)] * 3 + [(0, 1)] * 2 + [(-1, 1)] * 4
    rows = [RobustRow(3 * place, 0, 0, robust, correct, 0.1, 150) for place, (robust, correct) in enumerate(kinds)]
    monkeypatch.setattr(certifying, "decide_to_file", lambda *arguments, **options: rows)
    found = certifying.decide(open_run(run), certifying.CertifyRequest(Request(0.5, 100, 200), 14), 0.1)
    assert (found["certified_accuracy"], found["undecided"], found["examples"]) == (5 / 14, 4, 14)
    assert found["certified_accuracy_interval"] == list(confidence_interval(5, 14))
    assert (found["votes"], found["votes_of_certify"]) == (14 * 150, 14 * 300)


def test_a_contradiction_is_more_than_chance():
    def found(accuracy, certified):
        low, high = confidence_interval(round(500 * accuracy), 500)
        row = AttackRow("pgd-l2", "smoothed", 0.5, 0.5, 20, 2, 500, accuracy, low, high)
        return attacking.Attacked(Path("attacks.tsv"), [row], [certified]).contradictions

    assert found(0.9, 0.902) == [] and found(0.9, None) == []
    assert len(found(0.8, 0.9)) == 1 and "more votes" in found(0.8, 0.9)[0]


def test_wrong_requests_of_attack(run, capsys):
    assert call("attack", run, "--attack", "pgd-l2", "--steps", 2, "--strengths", "0.1", "--examples", 20) == 0
    before = files(run)
    pgd = ["attack", run, "--attack", "pgd-l2", "--strengths", "0.1"]
    assert "steps: 2 -> 4" in refused(capsys, *pgd, "--steps", 4, "--examples", 20)
    assert "examples: 20 -> 30" in refused(capsys, *pgd, "--steps", 2, "--examples", 30)
    assert "seed: 0 -> 3" in refused(capsys, *pgd, "--steps", 2, "--examples", 20, "--seed", 3)
    assert "--strengths is -0.1" in refused(capsys, "attack", run, "--strengths=-0.1")
    assert "--strengths is 'much'" in refused(capsys, "attack", run, "--strengths", "much")
    assert "--strengths is nan" in refused(capsys, "attack", run, "--strengths", "nan")
    assert "attack 'cw' is unknown; choose one of: fgsm" in refused(capsys, "attack", run, "--attack", "cw")
    assert "add --smoothed" in refused(capsys, "attack", run, "--sigma", 0.5)
    assert "sigma is -1" in refused(capsys, "attack", run, "--smoothed", "--sigma", -1)
    assert "fgsm takes one step" in refused(capsys, "attack", run, "--steps", 3)
    assert files(run) == before


def test_again_replaces_rows_of_other_settings_and_no_others(run, capsys):
    assert call("attack", run, "--strengths", "0.1,0.5", "--examples", 20) == 0
    assert call("attack", run, "--attack", "pgd-l2", "--steps", 2, "--strengths", "0.1", "--examples", 20) == 0
    assert "--again" in refused(capsys, "attack", run, "--strengths", "0.1,0.5", "--examples", 30)
    assert call("attack", run, "--strengths", "0.1", "--examples", 30, "--again") == 0
    found = {(row.attack, row.strength): row.examples for row in read_rows(AttackRow, run / "attacks.tsv")}
    assert found == {("fgsm", 0.1): 30, ("fgsm", 0.5): 20, ("pgd-l2", 0.1): 20}
    before = files(run)
    assert call("attack", run, "--strengths", "0.1", "--examples", 30, "--again") == 0
    assert files(run) == before  # the same settings: nothing to do
    assert "seed: 0 -> 3" in refused(capsys, "attack", run, "--strengths", "0.1", "--seed", 3, "--again")


def test_the_votes_of_smoothed_rows_are_held_to(run, capsys):
    small = ["--strengths", "0.1000000001", "--examples", 10]
    assert call("attack", run, *small, "--smoothed", "--n", 50, "--sigma", 0.12345678) == 0  # rounded in the row
    assert [row.sigma for row in read_rows(AttackRow, run / "attacks.tsv")] == [0.123457]
    assert call("attack", run, *small) == 0  # the base model casts no votes
    assert call("attack", run, *small, "--smoothed", "--n", 50) == 0
    assert "votes: 50 -> 60" in refused(capsys, "attack", run, *small, "--smoothed", "--n", 60)
    assert call("attack", run, *small) == 0


def test_published_certificates_hold_against_the_attack(tmp_path):
    """10 of MNIST's images, PGD on the smoothed model at a radius of 1: no less than is certified."""
    shutil.copytree(PUBLISHED, tmp_path / "run")
    request = attacking.request_for(
        read_config(tmp_path / "run"), ("pgd-l2",), (1.0,), steps=5, starts=1, smoothed=True, votes=300, examples=10
    )
    found = attacking.run_attacks(open_run(tmp_path / "run"), request)
    assert not found.contradictions and found.certified[0] <= found.rows[0].accuracy
