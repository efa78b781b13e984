"""Epsilon and noise against outside references: dp-accounting itself, the closed form at q = 1, Opacus."""

import math
import warnings

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.stats import norm

import dpcert
from dpcert.errors import BudgetError
from dpcert.privacy import accounting

POINTS = [  # (rho, q, T, delta)
    (1.07, 512 / 60000, 4687, 1e-5),
    (1.81, 2048 / 60000, 1171, 1e-5),
    (0.7, 0.01, 100, 1e-5),
    (4.0, 0.2, 500, 1e-6),
    (1.0, 1.0, 1, 1e-5),
    (2.0, 1.0, 30, 1e-5),
    (0.5, 0.001, 2000, 1e-4),
    (10.0, 0.5, 1000, 1e-7),
]


def epsilon(rho, q, steps, delta):
    return accounting.epsilon(noise_multiplier=rho, sampling_probability=q, steps=steps, delta=delta)


@pytest.mark.parametrize(("rho", "q", "steps", "delta"), POINTS)
def test_between_the_optimistic_and_the_pessimistic_bound(rho, q, steps, delta):
    """D8: never below what is certainly spent, and hardly above it."""
    optimistic = pld.from_gaussian_mechanism(
        rho, sampling_prob=q, value_discretization_interval=1e-4, pessimistic_estimate=False, use_connect_dots=False
    )
    lower = optimistic.self_compose(steps).get_epsilon_for_delta(delta)
    found = epsilon(rho, q, steps, delta)
    assert found >= lower - 1e-9
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(rho))
    theirs = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event, steps).get_epsilon(delta)
    assert found == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_between_the_bounds_at_a_finer_interval():
    """D8 with the interval 1e-5 on the smaller points; about a minute."""
    for rho, q, steps, delta in POINTS[2:6]:
        optimistic = pld.from_gaussian_mechanism(
            rho, sampling_prob=q, value_discretization_interval=1e-5, pessimistic_estimate=False, use_connect_dots=False
        )
        assert epsilon(rho, q, steps, delta) >= optimistic.self_compose(steps).get_epsilon_for_delta(delta) - 1e-9


@pytest.mark.parametrize(("rho", "steps"), [(1.0, 1), (2.0, 4), (5.0, 100), (30.0, 50)])
def test_closed_form_of_the_gaussian_mechanism(rho, steps):
    """Without subsampling T steps are one Gaussian release with mu = sqrt(T) / rho (Balle and Wang 2018)."""
    mu = math.sqrt(steps) / rho

    def delta_of(eps):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu)

    exact = brentq(lambda eps: delta_of(eps) - 1e-5, 0, 100, xtol=1e-12)
    found = epsilon(rho, 1.0, steps, 1e-5)
    assert exact - 1e-9 <= found <= exact * (1 + 1e-3)


def test_opacus_agrees_within_its_own_error():
    warnings.simplefilter("ignore")
    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis import rdp

    rho, q, steps, delta = POINTS[0]
    found = epsilon(rho, q, steps, delta)
    orders = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
    renyi, _ = rdp.get_privacy_spent(
        orders=orders, rdp=rdp.compute_rdp(q=q, noise_multiplier=rho, steps=steps, orders=orders), delta=delta
    )
    assert found < renyi
    ours = accounting.rdp_epsilon(noise_multiplier=rho, sampling_probability=q, steps=steps, delta=delta)
    assert ours == pytest.approx(renyi, rel=0.03)
    accountant = PRVAccountant()
    accountant.history = [(rho, q, steps)]
    assert found == pytest.approx(accountant.get_epsilon(delta, eps_error=0.01), abs=0.02)


@pytest.mark.parametrize(
    ("target", "delta", "q", "steps"),
    [
        (3.0, 1e-5, 512 / 60000, 4687),
        (3.0, 1e-5, 2048 / 60000, 1171),
        (0.1, 1e-6, 0.01, 1000),
        (8.0, 1e-5, 0.3, 50),
        (1.0, 1e-5, 1.0, 1),
        (30.0, 1e-5, 0.02, 100),
    ],
)
def test_calibration_never_passes_the_target_and_uses_it(target, delta, q, steps):
    rho = dpcert.calibrate(epsilon=target, delta=delta, sampling_probability=q, steps=steps)
    assert 0.99 * target <= epsilon(rho, q, steps, delta) <= target


def test_the_papers_settings():
    """SPEC: about 1.07 and 1.81; the authors' 1.23 is epsilon 2.36."""
    assert dpcert.calibrate(epsilon=3.0, delta=1e-5, sampling_probability=512 / 60000, steps=4687) == pytest.approx(
        1.069, abs=2e-3
    )
    assert epsilon(1.23, 512 / 60000, 4687, 1e-5) == pytest.approx(2.36, abs=0.01)
    assert epsilon(2.15, 2048 / 60000, 1171, 1e-5) == pytest.approx(2.39, abs=0.01)


def test_twin_a_smaller_noise_costs_more():
    base = epsilon(1.07, 0.01, 500, 1e-5)
    assert epsilon(1.0, 0.01, 500, 1e-5) > base and epsilon(1.07, 0.02, 500, 1e-5) > base
    assert epsilon(1.07, 0.01, 600, 1e-5) > base and epsilon(1.07, 0.01, 500, 1e-6) > base


def test_events_of_different_settings_compose():
    one = accounting.GaussianSteps(1.0, 0.01, 100)
    other = accounting.GaussianSteps(2.0, 0.05, 50)
    both = accounting.compose([one, other], 1e-5)
    assert max(accounting.compose([one], 1e-5), accounting.compose([other], 1e-5)) < both
    assert both <= accounting.compose([one], 5e-6) + accounting.compose([other], 5e-6)
    assert accounting.compose([one, one], 1e-5) == accounting.compose([accounting.GaussianSteps(1.0, 0.01, 200)], 1e-5)


