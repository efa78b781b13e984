"""Certified accuracy and average certified radius (ACR) of a set of certificates, each with a 95 % interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import hypergeom

from ..store.records import CertificateRow, InnerNoiseRow
from .bounds import certified_radius, confidence_interval, lower_confidence_bound


@dataclass(frozen=True)
class Estimate:
    """An estimate from a set of test images, with a 95 % interval that treats them as a random sample."""

    value: float
    low: float
    high: float


def certified_accuracy(radius: np.ndarray, correct: np.ndarray, at: float) -> Estimate:
    """Return the share of examples that are correct and certified at radius `at`, with the Clopper-Pearson interval."""
    certified = reaches(radius, correct, at)
    low, high = confidence_interval(int(certified.sum()), len(radius))
    return Estimate(float(certified.mean()), low, high)


def reaches(radius: np.ndarray, correct: np.ndarray, at: float) -> np.ndarray:
    """Return which examples are classified correctly and certified at radius `at`."""
    return correct & (radius >= at)


def earned_radius(radius: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return the radius certified for the *true* label, 0 if the smoothed class is wrong or abstains. Its mean is the ACR."""
    return np.where(correct, radius, 0.0)


def largest_radius(n: int, alpha: float, sigma: float) -> float:
    """Return the radius of an example whose n votes all agree, the largest possible with n votes."""
    return certified_radius(lower_confidence_bound(n, n, alpha), sigma)


def standard_error(values: np.ndarray, times: float = 1.0) -> float:
    """Return the standard error of the mean (infinite for one value). `times` is multiplied first, to keep stored bits."""
    return times * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def average_certified_radius(radius: np.ndarray, correct: np.ndarray, largest: float | None = None) -> Estimate:
    """Return ACR = mean of radius * [correct] (Zhai et al. 2020); its interval has a width even if all radii are equal.

    `largest` is the largest radius that the votes can prove (`largest_radius`). Without it the interval is the normal
    approximation only.
    """
    acr = _mean(earned_radius(radius, correct), None if largest is None else (0.0, largest))
    return Estimate(acr.value, max(0.0, acr.low), acr.high)


def pixeldp_figures(rows: Sequence[CertificateRow], radii: Sequence[float]) -> dict[str, Any] | None:
    """Return ACR and certified accuracy by PixelDP's bound; None for rows that do not have it."""
    native = [row for row in rows if isinstance(row, InnerNoiseRow)]
    if not native:
        return None
    radius, correct = np.array([row.radius_pixeldp for row in native]), np.array([bool(row.correct) for row in native])
    shares = {f"{r:.2f}": certified_accuracy(radius, correct, r).value for r in radii if r > 0.0}
    return {"acr": average_certified_radius(radius, correct).value, "certified_accuracy": shares}


def average_gain(ours: np.ndarray, theirs: np.ndarray, largest: float | None = None) -> Estimate:
    """Return the mean paired difference `ours - theirs`, so that images that are hard for both cancel out.

    If all differences are equal, the interval follows from `largest`, the largest value of an image.
    """
    gains = ours - theirs
    return _mean(gains, None if largest is None or np.ptp(gains) > 0 else (-largest, largest))


def _mean(values: np.ndarray, bounds: tuple[float, float] | None) -> Estimate:
    """Return the mean with the normal interval, widened for values that a sample of this size may have missed.

    Values with total probability p are missed by all n draws with probability (1 - p)^n. At p = 1 - 0.025^(1/n) this is
    2.5 %, and the missed values may lie at either end of `bounds`. If all values are equal, this is the only information.
    """
    half, mean = standard_error(values, 1.96), float(values.mean())
    low, high = mean - half, mean + half
    if bounds is not None:
        missed = 1.0 - 0.025 ** (1.0 / len(values))
        low = min(low, (1.0 - missed) * mean + missed * bounds[0])
        high = max(high, (1.0 - missed) * mean + missed * bounds[1])
    return Estimate(mean, low, high)


def radii_to_show(sigma: float) -> list[float]:
    """Return 0, 0.25, 0.5, ... up to four sigma, about the largest radius that n = 10,000 votes can prove."""
    return [0.25 * k for k in range(int(4 * sigma / 0.25) + 1)]


def even_subset(size: int, examples: int) -> list[int]:
    """Return the indices floor(i * size / examples): evenly spread, even if `examples` does not divide the size."""
    return [place * size // examples for place in range(examples)]


def is_about(entry: Mapping[str, Any], index: int) -> bool:
    """Return whether an entry of metrics.json covers this image (the certificate file may have rows of other requests too).

    Builds no list, because `examples` comes from a file and may be huge. Entries of older versions have a stride, no size.
    """
    examples = entry["examples"]
    size = entry["size"] if "size" in entry else entry["stride"] * examples
    place = -(-index * examples // size)  # the first i with floor(i * size / examples) >= index
    return bool(0 <= place < examples and place * size // examples == index)


def classes_are_mixed_alike(chosen: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether the chosen images have about the class distribution of the whole test set.

    False only if a random subset would differ this much in one case of 10,000. The order of the test set then has a pattern
    that the even subset picks up, such as classes in a fixed cycle.
    """
    classes, of_all = np.unique(labels, return_counts=True)
    counts = np.array([(chosen == label).sum() for label in classes])
    as_few, as_many = (
        hypergeom.cdf(counts, len(labels), of_all, len(chosen)),
        hypergeom.sf(counts - 1, len(labels), of_all, len(chosen)),
    )
    return bool(np.minimum(as_few, as_many).min() * 2 * len(classes) > 1e-4)
