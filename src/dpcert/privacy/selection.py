"""What it costs to release the best of a random number of trials: repeat and select, by Renyi accounting (RDP).

Papernot and Steinke (2022, https://arxiv.org/abs/2110.03620), Theorems 2 and 6, as dp-accounting computes them for its
``RepeatAndSelectDpEvent``. Its PLD accountant does not know this event.

Guarantee: an upper bound on epsilon of the released trial, for adding and for removing one training record.
Assumes: the number of trials is drawn once from `law`, which has the given mean, and depends on no record. Each trial draws its
settings independently from one public distribution, and its noise from a key of its own. The score depends on the trial's model
and on records that epsilon does not cover. Nothing but the best trial is released: no other trial, no score, no count.
A trial that draws its settings costs at most the pointwise maximum of the RDP curves of all settings (quasi-convexity).
Edge cases: a Poisson law can draw no trial, and then nothing is released. A single trial is a law like any other.
"""

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np

from .._validate import finite_in, integer_in, one_of
from ..errors import BudgetError

ACCOUNTANT = "rdp"
LAWS = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}  # the `shape` of dp-accounting's event
LARGEST_MEAN = 10_000.0
MOST_CURVES, _MOST_BLOCKS = 64, 8
_SMALLEST_NOISE_MULTIPLIER = 0.05  # as in `accounting`: below, there is no useful bound
_MOST_STEPS = 10**9
_PROFILE_POINTS, _LARGEST_EPSILON = 512, 50.0  # of a privacy profile
_MOST_TRIALS = 1_000_000
Curve = tuple[tuple[float, float, int], ...]  # the releases of a trial: (noise multiplier, sampling probability, steps)


