"""Optimizers: the table, and the keys they use. To add one, write a function and add it to `OPTIMIZERS`.

An optimizer sees noised gradients only, so any update rule is post-processing and costs no privacy.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from ..sections import Section, name_in, used_by

Parameters = Sequence[nn.Parameter]


def _sgd(parameters: Parameters, keys: "OptimizerKeys") -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=keys.learning_rate, momentum=keys.momentum)


def _adam(parameters: Parameters, keys: "OptimizerKeys") -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=keys.learning_rate)


def _adamw(parameters: Parameters, keys: "OptimizerKeys") -> torch.optim.Optimizer:
    assert keys.weight_decay is not None  # resolved by `used_by`
    return torch.optim.AdamW(parameters, lr=keys.learning_rate, weight_decay=keys.weight_decay)


OPTIMIZERS: dict[str, Callable[[Parameters, "OptimizerKeys"], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
}


class OptimizerKeys(Section):
    """`momentum` is SGD's (Adam and AdamW ignore it); `weight_decay` is AdamW's (0.01 unless given)."""

    learning_rate: float = Field(0.5, gt=0, le=1e6)
    momentum: float = Field(0.9, ge=0, lt=1)
    optimizer: Annotated[str, name_in(OPTIMIZERS)] = "sgd"
    weight_decay: Annotated[float | None, Field(ge=0, le=1e6, validate_default=True), used_by("optimizer", adamw=0.01)] = None


def make_optimizer(parameters: Parameters, keys: OptimizerKeys) -> torch.optim.Optimizer:
    """Create the optimizer that `keys` select."""
    return OPTIMIZERS[keys.optimizer](parameters, keys)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate for the next steps."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
