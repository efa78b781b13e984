"""Certified accuracy and average certified radius (ACR) of a set of certificates, each with a 95 % interval."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import hypergeom

from .bounds import certified_radius, confidence_interval, lower_confidence_bound


@dataclass(frozen=True)
class Estimate:
    """A figure of some test images, and the 95 % interval that takes them as a random draw of such images."""

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


def average_certified_radius(radius: np.ndarray, correct: np.ndarray, largest: float | None = None) -> Estimate:
    """ACR = mean of radius * [prediction right] (Zhai et al. 2020); its interval has a width also where all radii are equal.

    `largest` is the largest radius that the votes can prove (`largest_radius`). Without it the interval is that of the
    normal approximation alone.
    """
    acr = _mean(earned_radius(radius, correct), None if largest is None else (0.0, largest))
    return Estimate(acr.value, max(0.0, acr.low), acr.high)


def average_gain(ours: np.ndarray, theirs: np.ndarray, largest: float | None = None) -> Estimate:
    """How much larger our figure of an image is than theirs, on average; an image that is hard for both counts for neither.

    Where all images differ alike, the interval follows from `largest`, the largest figure an image can have.
    """
    gains = ours - theirs
    return _mean(gains, None if largest is None or np.ptp(gains) > 0 else (-largest, largest))


def _mean(values: np.ndarray, bounds: tuple[float, float] | None) -> Estimate:
    """The mean with the normal interval, widened for what a draw of this size may have missed.

    Values that together have probability p are missed by all n draws with probability (1 - p)^n. At p = 1 - 0.025^(1/n)
    this is 2.5 %, and the missed values may lie at either end of `bounds`. With equal values nothing else is known.
    """
    half, mean = standard_error(values, 1.96), float(values.mean())
    low, high = mean - half, mean + half
    if bounds is not None:
        missed = 1.0 - 0.025 ** (1.0 / len(values))
        low = min(low, (1.0 - missed) * mean + missed * bounds[0])
        high = max(high, (1.0 - missed) * mean + missed * bounds[1])
    return Estimate(mean, low, high)


def radii_to_show(sigma: float) -> list[float]:
    """0, 0.25, 0.5, ... up to four sigma, the largest radius that n = 10,000 votes can about prove."""
    return [0.25 * k for k in range(int(4 * sigma / 0.25) + 1)]


def even_subset(size: int, examples: int) -> list[int]:
    """Indices floor(i * size / examples): spread over the whole test set, also where `examples` does not divide its size."""
    return [place * size // examples for place in range(examples)]


def is_about(entry: Mapping[str, Any], index: int) -> bool:
    """Whether the figures of an entry of metrics.json are about this image: the file may hold rows of other requests too.

    No list is made: a number in a file may be anything. Entries made before sizes were recorded name a stride.
    """
    examples = entry["examples"]
    size = entry["size"] if "size" in entry else entry["stride"] * examples
    place = -(-index * examples // size)  # the first i with floor(i * size / examples) >= index
    return bool(0 <= place < examples and place * size // examples == index)


def classes_are_mixed_alike(chosen: np.ndarray, labels: np.ndarray) -> bool:
    """Whether the classes of the chosen images are mixed as in the whole test set.

    False only where a random draw would differ as much in one case of 10,000: the file has a pattern that the even subset
    falls in with, such as classes that take turns.
    """
    classes, of_all = np.unique(labels, return_counts=True)
    found = np.array([(chosen == label).sum() for label in classes])
    as_few, as_many = (
        hypergeom.cdf(found, len(labels), of_all, len(chosen)),
        hypergeom.sf(found - 1, len(labels), of_all, len(chosen)),
    )
    return bool(np.minimum(as_few, as_many).min() * 2 * len(classes) > 1e-4)
