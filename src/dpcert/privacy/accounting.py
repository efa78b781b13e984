"""Convert between a plan and its epsilon, with dp-accounting's privacy loss distributions (PLD).

Guarantee: every epsilon is an upper bound (pessimistic PLD with the connect-the-dots discretization, Doroshenko et al.
2022) for the Poisson-subsampled Gaussian mechanism. Neighbors differ by adding or removing one record. Without subsampling
(q = 1 throughout) the releases together are one Gaussian release, whose epsilon has a closed form.
Assumes: the noise scale is noise_multiplier times the sensitivity, batches are Poisson, steps is the number of releases.
Any other mechanism is refused, never approximated.

Symbols: noise_multiplier is the paper's rho, sampling_probability q = B / N, steps T.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .._validate import finite_in, integer_in
from ..errors import BudgetError

RELATION = "add-or-remove-one"
ACCOUNTANT = "pld"
LARGEST_NOISE_MULTIPLIER = 10_000.0
SMALLEST_NOISE_MULTIPLIER = 0.05
LARGEST_DELTA = 0.5  # a guarantee that fails half the time; near 1 the bound is noisy and takes minutes
MOST_STEPS = 10**9  # rounding errors grow with the number of steps: up to this many they stay below 1e-6 of delta
_MOST_BUCKETS = 1 << 24  # of a composed distribution: about 1.5 GB and one minute
_NEAR = 1.2
_LARGEST_MEAN_LOSS = 500.0
ROUNDING = 1e-9  # how far above the exact curve `gaussian_epsilon` may be, relative above 1
_PROFILE_POINTS = 4096  # of a privacy profile
_LARGEST_EPSILON = 700.0  # of a privacy profile: exp of it is still finite
_TAIL = 9.0  # standard deviations of the privacy loss beyond which a Gaussian has less than 1e-18 of its mass
Charged = tuple[tuple[float, float, int], ...]  # (noise multiplier, sampling probability, steps)
CALIBRATION_TOLERANCE = 5e-4  # calibration uses at least 99.9 % of the budget and never exceeds it


@dataclass(frozen=True)
class GaussianSteps:
    """`steps` releases of the Poisson-subsampled Gaussian mechanism."""

    noise_multiplier: float
    sampling_probability: float
    steps: int

    def __post_init__(self) -> None:
        finite_in("noise_multiplier", self.noise_multiplier, 0.0, LARGEST_NOISE_MULTIPLIER, error=BudgetError)
        finite_in(
            "sampling_probability",
            self.sampling_probability,
            0.0,
            1.0,
            open_low=True,
            error=BudgetError,
            remedy="it is batch_size / dataset_size",
        )
        integer_in("steps", self.steps, 0, 10**15, error=BudgetError)


def epsilon(*, noise_multiplier: float, sampling_probability: float, steps: int, delta: float) -> float:
    """Return the smallest epsilon the PLD can prove at this delta (infinite without noise, 0 without steps)."""
    return compose([GaussianSteps(noise_multiplier, sampling_probability, steps)], delta)


def compose(events: Iterable[GaussianSteps], delta: float, coarser: float = 1.0) -> float:
    """Return epsilon at `delta` of all events together; equal events are merged first.

    `coarser` widens the buckets of the discretization: faster, still an upper bound, but less tight.
    """
    finite_in("delta", delta, 0.0, LARGEST_DELTA, open_low=True, error=BudgetError, remedy="e.g. 1e-5")
    charged = _charged(events)
    if not charged:
        return 0.0
    if _has_too_little_noise(charged):
        return math.inf  # below this the bound is in the hundreds and the distribution no longer fits in memory
    if (mu := _gaussian_mu(charged)) is not None:
        return gaussian_epsilon(mu, delta)
    return _discretized_epsilon(charged, delta, coarser * _widest_interval(charged))


def _charged(events: Iterable[GaussianSteps]) -> Charged:
    """Return the steps per setting; equal settings are merged."""
    merged: dict[tuple[float, float], int] = {}
    for event in events:
        setting = (event.noise_multiplier, event.sampling_probability)
        merged[setting] = merged.get(setting, 0) + event.steps
    return tuple((rho, q, steps) for (rho, q), steps in merged.items() if steps > 0)


def _has_too_little_noise(charged: Charged) -> bool:
    return any(rho < SMALLEST_NOISE_MULTIPLIER for rho, _, _ in charged)


def _gaussian_mu(charged: Charged) -> float | None:
    """Return mu of the single Gaussian release that all steps together form without subsampling; None with subsampling.

    mu^2 adds up (Dong et al. 2022, Corollary 3.3), and the curve of mu is exact.
    """
    if any(q < 1.0 for _, q, _ in charged):
        return None
    return math.sqrt(sum(steps / (rho * rho) for rho, _, steps in charged))


def _widest_interval(charged: Charged) -> float:
    return max(_interval(rho) for rho, _, _ in charged)


def privacy_profile(events: Iterable[GaussianSteps]) -> tuple[np.ndarray, np.ndarray]:
    """Return increasing epsilons from 0, and for each a delta such that all events together are (epsilon, delta)-DP.

    Guarantee: as for `compose`, each delta is an upper bound for adding and for removing a record. The arrays are cached.
    """
    charged = _charged(events)
    if not charged:
        return np.zeros(1), np.zeros(1)
    if _has_too_little_noise(charged):
        return np.zeros(1), np.ones(1)  # no guarantee
    if (mu := _gaussian_mu(charged)) is not None:
        return _gaussian_profile(mu)
    return _discretized_profile(charged, _widest_interval(charged))


@lru_cache(maxsize=64)
def _gaussian_profile(mu: float) -> tuple[np.ndarray, np.ndarray]:
    from scipy.special import log_ndtr

    epsilons = np.linspace(0.0, min(mu * (mu / 2 + _TAIL), _LARGEST_EPSILON), _PROFILE_POINTS)
    below = np.exp(np.minimum(epsilons + log_ndtr(-mu / 2 - epsilons / mu), 0.0))
    return _rounded_up(epsilons, np.exp(log_ndtr(mu / 2 - epsilons / mu)) - below)


@lru_cache(maxsize=64)
def _discretized_profile(charged: Charged, interval: float) -> tuple[np.ndarray, np.ndarray]:
    pmfs = _pmfs(_composed(charged, interval))
    largest = max(pmf._lower_loss + pmf.size for pmf in pmfs) * interval
    epsilons = np.linspace(0.0, min(max(largest, interval), _LARGEST_EPSILON), _PROFILE_POINTS)
    return _rounded_up(epsilons, np.maximum(*(_pmf_deltas(pmf, epsilons) for pmf in pmfs)))


def _pmf_deltas(pmf: Any, epsilons: np.ndarray) -> np.ndarray:
    """delta(epsilon) = P(loss = inf) + E[max(0, 1 - e^(epsilon - loss))], for many epsilons >= 0 at once."""
    losses = (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization
    positive = losses > 0.0
    losses, masses = losses[positive], pmf._probs[positive]
    above = np.append(np.cumsum(masses[::-1])[::-1], 0.0)  # mass of this loss and all larger ones
    scaled = np.append(np.cumsum((masses * np.exp(-losses))[::-1])[::-1], 0.0)
    place = np.searchsorted(losses, epsilons)
    deltas: np.ndarray = pmf._infinity_mass + above[place] - np.exp(epsilons) * scaled[place]
    return deltas


def _rounded_up(epsilons: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    deltas = np.clip(deltas + ROUNDING, 0.0, 1.0)
    for values in (epsilons, deltas):
        values.setflags(write=False)  # the cached arrays are shared by all callers
    return epsilons, deltas


@lru_cache(maxsize=256)  # training asks for the same number several times
def _discretized_epsilon(charged: Charged, delta: float, interval: float) -> float:
    return float(_composed(charged, interval).get_epsilon_for_delta(delta))


@lru_cache(maxsize=2)
def _composed(charged: Charged, interval: float) -> Any:
    """Return the distribution of all steps together; those without subsampling are one Gaussian release (closed form)."""
    whole = tuple(setting for setting in charged if setting[1] == 1.0)
    mu, total = _gaussian_mu(whole), None
    together = ((1.0 / mu, 1.0, 1),) if mu else ()
    for rho, q, steps in (*together, *(setting for setting in charged if setting[1] < 1.0)):
        _require_affordable(rho, q, steps, interval)
        part = _one_step(rho, q, interval).self_compose(steps)
        total = part if total is None else total.compose(part)
    return total


class _TooLargeError(BudgetError):
    """A privacy loss distribution that does not fit in memory."""


def _require_affordable(rho: float, q: float, steps: int, interval: float) -> None:
    """Refuse a composition that would take too much memory or time."""
    if steps > MOST_STEPS:
        raise BudgetError(f"{steps} steps are more than the accountant can compose ({MOST_STEPS:g}); take fewer steps")
    from dp_accounting.pld.common import compute_self_convolve_bounds

    for pmf in _pmfs(_one_step(rho, q, interval)):
        low, high = compute_self_convolve_bounds(pmf._probs, steps, 1e-15)  # the truncation of `self_compose`
        if high - low >= _MOST_BUCKETS:
            request = f"{steps} steps with noise multiplier {rho:g} and q = {q:.3g}"
            raise _TooLargeError(f"{request} are too many to compose in memory; take fewer steps or more noise")


def is_beyond_reach(events: Iterable[GaussianSteps]) -> bool:
    """Return whether the mean privacy loss is so large (in the hundreds) that its distribution does not fit in memory.

    The mean loss of a step is at most min(q / (2 rho^2), q^2 (e^(1/rho^2) - 1)): convexity, and KL below chi-squared.
    """
    total = 0.0
    for event in events:
        rho, q = max(event.noise_multiplier, SMALLEST_NOISE_MULTIPLIER), event.sampling_probability
        total += event.steps * min(q / (2 * rho * rho), q * q * math.expm1(1 / (rho * rho)))
    return total > _LARGEST_MEAN_LOSS


def _interval(noise_multiplier: float) -> float:
    """Width of a bucket of privacy loss: 1e-4, wider where little noise makes the losses themselves large."""
    return 1e-4 * max(1.0, 0.5 / noise_multiplier) ** 2


@lru_cache(maxsize=8)
def _one_step(noise_multiplier: float, sampling_probability: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution  # slow to import: only when needed

    one = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sampling_probability, value_discretization_interval=interval, use_connect_dots=True
    )
    # The sparse form of the library first computes size ** steps, a number with hundreds of millions of digits.
    return privacy_loss_distribution.PrivacyLossDistribution(*_pmfs(one))


def _pmfs(distribution: Any) -> tuple[Any, Any]:
    """Return the privacy losses of removing and of adding a record, as dense PMFs."""
    return distribution._pmf_remove.to_dense_pmf(), distribution._pmf_add.to_dense_pmf()


def rdp_epsilon(*, noise_multiplier: float, sampling_probability: float, steps: int, delta: float) -> float:
    """Return epsilon by Renyi accounting (Mironov et al. 2019): looser, shown with the PLD because papers quote it."""
    import dp_accounting

    if steps == 0 or noise_multiplier < SMALLEST_NOISE_MULTIPLIER:  # as in `compose`: the square of a tiny multiplier is 0
        return 0.0 if steps == 0 else math.inf
    accountant = dp_accounting.rdp.RdpAccountant()
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian), steps)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def calibrate(
    *, epsilon: float, delta: float, sampling_probability: float, steps: int, besides: tuple[GaussianSteps, ...] = ()
) -> float:
    """Return the smallest noise multiplier (to six digits, rounded up) whose epsilon is at most the given one.

    `besides` are other releases that share the budget.

    Guarantee: epsilon of these steps and `besides` together is at most `epsilon` and at least 99.9 % of it.
    """
    finite_in("epsilon", epsilon, 0.0, 100.0, open_low=True, error=BudgetError, remedy="a usual budget is 1 to 8")
    finite_in("delta", delta, 0.0, LARGEST_DELTA, open_low=True, error=BudgetError, remedy="e.g. 1e-5")
    GaussianSteps(1.0, sampling_probability, steps)
    integer_in("steps", steps, 1, error=BudgetError)

    refused: list[tuple[float, _TooLargeError]] = []

    def renyi_is_far_below(aim: float, rho: float) -> bool:
        bound = rdp_epsilon(noise_multiplier=rho, sampling_probability=sampling_probability, steps=steps, delta=delta)
        return bound < aim / 2

    def spent(rho: float, coarser: float = 1.0) -> float:
        try:
            value = compose([*besides, GaussianSteps(rho, sampling_probability, steps)], delta, coarser)
        except _TooLargeError as error:
            refused.append((rho, error))
            if renyi_is_far_below(aim, rho):  # the answer has even less noise, and an even larger distribution
                raise
            return math.inf  # more noise makes the distribution smaller
        for too_little, reason in refused:
            if value < aim and too_little < rho < _NEAR * too_little:  # the answer is in between: bisection would not end
                raise reason
        return value

    # Search with buckets ten times as wide (eight times as fast) for the value they give where the fine ones give `aim`.
    aim = wide_aim = epsilon * (1.0 - CALIBRATION_TOLERANCE)
    rho = _first_guess(aim, delta, sampling_probability, steps)
    for _ in range(3 if epsilon >= 0.1 else 0):
        rho = _six_digits_up(_solve_decreasing(lambda r: spent(r, 10.0), wide_aim, rho))
        value = spent(rho)
        if aim * (1.0 - CALIBRATION_TOLERANCE) <= value <= epsilon or (rho <= SMALLEST_NOISE_MULTIPLIER and value <= epsilon):
            return rho
        if value == 0.0:  # at a tiny q epsilon jumps from 0 past the budget: only the fine search finds where
            break
        wide_aim *= aim / value
    return _six_digits_up(_solve_decreasing(spent, aim, rho))  # the budget is too small for wide buckets


def steps_within(*, epsilon: float, delta: float, noise_multiplier: float, sampling_probability: float) -> int:
    """Return the largest number of steps within the budget (0 if a single step exceeds it)."""

    def spent(steps: int) -> float:
        return compose([GaussianSteps(noise_multiplier, sampling_probability, steps)], delta)

    finite_in("epsilon", epsilon, 0.0, 100.0, open_low=True, error=BudgetError)
    if spent(1) > epsilon:
        return 0
    low, high = 1, MOST_STEPS + 1  # low fits; high does not fit, or is out of range
    trial = _first_guess_of_steps(epsilon, delta, noise_multiplier, sampling_probability)
    power, last = 0.5, (0, 0.0)  # epsilon grows about like steps ** power
    for attempt in itertools.count():
        trial = min(max(trial, low + 1), high - 1)
        value = spent(trial)
        low, high = (trial, high) if value <= epsilon else (low, trial)
        if low == MOST_STEPS:
            raise BudgetError("more than 1e9 steps fit in the budget; lower the noise multiplier")
        if high - low == 1:
            return low
        if min(value, last[1]) > 0 and max(value, last[1]) < math.inf:
            power = min(max(math.log(value / last[1]) / math.log(trial / last[0]), 0.2), 5.0)
        last = (trial, value)
        growth = (epsilon / value) ** (1.0 / power) if value > 0 else 2.0
        trial = int(trial * min(growth, 2.0)) if attempt < 12 else (low + high) // 2
    raise AssertionError("unreachable")


def _first_guess_of_steps(epsilon: float, delta: float, rho: float, q: float) -> int:
    """Estimate the steps that spend epsilon, by the central limit theorem of Gaussian DP (Dong et al. 2019)."""
    mu = gaussian_mu(epsilon, delta)
    one_step = q * math.sqrt(math.expm1(1.0 / (rho * rho))) if q < 1 else 1.0 / rho
    return int(min((mu / one_step) ** 2, MOST_STEPS))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon of a Gaussian release with sensitivity/noise = mu, from the exact curve of Balle and Wang (2018).

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

    Guarantee: not below the exact epsilon, and at most ROUNDING above it. Each term is shifted by more than its rounding error,
    and the root by more than brentq's tolerance.
    """
    finite_in("delta", delta, 0.0, 1.0, open_low=True, open_high=True, error=BudgetError)
    if mu <= 0:
        return 0.0
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    def excess(eps: float) -> float:
        rounding = 1e-14 * (100.0 + eps)  # of log Phi, whose size is about eps + 20
        first = math.exp(log_ndtr(mu / 2 - eps / mu)) * (1.0 + rounding)
        second = math.exp(min(0.0, eps + log_ndtr(-mu / 2 - eps / mu))) * (1.0 - rounding)
        return first - second - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * mu / 2 + mu * 40 + 1, xtol=1e-12)) * (1.0 + 1e-14) + 2e-12


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return mu of the Gaussian release that spends (epsilon, delta), to 1e-6: the inverse of `gaussian_epsilon`."""
    from scipy.optimize import brentq

    return float(brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 0.0, 200.0, xtol=1e-6))


def _first_guess(target: float, delta: float, q: float, steps: int) -> float:
    """Estimate the noise multiplier by the central limit theorem of Gaussian DP (Dong et al. 2019)."""
    from scipy.optimize import brentq

    def excess(log_rho: float) -> float:
        rho = math.exp(log_rho)
        mu = q * math.sqrt(steps * math.expm1(min(1.0 / (rho * rho), 600.0))) if q < 1 else math.sqrt(steps) / rho
        return gaussian_epsilon(min(mu, 1e4), delta) - target

    low, high = math.log(SMALLEST_NOISE_MULTIPLIER), math.log(LARGEST_NOISE_MULTIPLIER)
    if excess(high) > 0:
        raise _needs_more_noise(target)
    return math.exp(low) if excess(low) < 0 else math.exp(float(brentq(excess, low, high, xtol=1e-3)))


def _needs_more_noise(target: float) -> BudgetError:
    return BudgetError(
        f"epsilon {target:.3g} needs a noise multiplier above {LARGEST_NOISE_MULTIPLIER:g}; raise epsilon or delta, or take "
        "fewer steps"
    )


def _solve_decreasing(function: Callable[[float], float], aim: float, guess: float) -> float:
    """Find x with aim (1 - tolerance) <= function(x) <= aim (1 + tolerance / 2), by secants in log-log within a bracket."""
    low, high = 0.0, math.inf  # function(low) > aim >= function(high)
    x, last = guess, None
    for _ in range(60):
        value = function(x)
        if aim * (1.0 - CALIBRATION_TOLERANCE) <= value <= aim * (1.0 + CALIBRATION_TOLERANCE / 2):
            return x
        if x <= SMALLEST_NOISE_MULTIPLIER and value <= aim:
            return x
        if x >= LARGEST_NOISE_MULTIPLIER and value > aim:
            raise _needs_more_noise(aim)
        low, high = (x, high) if value > aim else (low, x)
        slope = -1.0
        if last is not None and 0 < value < math.inf and last[1] < math.inf and value != last[1] and last[1] > 0:
            slope = (math.log(value) - math.log(last[1])) / (math.log(x) - math.log(last[0]))
        last = (x, value)
        step = math.log(aim / value) / min(slope, -0.1) if 0 < value < math.inf else (-0.5 if value == 0 else 0.5)
        x = x * math.exp(max(-1.0, min(1.0, step)))
        if not low < x < high:
            x = math.sqrt(low * high) if low > 0 and high < math.inf else (low * 2 if low > 0 else high / 2)
        x = min(max(x, SMALLEST_NOISE_MULTIPLIER), LARGEST_NOISE_MULTIPLIER)
    raise BudgetError(f"no noise multiplier found for epsilon {aim:.3g}; the budget cannot be met")


def _six_digits_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return float(f"{math.ceil(value / unit) * unit:.6g}")
