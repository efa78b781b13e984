"""What a per-sample metric tells about the certified radius: correlation, means by radius, split at thresholds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from ..published import THRESHOLDS

_FEWEST = 3


def certified_radius_of_label(radius: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """The radius certified for the *true* label, 0 where the smoothed class is another or none: what ACR is the mean of."""
    return np.where(correct.astype(bool), radius, 0.0)


@dataclass(frozen=True)
class Correlation:
    """Of log(metric) with the radius. None where it has no meaning: fewer than three examples, or all alike."""

    rank: float | None  # Spearman's; the logarithm does not change it, so a metric of 0 counts too
    pearson: float | None  # of the examples whose metric is above 0
    count: int


def correlation(metric: np.ndarray, radius: np.ndarray) -> Correlation:
    """Rank (Spearman) and linear (Pearson) correlation of log(metric) and radius."""
    positive = metric > 0
    log, beside = np.log(metric[positive]), radius[positive]
    rank = float(spearmanr(metric, radius).statistic) if _varies(metric, radius) else None
    return Correlation(rank, float(np.corrcoef(log, beside)[0, 1]) if _varies(log, beside) else None, len(metric))


def _varies(a: np.ndarray, b: np.ndarray) -> bool:
    return len(a) >= _FEWEST and np.ptp(a) > 0 and np.ptp(b) > 0


@dataclass(frozen=True)
class RadiusBin:
    """Examples with low <= radius < high : how many, and their mean metric."""

    low: float
    high: float
    count: int
    mean: float

    @property
    def log_mean(self) -> float:
        """Natural logarithm of the mean, as the paper plots it; -inf where the mean is 0."""
        return float(np.log(self.mean)) if self.mean > 0 else -np.inf


def by_radius(metric: np.ndarray, radius: np.ndarray, width: float = 0.25) -> list[RadiusBin]:
    """Mean metric of the examples grouped by their radius, in bins of `width`; empty bins are left out."""
    if len(radius) == 0:
        return []
    place = np.floor(radius / width).astype(int)
    found = []
    for k in np.unique(place):
        inside = metric[place == k]
        found.append(RadiusBin(float(k * width), float((k + 1) * width), len(inside), float(inside.mean())))
    return found


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
