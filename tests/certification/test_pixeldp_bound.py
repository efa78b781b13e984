"""PixelDP's own bound: the figures that are known of it, that it is valid, and that it is loose."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpcert.certification.bounds import (
    PIXELDP_DELTAS,
    _private_change,
    certified_radius,
    lower_confidence_bound,
    pixeldp_radius,
)


def largest(low: float, high: float) -> float:
    return max(_private_change(low, high, delta) for delta in PIXELDP_DELTAS)


@pytest.mark.parametrize(("p", "native", "cohen"), [(0.9, 0.39, 1.28), (0.99, 0.55, 2.33), (0.999, 0.57, 3.09)])
def test_the_figures_at_known_probabilities(p, native, cohen):
    assert round(largest(p, 1.0 - p), 2) == native and round(certified_radius(p, 1.0), 2) == cohen


def delta_of_gaussian(eps: float, sigma: float) -> float:
    """The exact delta of the Gaussian mechanism with sensitivity 1 (Balle and Wang 2018)."""
    return float(norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps) * norm.cdf(-0.5 / sigma - eps * sigma))


def test_the_mechanism_has_the_privacy_that_the_bound_uses():
    """For all eps <= 1 and deltas of the grid; far above 1 the formula is not valid, which is why eps is capped."""
    for delta in PIXELDP_DELTAS:
        for eps in np.linspace(0.01, 1.0, 25):
            assert delta_of_gaussian(eps, math.sqrt(2.0 * math.log(1.25 / delta)) / eps) <= delta
    assert any(delta_of_gaussian(8.0, math.sqrt(2.0 * math.log(1.25 / d)) / 8.0) > d for d in PIXELDP_DELTAS)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.sampled_from(PIXELDP_DELTAS))
@settings(max_examples=200, deadline=None)
def test_the_largest_eps_satisfies_the_condition_and_no_larger_one_does(low, high, delta):
    change = _private_change(low, high, delta)
    eps = change * math.sqrt(2.0 * math.log(1.25 / delta))

    def holds(eps: float, slack: float) -> bool:
        return low + slack >= math.exp(2 * eps) * high + (1 + math.exp(eps)) * delta

    assert 0.0 <= eps <= 1.0 + 1e-12
    assert eps == 0.0 or holds(eps, 1e-9)
    assert eps >= 1.0 - 1e-9 or not holds(eps + 1e-6, -1e-9) or eps == 0.0


@given(st.lists(st.integers(0, 500), min_size=2, max_size=6), st.integers(0, 50), st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_never_above_the_common_bound_and_bounds_all_classes(votes, wrong, data):
    n = sum(votes) + wrong
    if n == 0:
        return
    selected = data.draw(st.integers(0, len(votes) - 1))
    found = pixeldp_radius(votes, selected, n, 0.01, 0.5)
    common = certified_radius(lower_confidence_bound(votes[selected], n, 0.01), 0.5)
    assert found <= max(common, 0.0) or common == 0.0
    if found > 0.0:
        assert votes[selected] == max(votes)


def test_votes_for_no_class_may_belong_to_the_runner_up():
    sure = pixeldp_radius([900, 50, 50], 0, 1000, 0.001, 1.0)
    assert sure > 0.0
    assert pixeldp_radius([600, 0, 0], 0, 1000, 0.001, 1.0) < sure  # 400 ties or NaNs
    assert pixeldp_radius([500, 0, 0], 0, 1000, 0.001, 1.0) == 0.0
    assert pixeldp_radius([1000, 0], 0, 1000, 0.001, 1.0) > pixeldp_radius([1000] + [0] * 99, 0, 1000, 0.001, 1.0)  # Bonferroni


def test_a_half_space_is_not_certified_beyond_its_distance():
    """No radius of 2,000 is above the true distance: the bound is far from tight."""
    rng = np.random.default_rng(0)
    distances = rng.uniform(0.02, 2.0, 2000)
    wins = rng.binomial(10_000, norm.cdf(distances))
    found = np.array([pixeldp_radius([int(w), 10_000 - int(w)], 0, 10_000, 0.001, 1.0) for w in wins])
    assert (found > distances).sum() == 0 and found.max() > 0.5
    assert (5.0 * found > distances).sum() > 24  # the twin: a bound that claims more is found out
