"""The balls an attack may move in: draw a random point, or take one step. Images stay in [0, 1]."""

from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap

from ..rng import Purpose, bulk_normal, uniform_words
from ..views.smoothadv import step_in_l2_ball

_UNIT = 2.0**-64  # scales a uniform 64-bit word to [0, 1)
MOST_STARTS = 1000


class Ball(Protocol):
    """The points within `strength` of an image, in some norm."""

    def random(self, key: bytes, x: Tensor, index: int, start: int, strength: float) -> Tensor:
        """Return a uniform point of the ball around one image, clamped to [0, 1]; a function of (key, index, start)."""

    def step(self, x: Tensor, moved: Tensor, uphill: Tensor, strength: float, step: float) -> Tensor:
        """Move each image by `step` along its gradient, within its ball and [0, 1]."""


class Linf:
    """Every pixel changes by at most `strength`; a step follows the gradient's sign."""

    def random(self, key: bytes, x: Tensor, index: int, start: int, strength: float) -> Tensor:
        """Draw uniformly from the cube."""
        words = uniform_words(key, Purpose.ATTACK, x.numel(), index, start)
        offset = torch.from_numpy((words * _UNIT * 2.0 - 1.0).astype("float32")).view(x.shape).to(x.device)
        return torch.clamp(x + strength * offset, 0.0, 1.0)

    def step(self, x: Tensor, moved: Tensor, uphill: Tensor, strength: float, step: float) -> Tensor:
        """Step along the gradient's sign."""
        moved = x + torch.clamp(moved + step * uphill.sign() - x, -strength, strength)
        return torch.clamp(moved, 0.0, 1.0)


class L2:
    """The whole image changes by at most `strength` in Euclidean length; a step follows the normalized gradient."""

    def random(self, key: bytes, x: Tensor, index: int, start: int, strength: float) -> Tensor:
        """Draw a normal direction and a radius whose d-th power is uniform."""
        direction = bulk_normal(key, Purpose.ATTACK, tuple(x.shape), torch.device("cpu"), index, start).to(x.device)
        word = uniform_words(key, Purpose.ATTACK, 1, index, MOST_STARTS + start)[0]
        radius = strength * float(word * _UNIT) ** (1.0 / x.numel())
        return torch.clamp(x + radius * direction / torch.linalg.vector_norm(direction), 0.0, 1.0)

    def step(self, x: Tensor, moved: Tensor, uphill: Tensor, strength: float, step: float) -> Tensor:
        """Step along the gradient."""

        def one(x: Tensor, moved: Tensor, uphill: Tensor) -> Tensor:
            return step_in_l2_ball(x, moved, uphill, strength, step)

        stepped: Tensor = vmap(one)(x, moved, uphill)
        return stepped
