"""The formulas behind a certificate, in SciPy."""

import math
from collections.abc import Sequence

from scipy.special import ndtri
from scipy.stats import beta, binomtest


def lower_confidence_bound(successes: int, trials: int, alpha: float) -> float:
    """Return the one-sided Clopper-Pearson lower bound for a binomial probability.

    Guarantee: with probability at least 1 - alpha over the trials, the bound is at most the true probability.
    Edge cases: 0 successes give 0; all successes give alpha^(1/trials).
    """
    return 0.0 if successes == 0 else float(beta.ppf(alpha, successes, trials - successes + 1))


def confidence_interval(successes: int, trials: int, alpha: float = 0.05) -> tuple[float, float]:
    """Return the two-sided Clopper-Pearson interval, for a share of a test set."""
    low = lower_confidence_bound(successes, trials, alpha / 2)
    return low, 1.0 - lower_confidence_bound(trials - successes, trials, alpha / 2)


def certified_radius(p_lower: float, sigma: float) -> float:
    """R = sigma * Phi^-1(p_A lower) (Cohen et al. 2019, Theorem 1 with p_B upper = 1 - p_A lower); 0 if p <= 1/2."""
    return sigma * float(ndtri(p_lower)) if p_lower > 0.5 else 0.0


PIXELDP_DELTAS = tuple(step / 1000 for step in range(1, 301))


def pixeldp_radius(votes: Sequence[int], selected: int, n: int, alpha: float, sigma: float) -> float:
    """Return the radius of PixelDP (Lecuyer et al. 2019, Proposition 1) for class `selected`; 0 if nothing is certified.

    The Gaussian mechanism of standard deviation `sigma` is (eps, delta)-private for changes of the image up to
    ``sigma * eps / sqrt(2 ln(1.25 / delta))``, for eps <= 1. The class then stays if p_A >= e^(2 eps) p_B + (1 + e^eps) delta.
    The largest such radius over `PIXELDP_DELTAS` is returned.

    Guarantee: wrong with probability at most alpha. The bounds of all classes hold together (Bonferroni), and votes that
    count for no class may belong to the runner-up.
    """
    each, others = alpha / len(votes), [count for place, count in enumerate(votes) if place != selected]
    runner_up = max(others) + n - sum(votes)
    low = lower_confidence_bound(votes[selected], n, each)
    high = 1.0 - lower_confidence_bound(n - runner_up, n, each)
    return sigma * max(_private_change(low, high, delta) for delta in PIXELDP_DELTAS)


def _private_change(low: float, high: float, delta: float) -> float:
    """Return ``eps / sqrt(2 ln(1.25 / delta))`` for the largest eps <= 1 with low >= e^(2 eps) high + (1 + e^eps) delta."""
    gap = low - delta
    if gap <= high + delta:  # not even for eps = 0
        return 0.0
    largest = 2.0 * gap / (delta + math.sqrt(delta * delta + 4.0 * high * gap))  # the root of the quadratic in e^eps
    return min(1.0, max(0.0, math.log(largest))) / math.sqrt(2.0 * math.log(1.25 / delta))


def top_two_differ(first: int, second: int, alpha: float) -> bool:
    """Return whether the top class of PREDICT is significant: binomial test of first against second, p <= alpha."""
    return first + second > 0 and bool(binomtest(first, first + second, 0.5).pvalue <= alpha)
