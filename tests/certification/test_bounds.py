"""Clopper-Pearson and the radius: coverage computed exactly, not simulated."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpcert.certification.bounds import certified_radius, confidence_interval, lower_confidence_bound, top_two_differ


def failure(bound, n, p, alpha):
    """The exact probability that a lower bound lies above the true p."""
    counts = np.arange(n + 1)
    above = np.array([bound(int(k), n, alpha) > p for k in counts])
    return float(binom.pmf(counts, n, p)[above].sum())


def wald(k, n, alpha):
    share = k / n
    return share - norm.ppf(1 - alpha) * math.sqrt(share * (1 - share) / n)


PROBABILITIES = [0.01, 0.3, 0.5, 0.501, 0.77, 0.9, 0.99, 0.999, 0.9999]


@pytest.mark.parametrize("n", [10, 100, 1000])
@pytest.mark.parametrize("alpha", [0.001, 0.05])
def test_coverage_is_exact(n, alpha):
    assert all(failure(lower_confidence_bound, n, p, alpha) <= alpha for p in PROBABILITIES)


@pytest.mark.parametrize("twin", [wald, lambda k, n, a: lower_confidence_bound(k, n, 2 * a)], ids=["Wald", "doubled alpha"])
def test_twin_another_bound_fails(twin):
    assert any(failure(twin, n, p, 0.001) > 0.001 for n in (100, 1000) for p in PROBABILITIES)


def test_coverage_is_not_wasted():
    """The bound is the largest valid one: at its own value the failure is alpha."""
    for k in (3, 50, 97):
        bound = lower_confidence_bound(k, 100, 0.01)
        assert binom.sf(k - 1, 100, bound) == pytest.approx(0.01, rel=1e-6)


def test_edges():
    assert lower_confidence_bound(0, 100, 0.001) == 0.0
    assert lower_confidence_bound(100, 100, 0.001) == pytest.approx(0.001 ** (1 / 100))
    assert confidence_interval(0, 10)[0] == 0.0 and confidence_interval(10, 10)[1] == 1.0
    assert certified_radius(0.5, 1.0) == 0.0 and certified_radius(0.3, 1.0) == 0.0
    assert certified_radius(norm.cdf(2.0), 0.25) == pytest.approx(0.5)


def test_the_largest_radius_of_the_papers_setting():
    """n = 10,000 votes of 10,000 at alpha 0.001: 3.2 sigma, which bounds every ACR at sigma 0.5 by 1.6."""
    assert certified_radius(lower_confidence_bound(10_000, 10_000, 0.001), 0.5) == pytest.approx(1.5995, abs=1e-3)


def test_the_top_two_must_differ_significantly():
    assert top_two_differ(80, 20, 0.001) and not top_two_differ(55, 45, 0.001) and not top_two_differ(0, 0, 0.5)
