"""Relate a per-sample metric to the certified radius: correlation, means by radius, split at thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

THRESHOLDS = (0.5, 1.0, 1.5)  # tau: radii at which the metrics are split
FEWEST = 5  # images in a plotted group: the mean of fewer is too noisy
_FEWEST_TO_CORRELATE = 3
_GROUPS, _MOST_SIGMAS = 10, 3.3  # the largest radius of 10,000 votes is about 3.2 sigma


@dataclass(frozen=True)
class Correlation:
    """Correlation of log(metric) with the radius. None if undefined: fewer than three examples, or all equal."""

    rank: float | None  # Spearman; the logarithm does not change it, so examples with metric 0 are included
    rank_p_value: float | None
    pearson: float | None  # over the examples whose metric is above 0
    count: int


def correlation(metric: np.ndarray, radius: np.ndarray) -> Correlation:
    """Return rank (Spearman) and linear (Pearson) correlation of log(metric) and radius, over examples or groups."""
    from scipy.stats import spearmanr  # slow to import: only when needed

    positive = metric > 0
    log_metric, paired_radius = np.log(metric[positive]), radius[positive]
    rank, p_value = (float(value) for value in spearmanr(metric, radius)) if _varies(metric, radius) else (None, None)
    linear = float(np.corrcoef(log_metric, paired_radius)[0, 1]) if _varies(log_metric, paired_radius) else None
    return Correlation(rank, p_value, linear, len(metric))


def _varies(a: np.ndarray, b: np.ndarray) -> bool:
    return len(a) >= _FEWEST_TO_CORRELATE and np.ptp(a) > 0 and np.ptp(b) > 0


@dataclass(frozen=True)
class RadiusBin:
    """Examples with low <= radius < high: their count and mean metric."""

    low: float
    high: float
    count: int
    mean: float

    @property
    def middle(self) -> float:
        """The x position of the group in plots."""
        return (self.low + self.high) / 2


def by_radius(metric: np.ndarray, radius: np.ndarray, sigma: float) -> list[RadiusBin]:
    """Return the mean metric by radius, in ten groups up to 3.3 sigma; empty groups are left out."""
    width = _MOST_SIGMAS * sigma / _GROUPS
    place = np.floor(radius / width).astype(int)
    bins = []
    for k in np.unique(place):
        inside = metric[place == k]
        bins.append(RadiusBin(float(k * width), float((k + 1) * width), len(inside), float(inside.mean())))
    return bins


def drawn_groups(metric: np.ndarray, radius: np.ndarray, sigma: float) -> list[RadiusBin]:
    """Return the groups to plot, on a log scale as in the paper: the log of a group's mean, not the mean of logs."""
    return [group for group in by_radius(metric, radius, sigma) if group.count >= FEWEST and group.mean > 0]


@dataclass(frozen=True)
class Split:
    """Mean metric of the examples with radius below a threshold, and of the others; None for an empty side."""

    threshold: float
    below: float | None
    above: float | None
    below_count: int
    above_count: int


def split_at(metric: np.ndarray, radius: np.ndarray, thresholds: Sequence[float] = THRESHOLDS) -> list[Split]:
    """Return the mean metric below each radius threshold, and at or above it."""
    splits = []
    for threshold in thresholds:
        low, high = metric[radius < threshold], metric[radius >= threshold]
        splits.append(Split(threshold, _mean(low), _mean(high), len(low), len(high)))
    return splits


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
