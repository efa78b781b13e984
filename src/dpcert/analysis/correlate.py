"""What a per-sample metric tells about the certified radius: correlation, means by radius, split at thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

THRESHOLDS = (0.5, 1.0, 1.5)  # tau: radii that the metrics are split at
FEWEST = 5  # images in a group that is drawn: the mean of fewer says little
_FEWEST_TO_CORRELATE = 3
_GROUPS, _MOST_SIGMAS = 10, 3.3  # the largest radius of 10,000 votes is about 3.2 sigma


@dataclass(frozen=True)
class Correlation:
    """Of log(metric) with the radius. None where it has no meaning: fewer than three examples, or all alike."""

    rank: float | None  # Spearman's; the logarithm does not change it, so a metric of 0 counts too
    rank_p_value: float | None
    pearson: float | None  # of the examples whose metric is above 0
    count: int


def correlation(metric: np.ndarray, radius: np.ndarray) -> Correlation:
    """Rank (Spearman) and linear (Pearson) correlation of log(metric) and radius: of examples, or of groups of them."""
    from scipy.stats import spearmanr  # slow to import: only when it is needed

    positive = metric > 0
    log, beside = np.log(metric[positive]), radius[positive]
    rank, p_value = (float(value) for value in spearmanr(metric, radius)) if _varies(metric, radius) else (None, None)
    linear = float(np.corrcoef(log, beside)[0, 1]) if _varies(log, beside) else None
    return Correlation(rank, p_value, linear, len(metric))


def _varies(a: np.ndarray, b: np.ndarray) -> bool:
    return len(a) >= _FEWEST_TO_CORRELATE and np.ptp(a) > 0 and np.ptp(b) > 0


@dataclass(frozen=True)
class RadiusBin:
    """Examples with low <= radius < high : how many, and their mean metric."""

    low: float
    high: float
    count: int
    mean: float

    @property
    def middle(self) -> float:
        """Where the group is drawn."""
        return (self.low + self.high) / 2


def by_radius(metric: np.ndarray, radius: np.ndarray, sigma: float) -> list[RadiusBin]:
    """Mean metric of the examples grouped by their radius, ten groups up to 3.3 sigma; empty ones are left out."""
    width = _MOST_SIGMAS * sigma / _GROUPS
    place = np.floor(radius / width).astype(int)
    found = []
    for k in np.unique(place):
        inside = metric[place == k]
        found.append(RadiusBin(float(k * width), float((k + 1) * width), len(inside), float(inside.mean())))
    return found


def drawn_groups(metric: np.ndarray, radius: np.ndarray, sigma: float) -> list[RadiusBin]:
    """The groups that are drawn, on a log scale as the paper does: the log of a group's mean, not the mean of logs."""
    return [group for group in by_radius(metric, radius, sigma) if group.count >= FEWEST and group.mean > 0]


@dataclass(frozen=True)
class Split:
    """Mean metric of the examples with radius below a threshold, and of the others; None where there is none."""

    threshold: float
    below: float | None
    above: float | None
    below_count: int
    above_count: int


def split_at(metric: np.ndarray, radius: np.ndarray, thresholds: Sequence[float] = THRESHOLDS) -> list[Split]:
    """The metric below and at or above each threshold of the radius."""
    found = []
    for threshold in thresholds:
        low, high = metric[radius < threshold], metric[radius >= threshold]
        found.append(Split(threshold, _mean(low), _mean(high), len(low), len(high)))
    return found


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
