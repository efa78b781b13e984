"""Anytime-valid evidence about a probability: alpha holds even if you look after every vote and stop at any time.

For votes with success probability p and a threshold q, the e-process against H0: p <= q is the likelihood ratio of a
mixture of alternatives p > q to q itself. Under H0 it is a nonnegative supermartingale that starts at 1, so (Ville 1939)
the probability that it EVER reaches 1/alpha is at most alpha, for any stopping rule (Robbins 1970; Howard et al.
2021). Clopper-Pearson bounds checked after every vote have no such guarantee.
"""

import math

import numpy as np
from scipy.special import betainc, betaincc, betaln


def log_evidence_above(successes: int, trials: int, threshold: float) -> float:
    """Return the log of the e-process against p <= threshold, with p uniform on (threshold, 1) as the alternative."""
    a, b = successes + 1, trials - successes + 1
    tail = float(betaincc(a, b, threshold))
    if tail <= 0.0:
        return -math.inf
    return _log_mixture(a, b, tail, threshold) - math.log1p(-threshold)


def log_evidence_below(successes: int, trials: int, threshold: float) -> float:
    """Return the log of the e-process against p >= threshold, with p uniform on (0, threshold) as the alternative."""
    a, b = successes + 1, trials - successes + 1
    tail = float(betainc(a, b, threshold))
    if tail <= 0.0:
        return -math.inf
    return _log_mixture(a, b, tail, threshold) - math.log(threshold)


def _log_mixture(a: int, b: int, tail: float, threshold: float) -> float:
    """Return the log of the integral of p^(a-1) (1-p)^(b-1) over the tail, over threshold^(a-1) (1-threshold)^(b-1)."""
    at_threshold = (a - 1) * math.log(threshold) + (b - 1) * math.log1p(-threshold)
    return float(betaln(a, b)) + math.log(tail) - at_threshold


def looks(votes: int, first: int = 32) -> list[int]:
    """Return the vote counts at which to check: growing steps, so that easy inputs need few votes and checks are rare."""
    steps: list[int] = []
    while not steps or steps[-1] < votes:
        steps.append(min(votes, first if not steps else steps[-1] + max(first, steps[-1] // 2)))
    return steps


def running_evidence(votes: np.ndarray, threshold: float) -> np.ndarray:
    """Return the log of the e-process after every vote, for tests."""
    wins = np.cumsum(votes)
    return np.array([log_evidence_above(int(s), t, threshold) for t, s in enumerate(wins, start=1)])
