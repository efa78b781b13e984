"""`SmoothedClassifier`: prepared once, called often, with noise of its own in every call."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import dpcert
from dpcert.certification import votes
from dpcert.certification.sweep import Request
from dpcert.errors import DataError
from tests.certification.test_bank import ClampedFarOut

X = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1])


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 3))


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("predict", "radius", "count", "correct", "p_lower"))


@pytest.mark.parametrize("fresh_noise", [False, True])
def test_it_gives_what_certify_gives(fresh_noise):
    smooth = dpcert.SmoothedClassifier(model(), 0.5, fresh_noise=fresh_noise)
    for seed in (3, 4):
        expected = dpcert.certify(model(), X, Y, sigma=0.5, n=300, seed=seed, fresh_noise=fresh_noise)
        assert same(smooth.certify(X, Y, n=300, seed=seed), expected)


def test_it_is_prepared_once_and_draws_noise_for_each_call(monkeypatch):
    prepared, drawn = [], []
    real_compile, real_draw = votes.compile_rest, votes.draw_bank
    monkeypatch.setattr(votes, "compile_rest", lambda *words: prepared.append(1) or real_compile(*words))
    monkeypatch.setattr(votes, "draw_bank", lambda *words: drawn.append(words[2]) or real_draw(*words))
    smooth = dpcert.SmoothedClassifier(model(), 0.5)
    counts = [smooth.certify(X, n=2000).count for _ in range(4)]
    assert len(prepared) == 1 and len(set(drawn)) == 4
    assert len({tuple(count.tolist()) for count in counts}) > 1


def test_a_later_change_of_the_model_does_not_reach_it():
    own = model()
    smooth = dpcert.SmoothedClassifier(own, 0.5)
    before = smooth.certify(X, Y, n=200, seed=1)
    with torch.no_grad():
        own[3].weight.neg_()
    assert same(smooth.certify(X, Y, n=200, seed=1), before)


def test_inputs_for_which_the_prepared_cut_is_wrong_are_voted_on_whole(monkeypatch):
    """A clamp far out is not seen at the first inputs; the cut is checked again for the inputs of each call."""
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    smooth = dpcert.SmoothedClassifier(ClampedFarOut(), 0.5)
    smooth.certify(x, n=50)
    whole = dpcert.SmoothedClassifier(ClampedFarOut(), 0.5, fresh_noise=True).certify(100 * x, n=400, seed=2)
    assert torch.equal(smooth.certify(100 * x, n=400, seed=2).count, whole.count)
    mixed = torch.cat([x.repeat(30, 1, 1, 1), 100 * x])  # the inputs that tell are the last of many
    assert smooth.certify(mixed[-4:], n=50).predict.shape == (4,)
    with smooth.counters(mixed, Request(0.5), bytes(32)) as counters:
        assert all(isinstance(counter, votes.FreshVotes) for counter in counters)
    monkeypatch.setattr(votes, "cut_is_the_same", lambda *words: True)  # the broken twin
    assert not torch.equal(smooth.certify(100 * x, n=400, seed=2).count, whole.count)


def test_calls_from_several_threads_do_not_disturb_each_other():
    smooth = dpcert.SmoothedClassifier(model(), 0.5)
    expected = [smooth.certify(X, Y, n=500, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda seed: smooth.certify(X, Y, n=500, seed=seed), range(4)))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_no_call_runs_the_split_model_of_another_one(monkeypatch):
    """Running it replaces a method of its first layer: a shared one would give a thread the features of another."""
    used, real = [], votes.draw_bank
    monkeypatch.setattr(votes, "draw_bank", lambda made, *words: used.append(made) or real(made, *words))
    smooth = dpcert.SmoothedClassifier(model(), 0.5)
    for _ in range(2):
        smooth.certify(X, n=50)
    kept = smooth._voter._prepared[tuple(X.shape[1:]), False].cut
    assert used[0] is not used[1] and kept not in used


def test_predictions_and_decisions_are_typed():
    smooth = dpcert.SmoothedClassifier(model(), 0.25)
    assert smooth.predict(X, n=400).shape == (5,)
    decisions = smooth.robust_at(X, 0.05, n=4000, seed=1)
    certified = smooth.certify(X, n=4000, seed=1)
    assert decisions.radius == 0.05 and set(decisions.robust.tolist()) <= {-1, 0, 1} and int(decisions.votes.max()) <= 4100
    assert all(radius > 0.05 for radius, robust in zip(certified.radius, decisions.robust, strict=True) if robust == 1)


def test_wrong_requests_are_refused():
    smooth = dpcert.SmoothedClassifier(model(), 0.5)
    for wrong in (
        lambda: dpcert.SmoothedClassifier(model(), 0.0),
        lambda: smooth.certify(X, Y[:2]),
        lambda: smooth.certify(X, skip_misclassified=True),
        lambda: smooth.certify(X * float("nan")),
        lambda: smooth.robust_at(X, 0.0),
        lambda: smooth.predict(X, alpha=0.7),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(DataError, match="needs labels"):
        smooth.certify(X, skip_misclassified=True)
