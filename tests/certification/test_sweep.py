"""Rows on disk: resumable at any byte, extended in place, checked when read."""

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from scipy.stats import beta, binom

import dpcert
from dpcert.certification.metrics import even_subset
from dpcert.certification.sweep import Request, certify_to_file, decide_to_file
from dpcert.rng import key_from_seed
from dpcert.store.records import CertificateRow, RobustRow, read_rows, row_of, text_of

KEY = key_from_seed(0, "certify")
X = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
MODEL = dpcert.build_model("linear", input_shape=(1, 8, 8), classes=3, seed=0)


def sweep(path, indices):
    return certify_to_file(MODEL, X, Y, indices, path, Request(0.5, 20, 100, 0.01), key=KEY)


def without_time(path):
    drop = {5, 9}  # time, and the checksum that covers it
    return [
        [cell for place, cell in enumerate(line.split("\t")) if place not in drop] for line in path.read_text().splitlines()
    ]


def test_a_sweep_cut_at_any_byte_goes_on_to_the_same_rows(tmp_path):
    whole = tmp_path / "whole.tsv"
    sweep(whole, range(6))
    data = whole.read_bytes()
    for cut in range(0, len(data), 23):
        path = tmp_path / f"cut{cut}.tsv"
        path.write_bytes(data[:cut])
        if 0 < cut < data.index(b"\n") + 1:  # half a header is not a certificate file we know
            path.write_bytes(b"")
        sweep(path, range(6))
        assert without_time(path) == without_time(whole)


def test_finished_rows_are_left_alone_and_more_examples_extend_them(tmp_path):
    path = tmp_path / "rows.tsv"
    sweep(path, [0, 4, 8])
    before, modified = path.read_bytes(), path.stat().st_mtime_ns
    sweep(path, [0, 4, 8])
    assert path.read_bytes() == before and path.stat().st_mtime_ns == modified
    rows = sweep(path, range(0, 12, 2))
    assert [row.idx for row in read_rows(CertificateRow, path)] == [0, 2, 4, 6, 8, 10] == [row.idx for row in rows]
    assert set(before.splitlines()) <= set(path.read_bytes().splitlines())


def test_rows_agree_with_the_tensors_of_the_python_call(tmp_path):
    rows = sweep(tmp_path / "rows.tsv", range(12))
    found = dpcert.certify(MODEL, X, Y, sigma=0.5, n0=20, n=100, alpha=0.01, seed=0)
    assert [row.predict for row in rows] == found.predict.tolist()
    assert [bool(row.correct) for row in rows] == found.correct.tolist() == (found.predict == Y).tolist()
    assert np.allclose([row.radius for row in rows], found.radius.numpy(), atol=1e-6)
    assert all(row.radius <= radius for row, radius in zip(rows, found.radius.tolist(), strict=True))  # rounded down


def test_every_changed_byte_of_a_row_is_seen(tmp_path):
    path = tmp_path / "rows.tsv"
    sweep(path, range(3))
    data = path.read_bytes()
    for position in range(data.index(b"\n") + 1, len(data) - 1, 3):
        changed = bytearray(data)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(ValueError, match="certif"):
            read_rows(CertificateRow, path)


def test_rows_read_and_written_again_keep_their_bytes():
    for radius, p in ((1.234567891, 0.999309), (0.1 + 0.2, 0.3), (0.0, 0.0), (1e-7, 1 - 1e-12), (1.6, 0.5)):
        text = text_of(CertificateRow(3, 1, 1, radius, 1, 0.5, 99, 100, p))
        again = row_of(CertificateRow, text)
        assert text_of(again) == text and again.radius <= radius
    skipped = CertificateRow(3, 1, 2, 0.0, 0, 0.5, None, 100, 0.0)
    assert row_of(CertificateRow, text_of(skipped)) == skipped
    decision = RobustRow(3, 1, 2, -1, 0, 0.5, 10_100)
    assert row_of(RobustRow, text_of(decision)) == decision


def test_even_subset():
    assert (
        even_subset(10, 3) == [0, 3, 6]
        and even_subset(8, 5) == [0, 1, 3, 4, 6]
        and even_subset(10, 10) == list(range(10))
        and even_subset(10_000, 500)[-1] == 9980
    )


