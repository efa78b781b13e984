"""Weight averaging: the table, the keys, and the average itself. To add one, write a function and add it to `AVERAGES`.

Every iterate is a release that the ledger has charged, so an average of iterates is post-processing and costs no privacy.
The average covers the trained parameters after each step, never the initial weights. Buffers and frozen parameters are those
of the last step.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ..sections import OPTIONAL, Section, name_in, used_by

OFF = "none"


def _newest(keys: "AveragingKeys", done: int, steps: int) -> float:
    return 1.0


def _ema(keys: "AveragingKeys", done: int, steps: int) -> float:
    """Return (1 - d) / (1 - d^done): iterate t has weight proportional to d^(done - t), and the weights sum to 1."""
    assert keys.ema_decay is not None  # resolved by `used_by`
    return math.expm1(math.log(keys.ema_decay)) / math.expm1(done * math.log(keys.ema_decay))


def _tail(keys: "AveragingKeys", done: int, steps: int) -> float:
    """Average the last `tail` share of the iterates; before that, use the newest iterate."""
    assert keys.tail is not None
    before = steps - max(1, round(keys.tail * steps))
    return 1.0 / max(1, done - before)


# The share of the newest iterate in the average after `done` of `steps` steps, in (0, 1].
AVERAGES: dict[str, Callable[["AveragingKeys", int, int], float]] = {OFF: _newest, "ema": _ema, "tail": _tail}


class AveragingKeys(Section):
    """`ema_decay` is the decay per step (0.999 unless given), `tail` the share of steps at the end (0.5 unless given)."""

    averaging: Annotated[str, name_in(AVERAGES), OPTIONAL] = OFF
    ema_decay: Annotated[float | None, Field(gt=0, lt=1, validate_default=True), used_by("averaging", ema=0.999)] = None
    tail: Annotated[float | None, Field(gt=0, le=1, validate_default=True), used_by("averaging", tail=0.5)] = None

    @property
    def averaging_in_words(self) -> str | None:
        """The average and its keys, for the model's header; None without averaging."""
        if self.averaging == OFF:
            return None
        keys = {key: getattr(self, key) for key in AveragingKeys.model_fields if key != "averaging"}
        return ", ".join([self.averaging, *(f"{key} {value!r}" for key, value in keys.items() if value is not None)])


class Average:
    """The average of the iterates so far, in float64; with averaging off it is empty and does nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], keys: AveragingKeys, steps: int) -> None:
        self._parameters = [] if keys.averaging == OFF else list(parameters)
        self._keys, self._steps = keys, steps
        self.values: list[Tensor] = [parameter.detach().double().clone() for parameter in self._parameters]

    def include(self, done: int) -> None:
        """Update the average with the weights after `done` steps."""
        share = AVERAGES[self._keys.averaging](self._keys, done, self._steps)
        for value, parameter in zip(self.values, self._parameters, strict=True):
            newest = parameter.detach().double()
            value.copy_(newest if share == 1.0 else value + share * (newest - value))

    def release(self) -> None:
        """Replace the last iterate by the average."""
        self._put(self.values)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Put the average into the model inside the block; restore the last iterate afterwards."""
        raw = [parameter.detach().clone() for parameter in self._parameters]
        self.release()
        try:
            yield
        finally:
            self._put(raw)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
