"""The figures of a set of certificates: by hand, and how often their intervals hold the figure of the whole test set."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from dpcert.certification.metrics import (
    average_certified_radius,
    average_gain,
    certified_accuracy,
    even_subset,
    is_about,
    radii_to_show,
)

RADIUS, CORRECT = np.array([0.5, 0.25, 0.8, 0.0, 0.1]), np.array([True, True, False, False, True])


def test_acr_by_hand():
    earned = [0.5, 0.25, 0.0, 0.0, 0.1]
    half = 1.96 * statistics.stdev(earned) / math.sqrt(5)
    acr = average_certified_radius(RADIUS, CORRECT)
    assert (acr.value, acr.low, acr.high) == pytest.approx((0.17, max(0.0, 0.17 - half), 0.17 + half))


def test_a_radius_is_never_negative_and_one_image_says_nothing_of_others():
    rare = average_certified_radius(np.array([1.0, 0, 0, 0]), np.array([True, False, False, False]))
    assert rare.low == 0.0 and rare.high > rare.value
    alone = average_certified_radius(np.array([1.0]), np.array([True]))
    assert (alone.value, alone.low, alone.high) == (1.0, 0.0, math.inf)


def test_certified_accuracy_counts_right_answers_whose_radius_reaches():
    assert [certified_accuracy(RADIUS, CORRECT, at).value for at in (0.0, 0.25, 0.2500001, 0.8)] == [0.6, 0.4, 0.2, 0.0]
    figure = certified_accuracy(RADIUS, CORRECT, 0.25)
    assert binom.sf(1, 5, figure.low) == pytest.approx(0.025) and binom.cdf(2, 5, figure.high) == pytest.approx(0.025)


@pytest.mark.parametrize(("sigma", "last"), [(0.25, 1.0), (0.3, 1.0), (0.5, 2.0), (1.0, 4.0), (0.05, 0.0)])
def test_radii_are_shown_every_quarter_up_to_four_sigma(sigma, last):
    radii = radii_to_show(sigma)
    assert radii == [0.25 * place for place in range(len(radii))] and radii[-1] == last


def test_a_gain_may_be_a_loss():
    gain = average_gain(np.array([0.1, 0.2, 0.3]), np.array([0.3, 0.3, 0.3]))
    half = 1.96 * 0.1 / math.sqrt(3)
    assert (gain.value, gain.low, gain.high) == pytest.approx((-0.1, -0.1 - half, -0.1 + half))


def _held(interval_of, trials=2000, images=400):
    """How often the interval from a draw of `images` holds the gain of the law: theirs is uniform, ours 0.02 more with spread."""
    rng, held, width = np.random.default_rng(0), 0, 0.0
    for _ in range(trials):
        theirs = rng.uniform(0.0, 1.6, images)
        ours = theirs + rng.normal(0.02, 0.1, images)
        low, high = interval_of(ours, theirs)
        held, width = held + (low <= 0.02 <= high), width + (high - low) / trials
    return held / trials, width


def test_the_interval_of_a_gain_holds_as_often_as_it_says_and_is_narrow():
    """Twin: the difference of two means, as if they were of different images, never misses because it says next to nothing."""

    def paired(ours, theirs):
        gain = average_gain(ours, theirs)
        return gain.low, gain.high

    def unpaired(ours, theirs):
        half = 1.96 * math.sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
        middle = ours.mean() - theirs.mean()
        return middle - half, middle + half

    share, width = _held(paired)
    assert binom.ppf(1e-4, 2000, 0.95) / 2000 <= share <= binom.ppf(1 - 1e-4, 2000, 0.95) / 2000
    twin_share, twin_width = _held(unpaired)
    assert twin_share == 1.0 and twin_width > 5 * width


@pytest.mark.parametrize("value", [0.0, 0.7, 1.6])
def test_equal_radii_leave_an_interval(value):
    """By hand: 500 of 500 draws alike leave up to 0.735 % of others unseen, which may have radius 0 or 1.6."""
    missed = 1 - 0.025 ** (1 / 500)
    found = average_certified_radius(np.full(500, value), np.full(500, True), 1.6)
    assert missed == pytest.approx(0.00735, abs=1e-5)
    assert (found.low, found.high) == pytest.approx(((1 - missed) * value, (1 - missed) * value + missed * 1.6))
    assert found.value == value and found.low <= value <= found.high and found.high - found.low > 0.01
    same = average_gain(np.full(500, value), np.full(500, value), 1.6)
    assert same.value == 0.0 and (same.low, same.high) == pytest.approx((-missed * 1.6, missed * 1.6))


def test_the_interval_where_the_radii_have_a_spread_is_the_normal_one():
    radius = np.random.default_rng(0).uniform(0.0, 1.6, 500)
    right = np.full(500, True)
    assert average_certified_radius(radius, right, 1.6) == average_certified_radius(radius, right)
    assert average_gain(radius, radius[::-1], 1.6) == average_gain(radius, radius[::-1])


def _coverage(law, largest, trials=2000, images=500):
    """How often the interval holds the mean of a law of two radii: a share has the first one, the rest the second."""
    share, rare, common = law
    rng, mean, held = np.random.default_rng(1), share * rare + (1 - share) * common, 0
    for _ in range(trials):
        radius = np.where(rng.random(images) < share, rare, common)
        found = average_certified_radius(radius, np.full(images, True), largest)
        held += found.low <= mean <= found.high
    return held / trials


@pytest.mark.parametrize("law", [(0.002, 0.0, 1.6), (0.002, 1.6, 0.0), (0.005, 0.0, 1.6), (0.001, 0.0, 0.8), (0.3, 0.0, 1.6)])
def test_the_interval_of_acr_holds_where_a_few_images_are_unlike_the_rest(law):
    """Twin: the normal interval alone misses as often as the few are not drawn."""
    assert _coverage(law, 1.6) >= 0.93
    if law[0] <= 0.002:
        assert _coverage(law, None) < 0.7


@given(size=st.integers(1, 300), share=st.floats(0, 1))
def test_an_entry_is_about_its_even_subset_and_nothing_else(size, share):
    examples = max(1, round(share * size))
    chosen = even_subset(size, examples)
    entry = {"examples": examples, "size": size}
    assert [index for index in range(-5, size + 20) if is_about(entry, index)] == chosen
    assert len(set(chosen)) == examples and chosen[0] == 0 and chosen[-1] < size
    gaps = np.diff([*chosen, size])
    assert gaps.max() - gaps.min() <= 1  # no part of the file has a larger share than another
    earlier = {"examples": examples, "stride": max(1, size // examples)}
    assert [i for i in range(-5, 2 * size) if is_about(earlier, i)] == [i * earlier["stride"] for i in range(examples)]


def test_a_number_that_no_list_could_hold_is_only_a_number():
    assert is_about({"examples": 2**52, "size": 2**53}, 4) and not is_about({"examples": 2**52, "size": 2**53}, 5)
