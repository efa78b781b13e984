"""The formulas behind a certificate, in SciPy."""

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


def top_two_differ(first: int, second: int, alpha: float) -> bool:
    """Return whether the top class of PREDICT is significant: binomial test of first against second, p <= alpha."""
    return first + second > 0 and bool(binomtest(first, first + second, 0.5).pvalue <= alpha)
