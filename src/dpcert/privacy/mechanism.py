"""The private mechanism, the file to audit: plan, sample, release.

    plan     q = B / N and T are public constants; rho is calibrated from (epsilon, delta)
    charge   the steps of a block are in the ledger, durably, before the first of them runs
    sample   Poisson batch of step t, from (key, t)
    release  clipped sum + N(0, rho^2 C^2 I), divided by the expected batch size B, from (key, t)

Guarantee: the sequence of releases is (epsilon, delta)-DP under adding or removing one record, with the epsilon that
`statement.state` computes from the ledger, if every clipped sum has the sensitivity that it carries.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from .._validate import finite_in, integer_in
from ..errors import BudgetError, ConfigError
from . import accounting, noise, sampling
from .clipping import ClipRule
from .ledger import Ledger

STEPS_PER_BLOCK = 100
RECORDED_LATER = ("input_shape",)  # facts that ledgers of older versions do not contain


@dataclass(frozen=True)
class Plan:
    """What will be released and what it costs: public values, fixed before any record is read."""

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

    @property
    def sampling_probability(self) -> float:
        """q = B / N, a public constant."""
        return self.batch_size / self.dataset_size


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
) -> Plan:
    """Fix q and T, and find the noise that keeps T steps within (epsilon, delta).

    T is the number of whole steps in `epochs`. Without clipping (clip rule `none`) there is no noise and no guarantee.
    """
    integer_in("dataset size", dataset_size, 1)
    integer_in("train.batch_size", batch_size, 1)
    if batch_size > dataset_size:
        raise ConfigError(f"train.batch_size is {batch_size}, larger than the {dataset_size} records; lower it")
    finite_in("train.epochs", epochs, 0.0, 1e6, open_low=True)
    finite_in("privacy.epsilon", epsilon, 0.0, 100.0, open_low=True, error=BudgetError, remedy="a usual budget is 1 to 8")
    finite_in("privacy.delta", delta, 0.0, accounting.LARGEST_DELTA, open_low=True, error=BudgetError, remedy="e.g. 1e-5")
    finite_in("privacy.clip_norm", clip_norm, 0.0, 1e6, open_low=True)
    steps = int(epochs * dataset_size / batch_size)
    if steps < 1:
        raise ConfigError(f"train.epochs is {epochs:g}, less than one step of {batch_size} of {dataset_size} records; raise it")
    bounded = clip.name != "none"
    rho = 0.0
    if bounded:
        rho = accounting.calibrate(
            epsilon=float(epsilon), delta=float(delta), sampling_probability=batch_size / dataset_size, steps=steps
        )
    return Plan(
        dataset_size=dataset_size,
        size_given=size_given,
        classes=classes,
        classes_given=classes_given,
        held_out=held_out,
        batch_size=batch_size,
        steps=steps,
        clip_rule=clip.name,
        clip_parameters=dict(asdict(clip)),  # type: ignore[call-overload]
        clip_norm=float(clip_norm) if bounded else None,
        noise_multiplier=rho,
        target_epsilon=float(epsilon) if bounded else None,
        delta=float(delta),
        input_shape=None if input_shape is None else list(input_shape),
    )


def opening_facts(plan: Plan, *, noise_is_secret: bool) -> dict[str, Any]:
    """Return the facts for the first line of the ledger."""
    facts = asdict(plan)
    if plan.input_shape is None:
        del facts["input_shape"]
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

    def charge(self, step: int) -> None:
        """Authorise the block that contains `step`, unless it is already authorised."""
        if step >= self.ledger.steps_authorised:
            steps = min(STEPS_PER_BLOCK, self.plan.steps - step)
            self.ledger.authorise(step, steps, self.plan.noise_multiplier, self.plan.sampling_probability)

    def sample(self, records: int, step: int) -> np.ndarray:
        """Return the batch indices of one step; may be empty."""
        return sampling.poisson_indices(records, self.plan.sampling_probability, self.key, step)

    def release(self, clipped: noise.BoundedValue, step: int) -> Tensor:
        """Return the noised mean gradient of one step, in float64. The divisor is B, never the size of the drawn batch."""
        if step >= self.ledger.steps_authorised:
            raise BudgetError(f"step {step} is not authorised in the ledger; nothing is released")
        return noise.add(clipped, self.plan.noise_multiplier, self.key, step) / self.plan.batch_size
