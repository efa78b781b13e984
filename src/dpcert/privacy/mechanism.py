"""The private mechanism, the file to audit: plan, sample, release.

    plan     q = B / N and T are public constants; rho is calibrated from (epsilon, delta)
    charge   the steps of a block are in the ledger, durably, before the first of them runs
    sample   Poisson batch of step t, from (key, t)
    release  clipped sum + N(0, rho^2 C^2 I), divided by the expected batch size B, from (key, t)

Guarantee: the sequence of releases is (epsilon, delta)-DP under adding or removing one record, with the epsilon that
`statement.state` computes from the ledger, if every clipped sum has the sensitivity that it carries.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from .._validate import finite_in, integer_in
from ..errors import BudgetError, ConfigError
from . import accounting, noise, sampling
from .clipping import ClipRule
from .ledger import Ledger
from .selection import Selection, merged
from .unbounded import UNBOUNDED

STEPS_PER_BLOCK = 100
RECORDED_LATER = ("input_shape",)  # facts that ledgers of older versions do not contain


@dataclass(frozen=True)
class Phase:
    """Consecutive steps that train the same parameters, with one batch size, clip norm and noise."""

    trains: str
    batch_size: int
    steps: int
    clip_norm: float | None
    noise_multiplier: float


@dataclass(frozen=True)
class EarlierPhase:
    """A request for a phase before the main one. `budget` is its share of the privacy budget, in units of mu^2.

    mu^2 adds up over Gaussian releases (Dong et al. 2022), so the shares of all phases add up to about 1.
    """

    trains: str
    batch_size: int
    steps: int
    clip_norm: float
    budget: float


@dataclass(frozen=True)
class Plan:
    """What will be released and what it costs: public values, fixed before any record is read.

    With several phases, `steps` counts the steps of all of them; batch size, clip norm and noise are those of the last one.
    """

    dataset_size: int
    size_given: bool
    classes: int
    classes_given: bool
    held_out: int
    batch_size: int
    steps: int
    clip_rule: str
    clip_parameters: dict[str, float]
    clip_norm: float | None
    noise_multiplier: float
    target_epsilon: float | None
    delta: float
    input_shape: list[int] | None = None
    phases: tuple[Phase, ...] = ()  # empty: all steps are alike
    selection: Selection | None = None  # the charged search that this is a trial of

    @property
    def sampling_probability(self) -> float:
        """q = B / N, a public constant."""
        return self.batch_size / self.dataset_size

    @property
    def every_phase(self) -> tuple[Phase, ...]:
        """The phases in order, at least one."""
        return self.phases or (Phase("all", self.batch_size, self.steps, self.clip_norm, self.noise_multiplier),)

    def phase_of(self, step: int) -> int:
        """Return the index of the phase that step 0, 1 ... steps - 1 belongs to. Steps are numbered across phases."""
        ends = accumulate(phase.steps for phase in self.every_phase)
        return next(index for index, end in enumerate(ends) if step < end)

    def first_step_of(self, index: int) -> int:
        """Return the number of the first step of a phase."""
        return sum(phase.steps for phase in self.every_phase[:index])

    def rate_of(self, phase: Phase) -> float:
        """q of a phase."""
        return phase.batch_size / self.dataset_size

    def releases(self, steps: int) -> list[accounting.GaussianSteps]:
        """Return the first `steps` steps as accountant events."""
        events = []
        for phase in self.every_phase:
            taken = min(steps, phase.steps)
            steps -= taken
            if taken:
                events.append(accounting.GaussianSteps(phase.noise_multiplier, self.rate_of(phase), taken))
        return events

    def epochs_after(self, steps: int) -> float:
        """Return how often a record was sampled in the first `steps` steps, on average."""
        return sum(event.steps * event.sampling_probability for event in self.releases(steps))


def make_plan(
    *,
    dataset_size: int,
    size_given: bool,
    classes: int,
    classes_given: bool,
    held_out: int,
    batch_size: int,
    epochs: float,
    clip: ClipRule,
    clip_norm: float,
    epsilon: float,
    delta: float,
    input_shape: Sequence[int] | None = None,
    steps: int | None = None,
    trains: str = "all",
    earlier: Sequence[EarlierPhase] = (),
) -> Plan:
    """Fix q and T, and find the noise that keeps T steps within (epsilon, delta).

    T is `steps`, or the number of whole steps in `epochs`. With a clip rule in `UNBOUNDED` there is no noise and no guarantee.
    Phases in `earlier` come first; the last phase gets the noise with which all phases together use the budget.
    """
    integer_in("dataset size", dataset_size, 1)
    integer_in("train.batch_size", batch_size, 1)
    if batch_size > dataset_size:
        raise ConfigError(f"train.batch_size is {batch_size}, larger than the {dataset_size} records; lower it")
    finite_in("train.epochs", epochs, 0.0, 1e6, open_low=True)
    finite_in("privacy.epsilon", epsilon, 0.0, 100.0, open_low=True, error=BudgetError, remedy="a usual budget is 1 to 8")
    finite_in("privacy.delta", delta, 0.0, accounting.LARGEST_DELTA, open_low=True, error=BudgetError, remedy="e.g. 1e-5")
    finite_in("privacy.clip_norm", clip_norm, 0.0, 1e6, open_low=True)
    steps = int(epochs * dataset_size / batch_size) if steps is None else steps
    if steps < 1:
        raise ConfigError(f"train.epochs is {epochs:g}, less than one step of {batch_size} of {dataset_size} records; raise it")
    bounded = clip.name not in UNBOUNDED
    rho = 0.0
    if bounded and sum(phase.budget for phase in earlier) >= 1.0:
        shares = " + ".join(f"{phase.budget:g} ({phase.trains})" for phase in earlier)
        raise BudgetError(f"the phases before the last one get shares {shares} of the budget, which leaves nothing; lower them")
    before = [_calibrated(phase, epsilon, delta, dataset_size, bounded=bounded) for phase in earlier]
    if bounded:
        rho = accounting.calibrate(
            epsilon=float(epsilon),
            delta=float(delta),
            sampling_probability=batch_size / dataset_size,
            steps=steps,
            besides=tuple(
                accounting.GaussianSteps(phase.noise_multiplier, phase.batch_size / dataset_size, phase.steps)
                for phase in before
            ),
        )
    last = Phase(trains, batch_size, steps, float(clip_norm) if bounded else None, rho)
    return Plan(
        dataset_size=dataset_size,
        size_given=size_given,
        classes=classes,
        classes_given=classes_given,
        held_out=held_out,
        batch_size=batch_size,
        steps=steps + sum(phase.steps for phase in before),
        clip_rule=clip.name,
        clip_parameters=dict(asdict(clip)),  # type: ignore[call-overload]
        clip_norm=last.clip_norm,
        noise_multiplier=rho,
        target_epsilon=float(epsilon) if bounded else None,
        delta=float(delta),
        input_shape=None if input_shape is None else list(input_shape),
        phases=(*before, last) if before else (),
    )


def as_trial(plan: Plan, selection: Selection, target_epsilon: float) -> Plan:
    """Return the plan of one trial of a charged search, whose best trial is released within `target_epsilon`.

    Guarantee: the search lists the releases of this plan, and its epsilon is at most the target.
    """
    own = merged(astuple(event) for event in plan.releases(plan.steps))
    if own not in selection.curves:
        raise BudgetError(f"the search does not list a trial with the releases {own}; a setting changes its cost unannounced")
    spent = selection.epsilon(own, plan.delta)
    if not spent <= target_epsilon:
        raise BudgetError(f"the search spends epsilon {spent:.6g}, its budget is {target_epsilon:g}; start the search again")
    return replace(plan, selection=selection, target_epsilon=float(target_epsilon))


def _calibrated(phase: EarlierPhase, epsilon: float, delta: float, dataset_size: int, *, bounded: bool) -> Phase:
    """Return an earlier phase with the noise that spends its share of the budget."""
    finite_in("the budget share of a phase", phase.budget, 0.0, 1.0, open_low=True, open_high=True, error=BudgetError)
    integer_in("the batch size of a phase", phase.batch_size, 1, dataset_size, remedy="it is at most the number of records")
    if not bounded:
        return Phase(phase.trains, phase.batch_size, phase.steps, None, 0.0)
    share = accounting.gaussian_epsilon(math.sqrt(phase.budget) * accounting.gaussian_mu(epsilon, delta), delta)
    rho = accounting.calibrate(
        epsilon=share, delta=delta, sampling_probability=phase.batch_size / dataset_size, steps=phase.steps
    )
    return Phase(phase.trains, phase.batch_size, phase.steps, float(phase.clip_norm), rho)


def opening_facts(plan: Plan, *, noise_is_secret: bool) -> dict[str, Any]:
    """Return the facts for the first line of the ledger."""
    facts = asdict(plan)
    if plan.input_shape is None:
        del facts["input_shape"]
    facts["phases"] = [asdict(phase) for phase in plan.phases]
    if not plan.phases:
        del facts["phases"]
    del facts["selection"]
    if plan.selection is not None:
        facts["repeat_and_select"] = plan.selection.facts
    return {
        **facts,
        "sampling": "poisson",
        "sampling_probability": plan.sampling_probability,
        "divisor": plan.batch_size,
        "relation": accounting.RELATION,
        "noise_source": "secret" if noise_is_secret else "seeded",
    }


@dataclass(frozen=True)
class Mechanism:
    """One run's mechanism: the plan, the run key and the ledger. Stateless between steps."""

    plan: Plan
    key: bytes
    ledger: Ledger

    def charge(self, step: int) -> bool:
        """Authorise the block that contains `step` and return True, unless it is already authorised."""
        if step < self.ledger.steps_authorised:
            return False
        index = self.plan.phase_of(step)
        phase = self.plan.every_phase[index]
        steps = min(STEPS_PER_BLOCK, self.plan.first_step_of(index) + phase.steps - step)
        self.ledger.authorise(step, steps, phase.noise_multiplier, self.plan.rate_of(phase))
        return True

    def sample(self, records: int, step: int) -> np.ndarray:
        """Return the batch indices of one step; may be empty."""
        return sampling.poisson_indices(records, self.plan.rate_of(self._phase(step)), self.key, step)

    def release(self, clipped: noise.BoundedValue, step: int) -> Tensor:
        """Return the noised mean gradient of one step, in float64. The divisor is B, never the size of the drawn batch."""
        if step >= self.ledger.steps_authorised:
            raise BudgetError(f"step {step} is not authorised in the ledger; nothing is released")
        phase = self._phase(step)
        return noise.add(clipped, phase.noise_multiplier, self.key, step) / phase.batch_size

    def _phase(self, step: int) -> Phase:
        return self.plan.every_phase[self.plan.phase_of(step)]
