"""The contract of the engines: (model, loss of one example, views, labels, clip) -> ClippedSum.

A loss maps the logits of ONE example's views, ``[R, classes]``, and its label to a scalar. The engine adds the
batch axis, so a loss cannot see two examples. Engines take ``views [b, R, ...]``, a part of the batch that fits in memory;
the sums of the parts are added.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..isolation import one_at_a_time

_ROUNDING_MARGIN = 1.0 - 2.0**-20  # as in `privacy.clipping`
LossOfOne = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ClippedSum:
    """The sum of clipped per-example gradients, float64, flat in the order of the parameters.

    Guarantee: adding or removing one example moves `value` by at most `sensitivity` in L2.
    `norms` are the norms before clipping. They are *sensitive*: for tests only, and never released.
    """

    value: Tensor
    sensitivity: float
    norms: Tensor

    def __add__(self, other: "ClippedSum") -> "ClippedSum":
        """Return the sum over both batches, which must not share an example."""
        worst = max(self.sensitivity, other.sensitivity)
        return ClippedSum(self.value + other.value, worst, torch.cat([self.norms, other.norms]))


class ClipRule(Protocol):
    """Maps norms to factors, with the bound on the clipped norm."""

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Factor of each example; 0 where the norm is not finite."""

    def sensitivity(self, clip_norm: float) -> float:
        """Largest norm after clipping."""


@dataclass(frozen=True)
class Clip:
    """A rule with its clip norm C.

    Guarantee, for custom rules too: each factor depends only on its own norm, and no clipped gradient is longer than the
    bound that the rule states.
    """

    rule: ClipRule
    norm: float

    def factors(self, norms: Tensor) -> Tensor:
        """Factor of each example."""
        factors = one_at_a_time(lambda norm: self.rule.factors(norm, self.norm))(norms) if len(norms) else norms
        largest = self.sensitivity * _ROUNDING_MARGIN / norms
        return torch.where(torch.isfinite(norms) & torch.isfinite(factors), factors.clamp(-largest, largest), 0.0)

    @property
    def sensitivity(self) -> float:
        """Largest norm after clipping."""
        return self.rule.sensitivity(self.norm)


class Clipping(Protocol):
    """Maps norms to factors, with the bound on the clipped norm: `Clip` or `FirstOnly`."""

    def factors(self, norms: Tensor) -> Tensor:
        """Factor of each example."""

    @property
    def sensitivity(self) -> float:
        """Largest norm after clipping."""


@dataclass(frozen=True)
class FirstOnly:
    """A clip for the first `count` examples; the others are padding and get factor 0."""

    clip: Clip
    count: int

    def factors(self, norms: Tensor) -> Tensor:
        """Factor of each example."""
        factors = self.clip.factors(norms)
        factors[self.count :] = 0.0
        return factors

    @property
    def sensitivity(self) -> float:
        """Largest norm after clipping."""
        return self.clip.sensitivity


class Engine(Protocol):
    """The interface of an engine."""

    def __call__(self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor, clip: Clipping) -> ClippedSum:
        """Return the clipped sum over the examples of ``views [b, R, ...]``."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters, in the order that every flat vector uses."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def empty_sum(model: nn.Module, clip: Clipping) -> ClippedSum:
    """Return the sum over no examples: zero. An empty Poisson batch is a regular step."""
    parameters = trainable(model).values()
    device = next(iter(parameters)).device
    size = sum(parameter.numel() for parameter in parameters)
    nothing = torch.zeros(0, dtype=torch.float64, device=device)
    return ClippedSum(torch.zeros(size, dtype=torch.float64, device=device), clip.sensitivity, nothing)


def may_be_unusable(norms: Tensor) -> bool:
    """Return whether some of the norms may be infinite or NaN.

    Only a CPU is asked. On another device the answer would stop Python until all earlier work is done, which costs more than
    setting to 0 what may not need it.
    """
    return norms.device.type != "cpu" or not bool(torch.isfinite(norms).all())


def clip_and_sum(per_example: Iterable[Tensor], clip: Clipping) -> ClippedSum:
    """Clip and sum per-example gradients, given as one ``[b, ...]`` tensor per parameter. Norms and sums are float64."""
    flat = [gradient.flatten(1) for gradient in per_example]
    parts = [torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64) for gradient in flat]
    norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    factors = clip.factors(norms)
    if may_be_unusable(norms):  # 0 * inf is nan: set such rows to 0, a factor of 0 is not enough
        flat = [torch.where(torch.isfinite(norms)[:, None], gradient, 0.0) for gradient in flat]
    value = torch.cat([factors @ gradient.double() for gradient in flat])
    return ClippedSum(value, clip.sensitivity, norms)
