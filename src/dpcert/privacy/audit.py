"""Empirical lower bounds on epsilon, from how well an adversary distinguishes two neighboring data sets.

An adversary scores what the mechanism released and guesses "the canary was in" above a threshold. From the number of wrong
guesses of each kind (guessed in, was out; guessed out, was in), Clopper-Pearson gives upper bounds on both error rates. A
mechanism that is (epsilon, delta)-DP does not allow both rates to be small, so small rates refute epsilon.

Two bounds follow from the same error rates (a = false positives, b = false negatives, both upper bounds):
    any mechanism        epsilon >= log( (1 - delta - b) / a ), or with a and b exchanged (Kairouz et al. 2015)
    a Gaussian mechanism mu >= Phi^-1(1 - a) - Phi^-1(b), then the exact epsilon of mu (Dong et al. 2022; Nasr et al. 2023)
The second is much tighter. It applies to a step that claims to be a Gaussian mechanism with noise rho (mu = 1/rho).

A single training run can be audited too (Steinke, Nasr and Jagielski 2023): include each of m canaries by a coin flip, guess
the coins, and count the right guesses (`guess_lower_bound`).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from .._validate import finite_in, integer_in
from .accounting import ROUNDING, gaussian_epsilon


@dataclass(frozen=True)
class LowerBound:
    """What the scores prove at the stated confidence; `mu` and both epsilons are lower bounds on the true values."""

    mu: float
    gaussian_epsilon: float
    any_epsilon: float
    false_positives: float
    false_negatives: float
    draws: int
    confidence: float
    delta: float

    @property
    def best(self) -> "LowerBound":
        """The bound for an adversary that is never wrong: no audit with this many draws can show more."""
        return _from_errors(0, 0, self.draws, self.draws, self.confidence, self.delta)

    @property
    def ceiling(self) -> float:
        """The largest Gaussian epsilon that this many draws could prove."""
        return self.best.gaussian_epsilon


def lower_bound(
    without: np.ndarray, with_canary: np.ndarray, threshold: float, *, confidence: float = 0.999, delta: float = 1e-5
) -> LowerBound:
    """Return the bound from scores of releases without and with the canary.

    Guarantee: below the true values with probability `confidence`, if the threshold was chosen without these scores.
    A NaN score counts as a wrong guess on either side.
    """
    finite_in("confidence", confidence, 0.5, 1.0, open_high=True)
    integer_in("draws", min(len(without), len(with_canary)), 1)
    wrong_in = int(np.sum(~(without <= threshold)))
    wrong_out = int(np.sum(~(with_canary > threshold)))
    return _from_errors(wrong_in, wrong_out, len(without), len(with_canary), confidence, delta)


def _from_errors(wrong_in: int, wrong_out: int, n_without: int, n_with: int, confidence: float, delta: float) -> LowerBound:
    each = 1.0 - (1.0 - confidence) / 2.0  # two bounds share the risk
    a, b = _upper(wrong_in, n_without, each), _upper(wrong_out, n_with, each)
    mu = max(0.0, float(stats.norm.isf(a) - stats.norm.ppf(b)))
    any_epsilon = max(0.0, *(math.log((1 - delta - x) / y) if 1 - delta - x > 0 else 0.0 for x, y in ((a, b), (b, a))))
    gaussian = max(0.0, gaussian_epsilon(mu, delta) * (1 - ROUNDING) - ROUNDING)  # rounded down: it is a lower bound
    return LowerBound(mu, gaussian, any_epsilon, a, b, min(n_without, n_with), confidence, delta)


def _upper(wrong: int, draws: int, confidence: float) -> float:
    """Return the Clopper-Pearson upper bound on the error rate."""
    return 1.0 if wrong >= draws else float(stats.beta.ppf(confidence, wrong + 1, draws - wrong))


@dataclass(frozen=True)
class GuessBound:
    """What the guesses about the canaries of ONE training run prove; `epsilon` is a lower bound on the true value."""

    epsilon: float
    correct: int
    guesses: int
    canaries: int
    confidence: float
    delta: float

    @property
    def ceiling(self) -> float:
        """The largest epsilon that this many guesses could prove if all were right."""
        return guess_lower_bound(
            self.guesses, self.guesses, self.canaries, confidence=self.confidence, delta=self.delta
        ).epsilon


def chance_of_guesses(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound the probability of this many right guesses against ANY (epsilon, delta)-DP training from above.

    Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846), Theorem 5.2 and Appendix D: with m canaries, each included by an
    independent fair coin, r guesses and m - r abstentions, and W ~ Binomial(r, e^epsilon / (e^epsilon + 1)), the right
    guesses of randomized response,

        P[at least v right] <= P[W >= v] + m delta max_{i = 1..v} (2 / i) P[v > W >= v - i]
    """
    right = 1.0 / (1.0 + math.exp(-epsilon))
    just_missed = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    alpha = float(np.max(2.0 * just_missed / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, float(stats.binom.sf(correct - 1, guesses, right)) + canaries * delta * alpha)


def guess_lower_bound(
    correct: int, guesses: int, canaries: int, *, confidence: float = 0.99, delta: float = 1e-5
) -> GuessBound:
    """Return the largest epsilon at which this many right guesses have probability at most 1 - confidence.

    Guarantee: below the true epsilon with probability `confidence`. Refuting an epsilon refutes all smaller ones,
    because smaller-epsilon DP implies larger-epsilon DP. So stopping the search anywhere is sound.
    """
    finite_in("confidence", confidence, 0.5, 1.0, open_high=True)
    finite_in("delta", delta, 0.0, 1.0, open_high=True)
    integer_in("canaries", canaries, 1)
    integer_in("guesses", guesses, 1, canaries)
    integer_in("correct", correct, 0, guesses)

    def refuted(epsilon: float) -> bool:
        return chance_of_guesses(correct, guesses, canaries, epsilon, delta) <= 1.0 - confidence

    low, high = 0.0, 50.0
    if not refuted(low):
        return GuessBound(0.0, correct, guesses, canaries, confidence, delta)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return GuessBound(low, correct, guesses, canaries, confidence, delta)
