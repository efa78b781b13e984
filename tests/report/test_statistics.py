"""What tables and figures are computed with, against hand-made rows."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcert.report.statistics import by_class, correlations, example_groups, geometric_means, weakest
from dpcert.store.records import CertificateRow, SampleRow


def certificate(idx, label, predict, radius):
    return CertificateRow(idx, label, predict, radius, int(label == predict), 0.0, 90, 100, 0.9 if radius else 0.3)


ROWS = [
    certificate(0, 0, 0, 1.0), certificate(1, 0, 1, 0.5), certificate(2, 0, 1, 0.2), certificate(3, 0, -1, 0.0),
    certificate(4, 1, 1, 1.0), certificate(5, 1, 1, 0.3), certificate(6, 1, 2, 0.9),
]  # fmt: skip


def test_by_class_by_hand():
    zero, one = by_class(ROWS, [0.0, 0.5])
    assert (zero.label, zero.images, zero.wrong, zero.abstained, zero.mistaken_for) == (0, 4, 2, 1, [(1, 2)])
    assert zero.certified == {0.0: 0.25, 0.5: 0.25} and one.certified == {0.0: 2 / 3, 0.5: 1 / 3}
    assert one.mistaken_for == [(2, 1)] and weakest([zero, one], 0.5) is zero and weakest([zero], 0.5) is None


def test_groups_by_hand():
    groups = {group.key: [row.idx for row in group.rows] for group in example_groups(ROWS, 2)}
    assert groups == {"most-robust": [0, 4], "least-robust": [5, 0], "confidently-wrong": [6, 1], "abstained": [3]}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3), st.floats(0, 2)), min_size=1, max_size=40))
def test_classes_and_groups_lose_nobody(drawn):
    rows = [certificate(i, label, predict, 0.0 if predict < 0 else radius) for i, (label, predict, radius) in enumerate(drawn)]
    classes = by_class(rows, [0.0])
    assert sum(c.images for c in classes) == len(rows)
    assert sum(c.wrong + c.abstained for c in classes) + sum(row.correct for row in rows) == len(rows)
    assert sum(c.certified[0.0] * c.images for c in classes) == pytest.approx(sum(row.correct for row in rows))
    for group in example_groups(rows, 5):
        assert len(group.rows) == min(5, group.of) and len({row.idx for row in group.rows}) == len(group.rows)


def sample(idx, metric, radius, correct=1):
    return SampleRow(idx, 0, 0, metric, metric, 0.0, metric, 0.5, radius, correct)


def test_correlation_has_the_sign_of_the_rows():
    falling = [sample(i, math.exp(-i), 0.1 * i) for i in range(9)]
    assert all(c.rho == pytest.approx(-1) and c.examples == 9 for c in correlations(falling))
    with_wrong = [*falling, *(sample(20 + i, 100.0 * i, 1.0 + i, correct=0) for i in range(9))]
    assert all(c.rho == pytest.approx(-1) and c.examples == 9 for c in correlations(with_wrong))  # wrong answers do not count
    assert all(c.rho is None for c in correlations(falling[:2])) and all(
        c.rho is None for c in correlations([sample(i, 1.0, i) for i in range(5)])
    )


@given(st.floats(-3, 3), st.floats(-2, 2))
def test_means_of_logarithms_lie_on_a_log_line(slope, offset):
    """Where log(metric) is linear in the radius, the binned means are on that line; arithmetic means would not be."""
    radius = np.linspace(0, 1.6, 200)
    centres, means = geometric_means(radius, np.exp(offset + slope * radius))
    assert len(centres) == 10 and np.log(means) == pytest.approx(offset + slope * centres, abs=1e-9)


def test_twin_arithmetic_means_are_off_the_line():
    radius = np.linspace(0, 1.6, 200)
    centres, _ = geometric_means(radius, np.exp(-3 * radius))
    arithmetic = [np.exp(-3 * radius)[(radius >= c - 0.08) & (radius <= c + 0.08)].mean() for c in centres]
    assert np.abs(np.log(arithmetic) + 3 * centres).max() > 1e-4


def test_zeros_and_nothing_have_no_logarithm():
    assert len(geometric_means(np.array([0.1, 0.2]), np.zeros(2))[0]) == 0
    centres, means = geometric_means(np.array([0.5, 0.5, 0.5]), np.array([0.0, 1.0, 4.0]))
    assert centres == pytest.approx([0.5]) and means == pytest.approx([2.0])
