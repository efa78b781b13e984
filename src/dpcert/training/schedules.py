"""Learning-rate schedules: the table, and the keys they use. To add one, write a function and add it to `SCHEDULES`.

The factor is a function of (keys, step, total steps), all public, and has no state: a resumed run uses the same factors.
"""

import math
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from ..sections import OPTIONAL, Section, name_in


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# Maps the share of post-warm-up steps that are done, in [0, 1), to a factor of the learning rate.
SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


class ScheduleKeys(Section):
    """`warmup` is the share of all steps in which the learning rate rises linearly; `schedule` applies to the rest."""

    schedule: Annotated[str, name_in(SCHEDULES), OPTIONAL] = "constant"
    warmup: Annotated[float, Field(ge=0, le=1), OPTIONAL] = 0.0


def learning_rate_factor(keys: ScheduleKeys, step: int, steps: int) -> float:
    """Return the learning-rate factor of step 0, 1 ... steps - 1: in (0, 1], and 1 without schedule and warm-up."""
    rising = round(keys.warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return SCHEDULES[keys.schedule]((step - rising) / (steps - rising))
