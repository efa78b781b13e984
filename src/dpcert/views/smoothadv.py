"""Adversarial views of a smoothed classifier (SmoothAdv, Salman et al. 2019), one example at a time."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from .._validate import finite_in, integer_in
from ..errors import ConfigError
from ..input_gradients import for_input_gradients
from ..isolation import keeps_rows_apart
from ..row_proof import proven_forward


@dataclass(frozen=True)
class SmoothAdv:
    """x_0 = x and x_j = x' + eta_j: x' = argmax over the L2 ball around x of -log( 1/K sum_j F(x' + eta_j)_y ).

    Projected gradient ascent with the K noises held fixed: each of `steps` steps moves by 2 radius / steps along the
    normalized gradient (along eta_1 if that is 0: a random direction that is reproducible from the noise), then projects
    back into [0, 1] and into the ball. The radius grows linearly over the first `warmup` epochs (`at`).

    Loss and step are written for one example and mapped over the batch. The model gets all rows at once only if it provably
    processes each row independently. A pure function of (model, x, y, noise).
    """

    sigma: float = 0.5
    copies: int = 2
    keep_original: bool = True
    radius: float = 64 / 256
    steps: int = 2
    warmup: float = 10.0
    strength: float = 1.0
    name: ClassVar[str] = "smoothadv"

    def __post_init__(self) -> None:
        finite_in("method.sigma", self.sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
        integer_in("method.copies", self.copies, 0, 1024)
        if self.copies == 0:
            raise ConfigError("method.copies is 0, the attack of smoothadv needs at least one noisy copy; the paper uses 2")
        remedy = "the paper uses 0.25; for no attack use views gaussian"
        finite_in("method.smoothadv_radius", self.radius, 0.0, 1e3, open_low=True, remedy=remedy)
        integer_in("method.smoothadv_steps", self.steps, 1, 1000, remedy="the paper uses 2; for no attack use views gaussian")
        finite_in("method.smoothadv_warmup", self.warmup, 0.0, 1e6, remedy="in epochs; the paper uses 10")
        finite_in("strength", self.strength, 0.0, 1.0)

    @property
    def count(self) -> int:
        """R, the number of views of an example."""
        return self.copies + int(self.keep_original)

    def at(self, epoch: float) -> "SmoothAdv":
        """Return the views at `epoch`: the radius is ramped up, a function of public numbers only."""
        return replace(self, strength=min(1.0, epoch / self.warmup) if self.warmup > 0 else 1.0)

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``x [b, ...]``, standard normal ``noise [b, K, ...]`` -> ``[b, R, ...]``."""
        if len(x) == 0:
            return noise.new_empty((0, self.count, *x.shape[1:]))
        gradients = uphill if keeps_rows_apart(model, tuple(x.shape[1:])) else uphill_of_each
        traced = proven_forward(model, tuple(x.shape[1:])) if gradients is uphill_of_each else None
        gradients, target = (gradients, for_input_gradients(model)) if traced is None else (uphill, traced)
        eta, moved = self.sigma * noise, x
        for _ in range(self.steps):
            moved = vmap(self._move)(x, moved, gradients(target, moved, labels, eta), eta[:, 0])
        noisy = moved.unsqueeze(1) + eta
        return torch.cat([x.unsqueeze(1), noisy], dim=1) if self.keep_original else noisy

    def _move(self, x: Tensor, moved: Tensor, gradient: Tensor, fallback: Tensor) -> Tensor:
        """Move one example one step along its gradient (along `fallback` if that is 0)."""
        radius = self.radius * self.strength
        along = torch.where((gradient == 0).all(), fallback, gradient)
        return step_in_l2_ball(x, moved, along, radius, 2 * radius / self.steps)


def step_in_l2_ball(x: Tensor, moved: Tensor, along: Tensor, radius: float, step: float) -> Tensor:
    """Move one example by `step` along a direction of any length, then project into [0, 1] and into the L2 ball around x."""
    moved = torch.clamp(moved + step * along / _length(along), 0.0, 1.0)
    offset = moved - x
    return x + offset * torch.clamp(radius / _length(offset), max=1.0)


def loss_of_one(logits: Tensor, label: Tensor) -> Tensor:
    """-log( mean_j F(x' + eta_j)_y ) of one example, from its logits ``[K, classes]``, without the constant log K."""
    log_f = F.log_softmax(logits, dim=1)
    is_label = torch.arange(logits.shape[1], device=logits.device) == label
    return -torch.logsumexp(torch.where(is_label, log_f, 0.0).sum(dim=1), dim=0)


def uphill(model: nn.Module, x: Tensor, labels: Tensor, eta: Tensor) -> Tensor:
    """Return each example's loss gradient for its input. The model does not mix rows, so the gradient of the sum suffices."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = model((x.unsqueeze(1) + eta).flatten(0, 1)).unflatten(0, eta.shape[:2])
        (gradient,) = torch.autograd.grad(vmap(loss_of_one)(logits, labels).sum(), x)
    return gradient


def uphill_of_each(model: nn.Module, x: Tensor, labels: Tensor, eta: Tensor) -> Tensor:
    """Like `uphill`, for a model that might mix rows: it runs on the copies of one example, mapped over the examples."""

    def loss(x: Tensor, label: Tensor, eta: Tensor) -> Tensor:
        return loss_of_one(model(x + eta), label)

    gradient: Tensor = vmap(grad(loss))(x.detach(), labels, eta)
    return gradient


def _length(vector: Tensor) -> Tensor:
    """Return the L2 norm, never 0, as a divisor. Scaled by the largest entry, so that tiny gradients keep their direction."""
    smallest = torch.finfo(vector.dtype).tiny
    largest = vector.abs().amax().clamp(min=smallest)
    length: Tensor = torch.linalg.vector_norm(vector / largest) * largest + smallest
    return length
