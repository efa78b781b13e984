"""Optional stopping (C5): the e-process keeps alpha under an adversarial stopping rule; naive peeking fails the same test."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import binom

from dpcert.certification import smooth
from dpcert.certification.bounds import lower_confidence_bound
from dpcert.certification.sequence import log_evidence_above, log_evidence_below, looks, running_evidence
from dpcert.rng import Purpose

ALPHA, HORIZON, TRIALS = 0.05, 300, 400


def ever_certified(rule, p, threshold):
    """The adversary looks after every vote and stops at the first moment the rule says "robust"."""
    generator = np.random.default_rng(0)
    return np.mean([rule(generator.random(HORIZON) < p, threshold) for _ in range(TRIALS)])


def by_evidence(votes, threshold):
    return bool((running_evidence(votes, threshold) >= -math.log(ALPHA)).any())


@cache
def bound(wins, votes):
    return lower_confidence_bound(wins, votes, ALPHA)


def by_peeking(votes, threshold):
    wins = np.cumsum(votes)
    return any(bound(int(s), t) > threshold for t, s in enumerate(wins, start=1))


@pytest.mark.parametrize("threshold", [0.6, 0.69, 0.9])
def test_alpha_holds_whenever_one_stops(threshold):
    """At p = threshold (the hardest case) with alpha 0.05 and 400 trials: at most 41 alarms, false alarm rate below 1e-5."""
    assert ever_certified(by_evidence, threshold, threshold) * TRIALS <= binom.ppf(1 - 1e-5, TRIALS, ALPHA)


def test_twin_naive_peeking_breaks_it():
    assert ever_certified(by_peeking, 0.69, 0.69) * TRIALS > binom.ppf(1 - 1e-5, TRIALS, ALPHA)


def boundary(crosses, horizon):
    """The least number of wins after t = 1..horizon votes at which the rule says "robust"; it grows by 0 or 1 a vote."""
    wins, least = 0, []
    for votes in range(1, horizon + 1):
        while wins <= votes and not crosses(wins, votes):
            wins += 1
        least.append(wins)
    return np.array(least, dtype=np.int32)


def ever_crossed(least, p, trials, seed):
    """In how many walks the adversary, who looks after every vote, finds a moment to stop."""
    generator, crossed = np.random.default_rng(seed), 0
    for _ in range(0, trials, 2000):
        walks = (generator.random((2000, len(least)), dtype=np.float32) < p).cumsum(axis=1, dtype=np.int32)
        crossed += int((walks >= least).any(axis=1).sum())
    return crossed


@pytest.mark.slow
def test_an_adversary_who_looks_after_every_vote(evidence):
    """C5: 3 thresholds x 40,000 walks of 2,000 votes at p = threshold, alpha 0.01; false alarm 1e-6 each. Half a minute."""
    alpha, horizon, trials = 0.01, 2000, 40_000
    most = binom.isf(1e-6, trials, alpha)
    kept, peeked = [], []
    for threshold in (0.6, 0.84, 0.977):
        by_e = boundary(lambda s, t, q=threshold: log_evidence_above(s, t, q) >= -math.log(alpha), horizon)
        by_cp = boundary(lambda s, t, q=threshold: lower_confidence_bound(s, t, alpha) > q, horizon)
        kept.append(ever_crossed(by_e, threshold, trials, 0))
        peeked.append(ever_crossed(by_cp, threshold, trials, 0))
    assert max(kept) <= most and min(peeked) > most, (kept, peeked)
    evidence(
        "C5",
        figure=f"at most {max(kept)} of {trials} walks ever certified ({int(most)} allowed at alpha 0.01)",
        trials=3 * trials,
        twin=f"Clopper-Pearson after every vote: {min(peeked)} to {max(peeked)}",
    )


def test_the_boundary_is_that_of_the_running_evidence():
    generator = np.random.default_rng(5)
    least = boundary(lambda s, t: log_evidence_above(s, t, 0.7) >= -math.log(ALPHA), 200)
    for _ in range(20):
        votes = generator.random(200) < 0.75
        assert ((running_evidence(votes, 0.7) >= -math.log(ALPHA)) == (np.cumsum(votes) >= least)).all()


def test_the_evidence_is_a_martingale_at_the_threshold():
    """Exactly: its expectation under p = threshold is 1 after any number of votes, for both directions."""
    for threshold in (0.3, 0.7, 0.95):
        for t in (1, 5, 40):
            wins = np.arange(t + 1)
            weights = binom.pmf(wins, t, threshold)
            for evidence in (log_evidence_above, log_evidence_below):
                values = np.array([math.exp(evidence(int(s), t, threshold)) for s in wins])
                assert float((weights * values).sum()) == pytest.approx(1.0, rel=1e-9)


def test_the_evidence_falls_in_expectation_below_the_threshold():
    weights = binom.pmf(np.arange(21), 20, 0.6)
    values = np.array([math.exp(log_evidence_above(int(s), 20, 0.7)) for s in range(21)])
    assert float((weights * values).sum()) < 1.0


class Biased:
    """Votes for class 1 with a known probability."""

    sigma = 0.5

    def __init__(self, p, seed):
        self.p, self.generator = p, np.random.default_rng(seed)

    def count(self, x, start, stop, purpose, index):
        ones = int(self.generator.binomial(stop - start, self.p))
        if purpose is Purpose.CERTIFY_SELECTION:
            ones = stop - start
        return np.array([stop - start - ones, ones])


def decide(p, seed, radius=0.25, alpha=0.001):
    return smooth.robust_at(Biased(p, seed), torch.zeros(1), radius, 100, 10_000, alpha)


def test_easy_inputs_take_few_votes():
    found = [decide(0.9999, seed) for seed in range(50)]
    assert all(d.robust for d in found) and max(d.votes for d in found) <= 100 + 96
    hopeless = [decide(0.3, seed) for seed in range(50)]
    assert not any(d.robust for d in hopeless) and max(d.votes for d in hopeless) <= 100 + 200


def test_false_answers_are_rare():
    threshold = float(ndtr(0.25 / 0.5))
    assert sum(decide(threshold, seed, alpha=0.01).robust is True for seed in range(300)) <= 12


def test_looks_grow_and_end():
    assert looks(10_000)[0] == 32 and looks(10_000)[-1] == 10_000 and looks(10) == [10]
    assert len(looks(10_000)) < 25 and looks(10_000) == sorted(set(looks(10_000)))
