"""Statistics for the figures and tables of the page, computed from rows: by class, by radius, between runs."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..analysis.correlate import Correlation, correlation
from ..certification.metrics import Estimate, average_gain, earned_radius
from ..store.records import METRICS, CertificateRow, SampleRow

ABSTAIN = -1


@dataclass(frozen=True)
class ClassFigures:
    """How the smoothed model does on the test images of one class."""

    label: int
    images: int
    certified: dict[float, float]  # radius -> fraction that is correct and certified there
    abstained: int
    wrong: int
    mistaken_for: list[tuple[int, int]]  # (wrong answer, count), the most frequent first


def by_class(rows: Sequence[CertificateRow], radii: Sequence[float]) -> list[ClassFigures]:
    """Figures for each class that has an image, in the order of the labels."""
    classes = []
    for label in sorted({row.label for row in rows}):
        of_class = [row for row in rows if row.label == label]
        wrong = Counter(row.predict for row in of_class if not row.correct and row.predict != ABSTAIN)
        certified = {r: sum(bool(row.correct) and row.radius >= r for row in of_class) / len(of_class) for r in radii}
        mistakes = sorted(wrong.items(), key=lambda item: (-item[1], item[0]))
        abstained = sum(row.predict == ABSTAIN for row in of_class)
        classes.append(ClassFigures(label, len(of_class), certified, abstained, wrong.total(), mistakes))
    return classes


def weakest(classes: Sequence[ClassFigures], radius: float) -> ClassFigures | None:
    """The class with the smallest certified accuracy at `radius`; None if there is only one class."""
    return min(classes, key=lambda c: c.certified[radius]) if len(classes) > 1 else None


@dataclass(frozen=True)
class Gain:
    """How much larger the average certified radius of one run is than another's, over the images both were certified on."""

    radius: Estimate
    images: int


def gain(rows: Sequence[CertificateRow], others: Sequence[CertificateRow], largest: float | None = None) -> Gain | None:
    """Compare image by image; None if too few images are shared or labels differ, because the images then differ too."""
    known = {row.idx: row for row in others}
    pairs = [(row, known[row.idx]) for row in rows if row.idx in known]
    if len(pairs) < 2 or any(row.label != other.label for row, other in pairs):
        return None
    ours, theirs = (_radius_of_true_label(side) for side in zip(*pairs, strict=True))
    return Gain(average_gain(ours, theirs, largest), len(pairs))


def _radius_of_true_label(rows: Sequence[CertificateRow | SampleRow]) -> np.ndarray:
    return earned_radius(np.array([row.radius for row in rows]), np.array([row.correct for row in rows]))


@dataclass(frozen=True)
class MetricFigures:
    """A per-image metric over the analyzed images: its median, and its correlation with the radius of the true label."""

    metric: str
    median: float
    correlation: Correlation


def correlations(samples: Sequence[SampleRow]) -> list[MetricFigures]:
    """The figures of each metric."""
    figures = []
    for metric in METRICS:
        values, radius = metric_and_radius(samples, metric)
        median = float(np.median(values)) if len(values) else math.nan
        figures.append(MetricFigures(metric, median, correlation(values, radius)))
    return figures


def metric_and_radius(samples: Sequence[SampleRow], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric and the certified radius of the true label, one entry per image."""
    return np.array([getattr(row, metric) for row in samples]), _radius_of_true_label(samples)


CERTIFIED_WRONG = "confidently-wrong"  # the key of a group of examples


@dataclass(frozen=True)
class ExampleGroup:
    """Test images of one kind, such as the most robust ones."""

    key: str
    title: str
    why: str
    rows: list[CertificateRow]
    of: int  # how many such images there are in total
    among: str  # what `of` counts


def example_groups(rows: Sequence[CertificateRow], most: int) -> list[ExampleGroup]:
    """The most and least robust correct answers, certified wrong answers, and images without an answer."""
    right = [row for row in rows if row.correct and row.radius > 0]
    wrong = [row for row in rows if not row.correct and row.predict != ABSTAIN and row.radius > 0]
    silent = [row for row in rows if row.predict == ABSTAIN]
    strongest = _classes_in_turn(sorted(right, key=lambda row: (-row.radius, row.idx)))
    weak = sorted(right, key=lambda row: (row.radius, row.idx))
    confident = sorted(wrong, key=lambda row: (-row.radius, row.idx))
    undecided = sorted(silent, key=lambda row: (row.p_lower, row.idx))
    why_wrong = "certified but wrong, the largest radius first"
    why_none = "the votes did not prove that the leading class has more than half"
    unanswered = "images without an answer"
    return [
        ExampleGroup("most-robust", "Most robust", "the largest radius", strongest[:most], len(right), "correct answers"),
        ExampleGroup("least-robust", "Least robust", "the smallest radius", weak[:most], len(right), "correct answers"),
        ExampleGroup(CERTIFIED_WRONG, "Wrong", why_wrong, confident[:most], len(wrong), "wrong answers"),
        ExampleGroup("abstained", "No answer", why_none, undecided[:most], len(silent), unanswered),
    ]


def _classes_in_turn(rows: list[CertificateRow]) -> list[CertificateRow]:
    """Among equal radii (common, since all votes often agree), take one image of each class before a second one."""
    seen: Counter[tuple[float, int]] = Counter()
    turns = []
    for row in rows:
        seen[row.radius, row.label] += 1
        turns.append((-row.radius, seen[row.radius, row.label], row.idx, row))
    return [row for *_, row in sorted(turns, key=lambda turn: turn[:3])]
