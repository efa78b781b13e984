"""Correlation, bins and splits against SciPy and counting by hand; a shuffled twin has no correlation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr

from dpcert.analysis.correlate import FEWEST, by_radius, correlation, drawn_groups, split_at
from dpcert.certification.metrics import earned_radius

RANDOM = np.random.default_rng(0)
RADIUS = RANDOM.uniform(0, 2, 300)
METRIC = np.exp(-3 * RADIUS + RANDOM.normal(0, 0.3, 300))


def test_correlation_is_scipys_and_a_shuffled_twin_has_none():
    found = correlation(METRIC, RADIUS)
    theirs = spearmanr(METRIC, RADIUS)
    assert found.rank == pytest.approx(theirs.statistic) and found.rank_p_value == pytest.approx(theirs.pvalue)
    assert found.count == 300
    assert found.pearson == pytest.approx(pearsonr(np.log(METRIC), RADIUS).statistic) and found.pearson < -0.95
    twin = correlation(RANDOM.permutation(METRIC), RADIUS)
    assert abs(twin.rank) < 0.2 and abs(twin.pearson) < 0.2


def test_zeros_count_for_the_rank_only_and_nothing_is_a_nan():
    metric = np.array([0.0, 1.0, 2.0, 4.0])
    found = correlation(metric, np.array([2.0, 1.5, 1.0, 0.5]))
    assert found.rank == pytest.approx(-1.0) and found.pearson == pytest.approx(-1.0) and found.count == 4
    for metric, radius in ((np.zeros(5), np.arange(5.0)), (np.arange(1.0, 6.0), np.ones(5)), (np.ones(2), np.ones(2))):
        assert correlation(metric, radius).rank is None and correlation(metric, radius).pearson is None


def test_the_radius_is_that_of_the_true_label():
    assert earned_radius(np.array([1.0, 2.0]), np.array([1, 0])).tolist() == [1.0, 0.0]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 4)), min_size=1, max_size=40))
def test_bins_and_splits_hold_every_example_once(pairs):
    metric, radius = (np.array(column) for column in zip(*pairs, strict=True))
    bins = by_radius(metric, radius, 0.5)
    assert sum(part.count for part in bins) == len(pairs)
    assert sum(part.count * part.mean for part in bins) == pytest.approx(metric.sum(), abs=1e-9)
    for part in bins:
        assert part.count == sum(part.low <= r < part.high for r in radius)
    for split in split_at(metric, radius):
        assert split.below_count == sum(r < split.threshold for r in radius)
        assert split.below_count + split.above_count == len(pairs)
        assert (split.below is None) == (split.below_count == 0)
        if split.above is not None:
            assert split.above == pytest.approx(metric[radius >= split.threshold].mean())


def test_groups_that_are_drawn_have_five_images_and_a_logarithm():
    (part,) = drawn_groups(np.array([1.0, 2.0, 3.0, 4.0, 90.0]), np.full(5, 0.4), 0.5)
    assert part.mean == 20.0 and part.middle == pytest.approx(0.4125)  # the mean, and not the exponential of the mean log
    assert FEWEST == 5 and drawn_groups(np.ones(4), np.full(4, 0.4), 0.5) == []
    assert drawn_groups(np.zeros(9), np.zeros(9), 0.5) == [] == by_radius(np.zeros(0), np.zeros(0), 0.5)


def test_groups_of_a_log_line_fall_on_it():
    """Ten groups for votes that prove up to 3.3 sigma, whatever sigma is."""
    for sigma in (0.25, 1.0):
        radius = np.linspace(0, 3.29 * sigma, 400)
        groups = drawn_groups(np.exp(-2 * radius / sigma), radius, sigma)
        assert len(groups) == 10
        assert correlation(np.array([g.mean for g in groups]), np.array([g.middle for g in groups])).pearson < -0.999
