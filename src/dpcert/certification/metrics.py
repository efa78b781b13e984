"""Certified accuracy and average certified radius (ACR) of a set of certificates, each with a 95 % interval."""

import math
from dataclasses import dataclass

import numpy as np

from .bounds import confidence_interval


@dataclass(frozen=True)
class Estimate:
    """A figure of a subset of the test set and the 95 % interval for the whole of it."""

    value: float
    low: float
    high: float


def certified_accuracy(radius: np.ndarray, correct: np.ndarray, at: float) -> Estimate:
    """The share of examples that are classified rightly and certified at radius `at` (Clopper-Pearson interval)."""
    certified = correct & (radius >= at)
    low, high = confidence_interval(int(certified.sum()), len(radius))
    return Estimate(float(certified.mean()), low, high)


def average_certified_radius(radius: np.ndarray, correct: np.ndarray) -> Estimate:
    """ACR = mean of radius * [prediction right] (Zhai et al. 2020), with the interval of the normal approximation."""
    earned = np.where(correct, radius, 0.0)
    half = 1.96 * float(earned.std(ddof=1)) / math.sqrt(len(earned)) if len(earned) > 1 else math.inf
    mean = float(earned.mean())
    return Estimate(mean, max(0.0, mean - half), mean + half)


def radii_to_show(sigma: float) -> list[float]:
    """0, 0.25, 0.5, ... up to four sigma, the largest radius that n = 10,000 votes can about prove."""
    return [0.25 * k for k in range(int(4 * sigma / 0.25) + 1)]


def even_subset(size: int, examples: int) -> list[int]:
    """Indices 0, k, 2k, ... with k = floor(size / examples)."""
    return [index * (size // examples) for index in range(examples)]