def test_decisions_at_a_radius_are_rows_too(tmp_path):
    path = tmp_path / "robust.tsv"
    request = Request(0.5, 20, 2000, 0.01)
    whole = decide_to_file(MODEL, X, Y, range(12), path, request, 0.1, key=KEY)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    again = decide_to_file(MODEL, X, Y, range(12), path, request, 0.1, key=KEY)
    assert [(r.idx, r.predict, r.robust, r.votes) for r in whole] == [(r.idx, r.predict, r.robust, r.votes) for r in again]
    with pytest.raises(ValueError, match="radius is 0"):
        decide_to_file(MODEL, X, Y, range(2), path, request, 0.0, key=KEY)


def test_skipping_misclassified_examples_keeps_every_figure(tmp_path):
    plain = dpcert.certify(MODEL, X, Y, sigma=0.5, n=500, seed=0)
    skipped = dpcert.certify(MODEL, X, Y, sigma=0.5, n=500, seed=0, skip_misclassified=True)
    assert plain.acr == skipped.acr and plain.certified_accuracy(0.1) == skipped.certified_accuracy(0.1)
    wrong = skipped.count == -1
    assert (plain.count >= 0).all()  # nobody asked to skip here
    assert wrong.any() and (skipped.radius[wrong] == 0).all() and (skipped.predict[wrong] != Y[wrong]).all()
    assert torch.equal(plain.count[~wrong], skipped.count[~wrong])


# ------------------------------------------------------------------ simultaneous certificates


class KnownVotes:
    """A classifier whose top class has probability p exactly: the true radius is known."""

    def __init__(self, p, sigma, generator):
        self.p, self.sigma, self.generator = p, sigma, generator

    def count(self, x, start, stop, purpose, index):
        wins = int(self.generator.binomial(stop - start, self.p))
        return np.array([wins, stop - start - wins])


def families_with_a_failure(together, *, inputs=30, trials=300, alpha=0.05, p=0.8, sigma=0.5):
    """In how many of the trials some certificate of the family claims more than the true radius."""
    counter = KnownVotes(p, sigma, np.random.default_rng(0))
    request = Request(sigma, 20, 400, alpha, together=together)
    truth = sigma * float(ndtri(p))
    return sum(any(request.certify(counter, None, 0, index).radius > truth for index in range(inputs)) for _ in range(trials))


def test_simultaneous_certificates_hold_all_together(evidence):
    trials, alpha = 300, 0.05
    most = int(binom.isf(1e-6, trials, alpha))
    joint, alone = families_with_a_failure(30), families_with_a_failure(None)
    assert joint <= most < alone  # the twin: alpha per input is no promise about all of them
    figure = f"{joint} of {trials} families of 30 with a failure at alpha {alpha} (at most {most})"
    evidence("C7", figure=figure, trials=trials, twin=f"alpha per input: {alone} families fail")


def test_simultaneous_is_alpha_over_the_number_of_inputs():
    settings = {"sigma": 0.5, "n": 500, "seed": 0}
    joint = dpcert.certify(MODEL, X, Y, alpha=0.012, simultaneous=True, **settings)
    same = dpcert.certify(MODEL, X, Y, alpha=0.001, **settings)
    plain = dpcert.certify(MODEL, X, Y, alpha=0.012, **settings)
    assert torch.equal(joint.radius, same.radius) and (joint.radius <= plain.radius).all() and joint.acr < plain.acr
    oracle = [beta.ppf(0.012 / 12, count, 500 - count + 1) if count else 0.0 for count in joint.count.tolist()]
    assert np.allclose(joint.p_lower.numpy(), oracle, rtol=1e-12)
    assert joint.simultaneous and not plain.simultaneous and joint.alpha == plain.alpha == 0.012


def test_a_request_names_what_alpha_is():
    assert Request(0.5).facts["alpha_is"] == "per input" and "together" not in Request(0.5).facts
    facts = Request(0.5, alpha=0.01, together=20).facts
    assert facts["alpha_is"] == "simultaneous" and facts["together"] == 20 and facts["alpha_each"] == 0.01 / 20
    with pytest.raises(ValueError, match="together is 0"):
        Request(0.5, together=0)


def test_decisions_share_alpha_too(tmp_path):
    alone = decide_to_file(MODEL, X, Y, range(12), tmp_path / "a.tsv", Request(0.5, 20, 5000, 0.01), 0.1, key=KEY)
    joint = decide_to_file(MODEL, X, Y, range(12), tmp_path / "j.tsv", Request(0.5, 20, 5000, 0.01, together=12), 0.1, key=KEY)
    assert sum(row.votes for row in joint) > sum(row.votes for row in alone)
