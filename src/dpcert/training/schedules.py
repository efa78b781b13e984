"""Learning-rate schedules: the table, and the keys they use. A new schedule is a function here and a line of `SCHEDULES`.

The factor of a step is a function of (keys, step, steps in all), all public, and never state: a resumed run has the same one.
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


# From the share of the steps after the warm-up that are done, in [0, 1), to the share of the learning rate.
SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


class ScheduleKeys(Section):
    """`warmup` is the share of all steps in which the learning rate rises linearly; then `schedule` takes over."""

    schedule: Annotated[str, name_in(SCHEDULES), OPTIONAL] = "constant"
    warmup: Annotated[float, Field(ge=0, le=1), OPTIONAL] = 0.0


def learning_rate_factor(keys: ScheduleKeys, step: int, steps: int) -> float:
    """The share of the learning rate that step 0, 1 ... steps - 1 takes: in (0, 1], and 1 without schedule and warm-up."""
    rising = round(keys.warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return SCHEDULES[keys.schedule]((step - rising) / (steps - rising))