def test_no_noise_is_infinite_and_no_step_is_free():
    assert math.isinf(epsilon(0.0, 0.01, 1, 1e-5))
    assert epsilon(1.0, 0.01, 0, 1e-5) == 0.0


def test_steps_within_a_budget():
    most = accounting.steps_within(epsilon=1.0, delta=1e-5, noise_multiplier=2.0, sampling_probability=0.02)
    assert epsilon(2.0, 0.02, most, 1e-5) <= 1.0 < epsilon(2.0, 0.02, most + 1, 1e-5)
    assert accounting.steps_within(epsilon=0.01, delta=1e-9, noise_multiplier=0.5, sampling_probability=1.0) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"epsilon": 1000.0}, "epsilon is 1000.0"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"delta": 0.999999}, "delta is 0.999999, must be a number in \\(0, 0.5\\]"),
        ({"sampling_probability": 0.0}, "sampling_probability is 0.0"),
        ({"sampling_probability": 1.5}, "sampling_probability"),
        ({"steps": 0}, "steps is 0"),
        ({"epsilon": 1e-7, "steps": 10**6, "sampling_probability": 1.0}, "needs a noise multiplier"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(changes, words):
    request = {"epsilon": 3.0, "delta": 1e-5, "sampling_probability": 0.01, "steps": 100} | changes
    with pytest.raises(ValueError, match=words):
        dpcert.calibrate(**request)


def test_a_composition_that_cannot_fit_is_refused_before_others_are_tried(monkeypatch):
    """Renyi accounting says that less noise would do, and less noise makes a larger distribution: no other noise is tried."""
    composed = []
    monkeypatch.setattr(accounting, "_discretized_epsilon", lambda charged, *rest: composed.append(charged) or _refuse(charged))

    def _refuse(charged):
        (rho, _, _), *_ = charged
        if rho < 150.0:
            raise accounting._TooLargeError("too many to compose")
        return 14.0

    with pytest.raises(BudgetError, match="too many to compose"):
        accounting.calibrate(epsilon=100.0, delta=1e-5, sampling_probability=0.01, steps=10**9)
    assert len(composed) == 3 and max(rho for ((rho, _, _),) in composed) < 100.0


def test_delta_above_a_half_is_refused_by_every_door():
    for ask in (
        lambda: accounting.epsilon(noise_multiplier=1.0, sampling_probability=0.1, steps=10, delta=0.6),
        lambda: accounting.steps_within(epsilon=1.0, delta=0.6, noise_multiplier=1.0, sampling_probability=0.1),
    ):
        with pytest.raises(BudgetError, match="delta is 0.6"):
            ask()


@pytest.mark.timeout(120)
def test_large_noise_and_many_steps_answer_at_once():
    """The library's sparse form would compute 3 ** steps first: a number of hundreds of millions of digits."""
    small = accounting.epsilon(noise_multiplier=9999.0, sampling_probability=0.01, steps=10**6, delta=1e-5)
    assert 0.0 < small < accounting.epsilon(noise_multiplier=9999.0, sampling_probability=0.01, steps=10**7, delta=1e-5) < 1.0
    with pytest.raises(BudgetError, match="more than 1e9 steps fit"):
        accounting.steps_within(epsilon=3.0, delta=1e-5, noise_multiplier=9999.0, sampling_probability=0.001)


@pytest.mark.parametrize(("rho", "q", "steps"), [(1.0, 0.5, 10**6), (4860.0, 512 / 60000, 10**15), (9999.0, 0.999, 10**9)])
def test_what_would_not_fit_in_memory_is_refused(rho, q, steps):
    with pytest.raises(BudgetError, match="take fewer steps"):
        accounting.epsilon(noise_multiplier=rho, sampling_probability=q, steps=steps, delta=1e-5)


def test_a_budget_for_more_steps_than_can_be_composed_is_refused_in_words():
    for steps in (117_187_500_000, 10**15):
        with pytest.raises(BudgetError, match="fewer steps"):
            accounting.calibrate(epsilon=3.0, delta=1e-5, sampling_probability=512 / 60000, steps=steps)


@pytest.mark.parametrize(
    ("epsilon", "rho", "q"), [(3.0, 1.07, 512 / 60000), (1.0, 2.0, 0.02), (1e-6, 9999.0, 0.01), (3.0, 500.0, 1.0)]
)
def test_steps_within_is_the_largest_number_that_fits(epsilon, rho, q):
    most = accounting.steps_within(epsilon=epsilon, delta=1e-5, noise_multiplier=rho, sampling_probability=q)
    spent = [accounting.epsilon(noise_multiplier=rho, sampling_probability=q, steps=most + k, delta=1e-5) for k in (0, 1)]
    assert spent[0] <= epsilon < spent[1]


def test_a_search_between_too_large_and_enough_ends(monkeypatch):
    """Where the answer itself does not fit in memory, the search must not close in on the limit for ever."""
    calls = []

    def compose(events, delta, coarser=1.0):
        (event,) = events
        calls.append(event.noise_multiplier)
        if event.noise_multiplier < 10.0:
            raise accounting._TooLargeError("too many to compose in memory")
        return 5.0 / event.noise_multiplier

    monkeypatch.setattr(accounting, "compose", compose)
    with pytest.raises(BudgetError, match="in memory"):
        accounting.calibrate(epsilon=3.0, delta=1.1e-5, sampling_probability=0.01, steps=1000)
    assert len(calls) < 15
