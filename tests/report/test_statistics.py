"""What tables and figures are computed with, against hand-made rows."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcert.analysis.correlate import drawn_groups
from dpcert.certification.metrics import average_certified_radius
from dpcert.paper.grid import Cell
from dpcert.paper.result_index import Place, ResultIndex
from dpcert.paper.sample_claims import by_radius
from dpcert.report.statistics import by_class, correlations, example_groups, gain, metric_and_radius, weakest
from dpcert.report.tables import read_run
from dpcert.runs.analyze import summary as analyze_summary
from dpcert.store.records import CertificateRow, SampleRow
from tests.grid_fakes import fake_run, radius_of


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


def test_the_gain_is_over_the_same_images_and_right_answers_only():
    others = [certificate(row.idx + 1, 0 if row.idx < 3 else 1, 0, 0.25) for row in ROWS]  # idx 1..7, right up to idx 3
    found = gain(ROWS, others)
    differences = [0 - 0.25, 0 - 0.25, 0 - 0.25, 1 - 0, 0.3 - 0, 0 - 0]  # idx 1..6
    mean = sum(differences) / 6
    half = 1.96 * math.sqrt(sum((d - mean) ** 2 for d in differences) / 5 / 6)
    assert found.images == 6
    assert (found.radius.value, found.radius.low, found.radius.high) == pytest.approx((mean, mean - half, mean + half))
    back = gain(others, ROWS).radius
    assert (back.low, back.high) == pytest.approx((-found.radius.high, -found.radius.low))


def test_no_gain_over_other_images():
    assert gain(ROWS, ROWS[:2]) is not None and gain(ROWS, ROWS[:1]) is None  # one says nothing of the spread
    assert gain(ROWS, [replace(row, label=1 - row.label) if row.idx == 4 else row for row in ROWS]) is None


def test_the_same_images_tell_apart_what_two_intervals_do_not():
    """Each image a little more robust: the spread between images is in both intervals and not in the difference."""
    ours = [certificate(i, 0, 0, 0.1 * i + 0.05 + 0.01 * (i % 2)) for i in range(20)]
    theirs = [certificate(i, 0, 0, 0.1 * i) for i in range(20)]
    own = average_certified_radius(np.array([row.radius for row in theirs]), np.ones(20, dtype=bool))
    found = gain(ours, theirs).radius
    assert found.low > 0.05 and own.low < own.value + found.value < own.high


def sample(idx, metric, radius, correct=1):
    return SampleRow(idx, 0, 0, metric, metric, 0.0, metric, 0.5, radius, correct)


def test_correlation_has_the_sign_of_the_rows():
    """A wrong answer has radius 0, however far it is certified: what ACR is the mean of."""
    falling = [sample(i, math.exp(-i), 0.1 * i) for i in range(1, 10)]
    assert all(c.correlation.rank == pytest.approx(-1) and c.correlation.count == 9 for c in correlations(falling))
    with_wrong = [*falling, *(sample(20 + i, 100.0, 5.0, correct=0) for i in range(9))]
    assert all(c.correlation.rank < -0.9 and c.correlation.count == 18 for c in correlations(with_wrong))
    as_certified = [replace(row, correct=1) for row in with_wrong]  # the twin
    assert all(c.correlation.rank > 0 for c in correlations(as_certified))
    assert all(c.median == 100.0 for c in correlations([*with_wrong, sample(40, 100.0, 0.0)]))
    for rows in ([], falling[:2], [sample(i, 1.0, i) for i in range(5)]):
        assert all(c.correlation.rank is None for c in correlations(rows))


def test_the_page_the_command_and_the_claims_say_the_same(tmp_path):
    """One run, three readers: the same correlation over images, the same groups by radius."""
    radius = radius_of(0.8, 0.5)
    folder = fake_run(tmp_path, Cell("mnist", "dpsgd"), {0.5: radius}, samples=lambda k: (1.0 + k % 7, 2.0 + k % 5, 3.0 + k))
    facts = read_run(folder)
    page = {found.metric: found.correlation.rank for found in correlations(facts.analyzed)}
    command = {line[0]: line[4] for line in analyze_summary(facts.samples)}
    assert {name: f"{rank:+.3f}" for name, rank in page.items()} == command
    measured = ResultIndex({Place("mnist", "dpsgd", 0.5): folder}).certified("mnist", "dpsgd", 0.5)
    groups = drawn_groups(*metric_and_radius(facts.analyzed, "lipschitz"), 0.5)
    middles, logarithms = by_radius(measured, "lipschitz", 0.5)
    assert middles == pytest.approx([group.middle for group in groups])
    assert logarithms == pytest.approx([math.log10(group.mean) for group in groups])
