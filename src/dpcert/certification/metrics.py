"""Certified accuracy and average certified radius (ACR) of a set of certificates, each with a 95 % interval."""

import math
from dataclasses import dataclass

import numpy as np

from .bounds import certified_radius, confidence_interval, lower_confidence_bound


@dataclass(frozen=True)
class Estimate:
    """A figure of a subset of the test set and the 95 % interval for the whole of it."""

    value: float
    low: float
    high: float


def certified_accuracy(radius: np.ndarray, correct: np.ndarray, at: float) -> Estimate:
    """The share of examples that are classified rightly and certified at radius `at` (Clopper-Pearson interval)."""
    certified = reaches(radius, correct, at)
    low, high = confidence_interval(int(certified.sum()), len(radius))
    return Estimate(float(certified.mean()), low, high)


def reaches(radius: np.ndarray, correct: np.ndarray, at: float) -> np.ndarray:
    """Which examples are classified rightly and certified at radius `at`."""
    return correct & (radius >= at)


def earned_radius(radius: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """The radius certified for the *true* label, 0 where the smoothed class is another or none: what ACR is the mean of."""
    return np.where(correct, radius, 0.0)


def largest_radius(n: int, alpha: float, sigma: float) -> float:
    """The radius of an example whose n votes all agree: no certificate of n votes can have more."""
    return certified_radius(lower_confidence_bound(n, n, alpha), sigma)


def standard_error(values: np.ndarray, times: float = 1.0) -> float:
    """Of their mean; nothing is known of it from a single value. `times` comes first: stored intervals keep their last bit."""
    return times * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def average_certified_radius(radius: np.ndarray, correct: np.ndarray) -> Estimate:
    """ACR = mean of radius * [prediction right] (Zhai et al. 2020), with the interval of the normal approximation."""
    acr = _mean(earned_radius(radius, correct))
    return Estimate(acr.value, max(0.0, acr.low), acr.high)


def average_gain(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """How much larger our figure of an image is than theirs, on average; an image that is hard for both counts for neither."""
    return _mean(ours - theirs)


def _mean(values: np.ndarray) -> Estimate:
    half, mean = standard_error(values, 1.96), float(values.mean())
    return Estimate(mean, mean - half, mean + half)


def radii_to_show(sigma: float) -> list[float]:
    """0, 0.25, 0.5, ... up to four sigma, the largest radius that n = 10,000 votes can about prove."""
    return [0.25 * k for k in range(int(4 * sigma / 0.25) + 1)]


def even_subset(size: int, examples: int) -> list[int]:
    """Indices 0, k, 2k, ... with k = floor(size / examples)."""
    return [index * (size // examples) for index in range(examples)]
