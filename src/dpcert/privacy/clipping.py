"""Clip rules: map the norm of one example's gradient to the factor that bounds it.

Every rule maps norms (float64) to factors (float64) with ``factor * norm <= C (1 - 2^-20)``; the margin is far above the
rounding error of the norm and of the product, so the *rounded* clipped gradient has a norm of at most C.
A norm that is not finite gets factor 0: such a record contributes nothing.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .._validate import finite_in

ROUNDING_MARGIN = 1.0 - 2.0**-20


class ClipRule(Protocol):
    """A clip rule; `clip_norm` is C."""

    @property
    def name(self) -> str:
        """Its name in configs and ledgers."""

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        """The factor of each example."""

    def sensitivity(self, clip_norm: float) -> float:
        """The largest norm of a clipped gradient."""


def _zero_where_not_finite(factors: Tensor, norms: Tensor) -> Tensor:
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))


@dataclass(frozen=True)
class Flat:
    """g / max(1, ‖g‖ / C) (Abadi et al. 2016; line 7 of Algorithm 2)."""

    name: ClassVar[str] = "flat"

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        """min(1, C / ‖g‖)."""
        bound = clip_norm * ROUNDING_MARGIN
        return _zero_where_not_finite(bound / torch.clamp(norms, min=bound), norms)

    def sensitivity(self, clip_norm: float) -> float:
        """C."""
        return clip_norm


@dataclass(frozen=True)
class Psac:
    """C g / (‖g‖ + r / (‖g‖ + r)) (Xia et al. 2023): small gradients stay small, none is scaled up to C.

    Guarantee: the result is shorter than C. With n = ‖g‖ and r > 0 the result has norm C n / (n + r/(n + r)), and
    r/(n + r) > 0, so the denominator is larger than n.
    """

    r: float = 0.01
    name: ClassVar[str] = "psac"

    def __post_init__(self) -> None:
        finite_in("psac r", self.r, 0.0, 1e6, open_low=True)

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        """C / (‖g‖ + r / (‖g‖ + r))."""
        return _zero_where_not_finite(clip_norm * ROUNDING_MARGIN / (norms + self.r / (norms + self.r)), norms)

    def sensitivity(self, clip_norm: float) -> float:
        """C."""
        return clip_norm


@dataclass(frozen=True)
class Automatic:
    """C g / (‖g‖ + gamma) (Bu et al. 2023): normalized gradients. Shorter than C because gamma > 0."""

    gamma: float = 0.01
    name: ClassVar[str] = "automatic"

    def __post_init__(self) -> None:
        finite_in("automatic gamma", self.gamma, 0.0, 1e6, open_low=True)

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        """C / (‖g‖ + gamma)."""
        return _zero_where_not_finite(clip_norm * ROUNDING_MARGIN / (norms + self.gamma), norms)

    def sensitivity(self, clip_norm: float) -> float:
        """C."""
        return clip_norm


@dataclass(frozen=True)
class NoClip:
    """No clipping: ordinary training, not private."""

    name: ClassVar[str] = "none"

    def factors(self, norms: Tensor, clip_norm: float) -> Tensor:
        """1."""
        return _zero_where_not_finite(torch.ones_like(norms), norms)

    def sensitivity(self, clip_norm: float) -> float:
        """Unbounded."""
        return math.inf


@dataclass(frozen=True)
class Noiseless(Flat):
    """Per-example clipping without any noise: what a private method would reach at epsilon = inf."""

    name: ClassVar[str] = "noiseless"


@dataclass(frozen=True)
class Unperturbed(NoClip):
    """StoBatch as published: gradients of an objective with fixed noise in it, neither clipped nor noised."""

    name: ClassVar[str] = "unperturbed"


@dataclass(frozen=True)
class BatchMean(NoClip):
    """SecureSGD as published: the MEAN of the batch is clipped, tensor by tensor, and biases are not clipped at all.

    Removing one record can turn a clipped mean around, so it moves by up to 2 C, whatever B is. The noise is `noise` C / B,
    as if the mean moved by C / B only.
    """

    noise: float = 4.0
    name: ClassVar[str] = "batchmean"

    def __post_init__(self) -> None:
        finite_in("method.batchmean_noise", self.noise, 0.0, 1e6)

    def of_mean(self, tensors: list[Tensor], clip_norm: float) -> list[Tensor]:
        """Return the clipped mean gradients; biases (at most one dimension of more than 1) stay as they are."""
        return [t if is_bias(t) else t * (clip_norm / t.norm().clamp(min=clip_norm)) for t in tensors]


def is_bias(tensor: Tensor) -> bool:
    """Return whether a parameter is a vector, whatever its number of dimensions."""
    return sum(size > 1 for size in tensor.shape) < 2


CLIP_RULES: dict[str, ClipRule] = {
    rule.name: rule for rule in (Flat(), Psac(), Automatic(), NoClip(), Noiseless(), BatchMean(), Unperturbed())
}
