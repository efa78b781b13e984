"""C7: what a certificate names, in the published run and in a new request; anything else beside the rows is refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import dpcert
from dpcert.certification.bounds import certified_radius, lower_confidence_bound
from dpcert.certification.sweep import Request
from dpcert.certification.votes import winners
from dpcert.rounding import floor_text
from dpcert.runs.certify import CertifyRequest, certify
from dpcert.runs.open import open_run
from dpcert.store.durable import sha256_hex
from dpcert.store.records import CertificateRow, read_rows

PUBLISHED = Path(__file__).parents[2] / "results" / "mnist-dp-gaussian"
NAMED = {"sigma", "n0", "n", "alpha", "alpha_is", "dtype", "model_sha256", "images_sha256", "noise_key", "split"}


def check(directory, stem):
    """The sidecar names everything, and every radius follows from its own row and the sidecar. Returns the rows."""
    facts = json.loads((directory / f"{stem}.json").read_text())
    assert set(facts) >= NAMED
    assert facts["alpha_is"] == "per input" and facts["dtype"] == "float32"
    assert facts["model_sha256"] == sha256_hex((directory / "model.safetensors").read_bytes())
    rows = read_rows(CertificateRow, directory / f"{stem}.tsv")
    for row in rows:
        p_lower = lower_confidence_bound(row.count, row.n, facts["alpha"])
        assert row.n == facts["n"] and row.p_lower <= p_lower < row.p_lower + 1e-6
        radius = certified_radius(p_lower, facts["sigma"])
        assert row.radius == float(floor_text(radius, 6)) and (row.predict >= 0) == (radius > 0)
    return rows


def test_the_published_certificates_name_what_they_stand_on(evidence):
    rows = check(PUBLISHED, "certificates-sigma0.50")
    assert len(rows) == 1000
    evidence(
        "C7", figure="alpha, n0, n, sigma, dtype, model SHA-256 named; every radius follows from its row", trials=len(rows)
    )


def asked(path, **changes):
    how = Request(**({"sigma": 0.5, "n0": 20, "n": 100, "alpha": 0.01} | changes))
    return certify(open_run(path), CertifyRequest(how, examples=2, seed=0))


@pytest.fixture
def copied(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(PUBLISHED, run)
    for file in run.glob("certificates*"):
        file.unlink()
    return run


def test_a_new_request_names_its_own_numbers_and_another_is_kept_apart(copied):
    asked(copied)
    assert len(check(copied, "certificates-sigma0.50")) == 2
    asked(copied, alpha=0.02)
    assert len(check(copied, "certificates-sigma0.50-n020-n100-alpha0.02")) == 2


@pytest.mark.parametrize("name", ["alpha", "sigma", "n0", "model_sha256", "dtype"])
def test_twin_a_sidecar_that_says_something_else_is_refused(copied, name):
    asked(copied)
    sidecar = copied / "certificates-sigma0.50.json"
    facts = json.loads(sidecar.read_text())
    facts[name] = 0.25 if isinstance(facts[name], (int, float)) else "another"
    sidecar.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="certificates-sigma0.50"):
        asked(copied)


class SometimesBroken(nn.Module):
    """Class 1 for most noisy inputs; where the first pixel is large a NaN, where the last is a tie; class 2 there if not `broken`."""

    def __init__(self, broken):
        super().__init__()
        self.broken = broken

    def forward(self, x):
        first, last = x.flatten(1)[:, :1] > 0.3, x.flatten(1)[:, -1:] > 0.3
        right, other = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]])
        logits = torch.where(last, torch.ones(1, 3) if self.broken else other, right)
        return torch.where(first, torch.full((1, 3), math.nan) if self.broken else other, logits)


def test_nans_and_ties_are_wrong_votes_of_a_certificate(evidence):
    """They are in n and not in the count: the certificate is that of a classifier that was wrong there."""
    x = torch.zeros(1, 1, 4, 4)
    clean, broken = (dpcert.certify(SometimesBroken(b), x, [1], sigma=0.5, n=1280, seed=0, batch=1280) for b in (False, True))
    wrong = 1280 - clean.count.item()
    assert 400 < wrong < 900 and broken.count.item() == 1280 - wrong and broken.n == 1280
    assert broken.p_lower.item() == pytest.approx(lower_confidence_bound(1280 - wrong, 1280, 0.001))
    left_out = lower_confidence_bound(1280 - wrong, 1280 - wrong, 0.001)  # the twin: n without the broken votes
    assert left_out > broken.p_lower.item() + 0.2
    assert winners(torch.full((3, 2), math.inf)).sum() == 0
    evidence(
        "C7",
        figure=f"{wrong} NaN logits and ties of 1,280 counted as wrong votes",
        trials=1280,
        twin="left out of n: p too high",
    )