@dataclass(frozen=True)
class Selection:
    """A search that releases its best trial. `curves` are the releases of a trial under each setting that it may draw."""

    law: str
    mean: float
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        one_of("the law of the number of trials", self.law, LAWS, error=BudgetError)
        finite_in("the mean number of trials", self.mean, 1.0, LARGEST_MEAN, error=BudgetError)
        if not self.curves or sum(map(len, self.curves)) > MOST_CURVES:  # a hostile ledger must not take hours
            count = len(self.curves)
            raise BudgetError(f"a search has {count} kinds of trials, must have 1 to {MOST_CURVES}; narrow the space")
        for curve in self.curves:
            _check(curve)

    @property
    def facts(self) -> dict[str, Any]:
        """The entry in the first line of a ledger."""
        return {"law": self.law, "mean": self.mean, "curves": [[list(block) for block in curve] for curve in self.curves]}

    @classmethod
    def from_facts(cls, facts: Any) -> Self:
        """Read `facts` of an untrusted ledger; raises `BudgetError`, `KeyError`, `TypeError` or `ValueError`."""
        if facts.keys() != {"law", "mean", "curves"} or not isinstance(facts["law"], str):
            raise ValueError("a repeat-and-select event has law, mean and curves")
        return cls(facts["law"], facts["mean"], tuple(merged(block for block in curve) for curve in facts["curves"]))

    def epsilon(self, own: Curve, delta: float, earlier: Curve = ()) -> float:
        """Return epsilon of the whole search at `delta`.

        `own` are the releases of the selected trial: it is charged even if the search does not list it. `earlier` are
        releases about the same records before the search.
        """
        from dp_accounting.rdp import rdp_privacy_accountant as rdp

        finite_in("delta", delta, 0.0, 0.5, open_low=True, error=BudgetError, remedy="e.g. 1e-5")
        spent = self._rdp(own, earlier)
        return math.inf if spent is None else float(rdp.compute_epsilon(_orders(), spent, delta)[0])

    def profile(self, own: Curve, earlier: Curve = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return increasing epsilons from 0, and for each a delta such that the whole search is (epsilon, delta)-DP."""
        spent = self._rdp(own, earlier)
        return (np.zeros(1), np.ones(1)) if spent is None else _profile(tuple(spent))

    def _rdp(self, own: Curve, earlier: Curve) -> np.ndarray | None:
        """Return the RDP of search and earlier releases at each order; None if there is too little noise for a bound."""
        from dp_accounting.rdp import rdp_privacy_accountant as rdp

        curves = {*self.curves, merged(own)}
        if any(rho < _SMALLEST_NOISE_MULTIPLIER for curve in (*curves, earlier) for rho, _, _ in curve):
            return None
        one_trial = np.max([_rdp_of(curve) for curve in curves], axis=0)
        selected = rdp._compute_rdp_repeat_and_select(_orders(), one_trial, float(self.mean), LAWS[self.law])
        total: np.ndarray = np.asarray(selected) + _rdp_of(merged(earlier))
        return total


def merged(blocks: Iterable[Iterable[Any]]) -> Curve:
    """Return releases with the steps of equal settings added up, in a fixed order."""
    steps: dict[tuple[float, float], int] = {}
    for noise_multiplier, sampling_probability, count in blocks:
        setting = (_number(noise_multiplier), _number(sampling_probability))
        steps[setting] = steps.get(setting, 0) + _whole(count)
    return tuple((*setting, count) for setting, count in sorted(steps.items()) if count > 0)


def composed_epsilon(curves: Iterable[Curve], delta: float) -> float:
    """Return epsilon by RDP of releasing all of these: what a search costs whose trials are all looked at."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    every = list(curves)
    if any(rho < _SMALLEST_NOISE_MULTIPLIER for curve in every for rho, _, _ in curve):
        return math.inf
    total = sum((_rdp_of(merged(curve)) for curve in every), np.zeros(len(_orders())))
    return float(rdp.compute_epsilon(_orders(), total, delta)[0])


def trials_drawn(law: str, mean: float, uniform: float) -> int:
    """Return the number of trials that a uniform number in [0, 1) stands for: the inverse of the distribution function.

    Edge cases: only the Poisson law can return 0. Rounding of `uniform` moves a probability by at most 2^-53.
    """
    one_of("the law of the number of trials", law, LAWS, error=BudgetError)
    finite_in("the mean number of trials", mean, 1.0, LARGEST_MEAN, error=BudgetError)
    below = 0.0
    for count in range(_MOST_TRIALS):
        below += _probability(law, mean, count)
        if uniform < below:
            return count
    raise BudgetError(f"a {law} law with a mean of {mean:g} trials drew more than {_MOST_TRIALS}; start another search")


def _probability(law: str, mean: float, count: int) -> float:
    if law == "poisson":
        return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    if count == 0:
        return 0.0
    if law == "geometric":
        return (1.0 / mean) * (1.0 - 1.0 / mean) ** (count - 1)
    gamma = _gamma(mean)
    return float(count == 1) if gamma == 1.0 else (1.0 - gamma) ** count / (count * math.log(1.0 / gamma))


@lru_cache(maxsize=8)
def _gamma(mean: float) -> float:
    """Return gamma of the logarithmic law: its mean is (1/gamma - 1) / log(1/gamma)."""
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    return float(rdp._gamma_truncated_negative_binomial(LAWS["logarithmic"], float(mean)))


def _number(value: Any) -> float:
    return finite_in("noise multiplier or sampling probability", value, 0.0, 1e6, error=BudgetError)


def _whole(count: Any) -> int:
    if isinstance(count, float) and count.is_integer():  # config files have floats in a list of numbers
        count = int(count)
    return integer_in("steps", count, 0, _MOST_STEPS, error=BudgetError)


def _check(curve: Curve) -> None:
    if not 1 <= len(curve) <= _MOST_BLOCKS:
        raise BudgetError(f"a trial has {len(curve)} kinds of steps, must have 1 to {_MOST_BLOCKS}")
    for noise_multiplier, sampling_probability, steps in curve:
        finite_in("noise_multiplier", noise_multiplier, 0.0, 10_000.0, error=BudgetError)
        finite_in("sampling_probability", sampling_probability, 0.0, 1.0, open_low=True, error=BudgetError)
        integer_in("steps", steps, 1, _MOST_STEPS, error=BudgetError)


@lru_cache(maxsize=1)
def _orders() -> np.ndarray:
    """The Renyi orders: dp-accounting's, and more of them between 64 and 1024, where small budgets have their optimum."""
    from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS

    orders: np.ndarray = np.array(sorted({*map(float, DEFAULT_RDP_ORDERS), *map(float, range(64, 257, 8)), 384.0, 768.0}))
    return orders


@lru_cache(maxsize=256)
def _rdp_of(curve: Curve) -> np.ndarray:
    """Return the RDP of Poisson-subsampled Gaussian releases at each order (Mironov et al. 2019)."""
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant(_orders())
    with _without_warnings():
        for noise_multiplier, sampling_probability, steps in curve:
            gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian), steps)
    found: np.ndarray = np.nan_to_num(np.maximum(accountant._rdp, 0.0), nan=np.inf, posinf=np.inf)
    found.setflags(write=False)
    return found


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the library where a series does not converge: it then leaves out that order, which is a valid choice."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        with np.errstate(over="ignore"):
            yield
    finally:
        logger.disabled = before


@lru_cache(maxsize=64)
def _profile(spent: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    epsilons = np.linspace(0.0, _LARGEST_EPSILON, _PROFILE_POINTS)
    deltas = np.clip([rdp.compute_delta(_orders(), spent, epsilon)[0] for epsilon in epsilons], 0.0, 1.0)
    for values in (epsilons, deltas):
        values.setflags(write=False)  # the cached arrays are shared by all callers
    return epsilons, deltas
