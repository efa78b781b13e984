"""The local Lipschitz constant of the features at each input, by projected gradient ascent."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._validate import finite_in, integer_in

Features = Callable[[Tensor], Tensor]  # inputs [b, ...] -> features [b, ...], each a function of its input only


@dataclass(frozen=True)
class BallSearch:
    """The L-inf ball and the ascent in it, with the authors' settings (after Yang et al. 2020)."""

    radius: float = 0.01
    step: float = 0.003
    steps: int = 10

    def __post_init__(self) -> None:
        finite_in("lipschitz radius", self.radius, 0.0, 1.0, open_low=True, remedy="the authors use 0.01")
        finite_in("lipschitz step", self.step, 0.0, 1.0, open_low=True, remedy="the authors use 0.003")
        integer_in("lipschitz steps", self.steps, 0, 100_000, remedy="the authors use 10")


def local_lipschitz(features: Features, x: Tensor, start: Tensor, search: BallSearch | None = None) -> Tensor:
    """Return the largest ``||f(x) - f(x')||_1 / ||x - x'||_inf`` found, x' in the L-inf ball around x and in [0, 1]; ``[b]``.

    A lower bound on the true constant: ascent by the gradient's sign from ``x + radius * start``, `start` in [-1, 1].
    NaN if the features are not finite.
    """
    search = search or BallSearch()
    with torch.no_grad():
        here = features(x).flatten(1)
    moved = _within(x, x + search.radius * start.to(x), search.radius)
    best = torch.zeros_like(x.flatten(1)[:, 0])
    for remaining in range(search.steps, -1, -1):
        with torch.enable_grad():
            moved = moved.detach().requires_grad_()
            ratio = _ratio(features(moved).flatten(1) - here, (moved - x).flatten(1))
            best = torch.maximum(best, ratio.detach())  # propagates NaN
            if not remaining:
                break
            (uphill,) = torch.autograd.grad(ratio.sum(), moved)
        moved = _within(x, moved.detach() + search.step * uphill.sign(), search.radius)
    return best


def _within(x: Tensor, moved: Tensor, radius: float) -> Tensor:
    return torch.clamp(torch.clamp(moved, x - radius, x + radius), 0.0, 1.0)


def _ratio(change: Tensor, offset: Tensor) -> Tensor:
    distance = offset.abs().amax(dim=1)
    return change.abs().sum(dim=1) / distance.clamp(min=torch.finfo(distance.dtype).tiny)
