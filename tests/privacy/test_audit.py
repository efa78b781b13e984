"""The audit's arithmetic: exact Gaussian epsilon, Clopper-Pearson, and a lower bound that keeps its confidence."""

import math

import numpy as np
import pytest
from scipy import stats

from dpcert.privacy import accounting
from dpcert.privacy.accounting import gaussian_epsilon
from dpcert.privacy.audit import lower_bound


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_epsilon_solves_its_equation_and_agrees_with_the_pld(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    back = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert back == pytest.approx(delta, rel=1e-6) or epsilon == 0.0
    if mu <= 5.0:
        pld = accounting.epsilon(noise_multiplier=1 / mu, sampling_probability=1.0, steps=1, delta=delta)
        assert epsilon == pytest.approx(pld, abs=2e-3)


def test_nothing_told_apart_is_nothing_shown():
    scores = np.arange(1000) % 2
    bound = lower_bound(scores, scores, 0.5)
    assert bound.mu == 0.0 and bound.gaussian_epsilon == 0.0 and bound.any_epsilon == 0.0


def test_perfect_guesses_reach_the_ceiling():
    bound = lower_bound(np.zeros(1000), np.ones(1000), 0.5)
    assert bound.gaussian_epsilon == bound.ceiling > 10
    assert bound.any_epsilon == pytest.approx(math.log((1 - 1e-5 - bound.false_negatives) / bound.false_positives))


def test_scores_that_are_no_numbers_are_wrong_guesses():
    assert lower_bound(np.full(100, math.nan), np.full(100, math.nan), 0.0).gaussian_epsilon == 0.0


def test_the_two_error_rates_share_the_risk():
    """Clopper and Pearson's upper bounds, each at half of the risk: 3 and 5 wrong guesses of 100 at confidence 0.9."""
    without, with_canary = (np.arange(100) >= 97).astype(float), (np.arange(100) >= 5).astype(float)
    bound = lower_bound(without, with_canary, 0.5, confidence=0.9)
    assert bound.false_positives == pytest.approx(stats.binomtest(3, 100).proportion_ci(0.9).high)
    assert bound.false_negatives == pytest.approx(stats.binomtest(5, 100).proportion_ci(0.9).high)


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_the_bound_passes_the_truth_as_rarely_as_it_says(mu):
    """1,000 audits of an ideal Gaussian mechanism at confidence 0.95: at most 5 % pass (false alarm of this test 1e-6)."""
    generator = np.random.default_rng(0)
    trials, passed = 1000, 0
    for _ in range(trials):
        bound = lower_bound(generator.normal(0, 1, 300), generator.normal(mu, 1, 300), mu / 2, confidence=0.95)
        passed += bound.mu > mu
    assert passed <= stats.binom.isf(1e-6, trials, 0.05)
    assert lower_bound(generator.normal(0, 1, 10**5), generator.normal(mu, 1, 10**5), mu / 2).mu > mu - 0.05


def test_the_twin_without_confidence_bounds_passes_the_truth_half_the_time():
    generator, passed = np.random.default_rng(0), 0
    for _ in range(400):
        a, b = np.mean(generator.normal(0, 1, 300) > 0.5), np.mean(generator.normal(1, 1, 300) <= 0.5)
        passed += stats.norm.isf(a) - stats.norm.ppf(b) > 1.0
    assert passed > 100
