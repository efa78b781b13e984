"""`dpcert certify --simultaneous`: a file of its own, and every fact of it named (C7)."""

import json

from dpcert.store.records import CertificateRow, read_rows

from .conftest import call

JOINT = "certificates-sigma0.50-simultaneous20"


def test_the_certificates_name_what_they_stand_on(finished, evidence):
    facts = json.loads((finished / f"{JOINT}.json").read_text())
    entry = next(e for e in json.loads((finished / "metrics.json").read_text())["certification"] if e["file"] == f"{JOINT}.tsv")
    named = {"sigma": 0.5, "n0": 100, "n": 200, "alpha": 0.001, "alpha_is": "simultaneous", "together": 20, "alpha_each": 5e-5}
    assert {name: facts[name] for name in named} == {name: entry[name] for name in named} == named
    assert facts["dtype"] == "float32" and len(facts["model_sha256"]) == 64
    plain = json.loads((finished / "certificates-sigma0.50.json").read_text())
    assert plain["alpha_is"] == "per input" and "together" not in plain
    figure = "sigma, n0, n, alpha, per-input or simultaneous, dtype and model SHA-256 named by sidecar and metrics"
    evidence("C7", figure=figure, trials=2)


def test_they_do_not_mix_with_certificates_per_input(finished):
    joint = read_rows(CertificateRow, finished / f"{JOINT}.tsv")
    plain = read_rows(CertificateRow, finished / "certificates-sigma0.50.tsv")
    assert [row.idx for row in joint] == [row.idx for row in plain]
    best = max(row.radius for row in joint)
    assert best < max(row.radius for row in plain)  # all 200 votes: a smaller alpha, a smaller radius


def test_the_terminal_says_that_they_hold_together(copied, capsys):
    before = (copied / f"{JOINT}.tsv").read_bytes()
    assert call("certify", copied, "--n", 200, "--examples", 20, "--simultaneous") == 0
    assert "all 20 certificates hold together with probability at least 1 - 0.001" in capsys.readouterr().out
    assert (copied / f"{JOINT}.tsv").read_bytes() == before
    assert call("certify", copied, "--n", 200, "--examples", 20) == 0
    assert "each certificate holds on its own with probability at least 1 - 0.001" in capsys.readouterr().out
    assert call("certify", copied, "--n", 200, "--examples", 10, "--simultaneous") == 0  # fewer: another share of alpha
    assert (copied / "certificates-sigma0.50-simultaneous10.tsv").exists() and (copied / f"{JOINT}.tsv").read_bytes() == before
    assert call("certify", copied, "--n", 200, "--examples", 20, "--simultaneous", "--radius", 0.1) == 0
    assert "all 20 answers hold together" in capsys.readouterr().out
    assert (copied / "robust-sigma0.50-r0.1-simultaneous20.tsv").exists()
    assert call("verify", copied) == 0


def test_the_report_tells_them_apart(finished, tmp_path, capsys):
    assert call("report", finished, "--html", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "for all 20 images together" in page and "per image" in page and "0.5, simultaneous" in capsys.readouterr().out
