"""StoBatch's views: noisy rows of an example, and an adversarial row for each (Phan et al. 2020), one example at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from .._validate import finite_in, integer_in
from ..errors import ConfigError
from ..models.noisy import NoisyModel
from ..row_proof import proven_forward
from .inner import drawn_once, noisy_model, packed, site_sizes

Gradients = Callable[[Tensor, Tensor], Tensor]
_KINDS, _MIM, _PGD = 3, 1, 2  # 0 is I-FGSM


@dataclass(frozen=True)
class StoBatch:
    """K noisy rows of x (noise at both sites), then K rows of adversarial images with the same noise.

    A copy is attacked by I-FGSM, MIM (momentum) or PGD (random start), with probability 1/3 each: `steps` steps along the sign
    of the gradient, within [0, 1] and within an L-infinity ball of radius mu around x, mu uniform in (0, `size`). The noise is
    held fixed during the attack. A pure function of (model, x, y, noise).
    """

    sigma: float = 0.5
    copies: int = 2
    keep_original: bool = False
    size: float = 0.1
    steps: int = 2
    name: ClassVar[str] = "stobatch"
    shared: ClassVar[bool] = False  # one draw of Laplace noise for all examples and steps, as published

    def __post_init__(self) -> None:
        finite_in("method.sigma", self.sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
        finite_in(f"method.{self.name}_size", self.size, 0.0, 1.0, open_low=True, remedy="0.1 is typical")
        integer_in(f"method.{self.name}_steps", self.steps, 1, 1000)
        integer_in("method.copies", self.copies, 0, 1024)
        if self.copies == 0:
            raise ConfigError(f"method.copies is 0, views {self.name} need at least one noisy copy; set it to 1 or more")
        if self.keep_original:
            raise ConfigError(f"method.keep_original is true, views {self.name} have noise in every view; set it to false")

    @property
    def count(self) -> int:
        """R, the number of views of an example."""
        return 2 * self.copies

    def noise_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the noise of one copy: for both sites, for the start of PGD, for mu and for the kind of the attack."""
        noisy = noisy_model(model, self.name)
        return ((0 if self.shared else sum(site_sizes(noisy))) + noisy.image_size + 2,)

    def view_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one view."""
        noisy = noisy_model(model, self.name)
        return (noisy.image_size + noisy.noise_size,)

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``x [b, ...]``, standard normal ``noise [b, K, values]`` -> ``[b, 2 K, d + m]``."""
        noisy, images = noisy_model(model, self.name), x.flatten(1).unsqueeze(1)
        values = noise.shape[-1] - images.shape[-1] - 2
        sites, start, place = noise.split([values, images.shape[-1], 2], dim=-1)  # type: ignore[no-untyped-call]
        if self.shared:
            once = drawn_once(sum(site_sizes(noisy)), "laplace").to(x.device)
            sites = once.expand(*noise.shape[:2], -1)
        if len(x) == 0:
            return noise.new_empty((0, self.count, *self.view_shape(model, tuple(x.shape[1:]))))
        attack = _Attack(self.size, self.steps, place, start)
        moved = attack(noisy, images, labels, sites)
        return torch.cat([packed(noisy, images, sites), packed(noisy, moved, sites)], dim=1)


class _Attack:
    """The attacks on all copies of all examples, each on its own: kind, radius and start come from the noise of the copy."""

    def __init__(self, size: float, steps: int, place: Tensor, start: Tensor) -> None:
        self.steps = steps
        self.radius = size * torch.special.ndtr(place[..., :1])
        self.kind = torch.floor(_KINDS * torch.special.ndtr(place[..., 1:]))
        self.start = torch.where(self.kind == _PGD, self.radius * (2.0 * torch.special.ndtr(start) - 1.0), 0.0)

    def __call__(self, model: NoisyModel, x: Tensor, labels: Tensor, sites: Tensor) -> Tensor:
        """Return the adversarial images ``[b, K, d]`` of ``x [b, 1, d]``."""
        gradients = _rows_to_gradients(model)
        moved = torch.clamp(x + self.start, 0.0, 1.0)
        momentum = torch.zeros_like(moved)
        step = self.radius / self.steps * torch.where(self.kind == _PGD, 2.0, 1.0)
        for _ in range(self.steps):
            slope = gradients(packed(model, moved, sites), labels)
            slope = slope / slope.abs().mean(dim=-1, keepdim=True).clamp(min=torch.finfo(slope.dtype).tiny)
            momentum = torch.where(self.kind == _MIM, momentum, 0.0) + slope
            moved = torch.clamp(moved + step * momentum.sign(), 0.0, 1.0)
            moved = torch.minimum(torch.maximum(moved, x - self.radius), x + self.radius)
        return moved


@dataclass(frozen=True)
class SharedStoBatch(StoBatch):
    """NOT fresh noise: x_i + n and x_j + n with one n, so that their difference is x_i - x_j (StoBatch as published)."""

    name: ClassVar[str] = "stobatchonce"
    shared: ClassVar[bool] = True


def _rows_to_gradients(model: NoisyModel) -> Gradients:
    """Return a function of (rows ``[b, K, d + m]``, labels) for the gradient of each row's loss in its image, ``[b, K, d]``."""

    def of_all(rows: Tensor, labels: Tensor) -> Tensor:
        flat = rows.detach().flatten(0, 1)
        found = gradients(flat, labels.repeat_interleave(rows.shape[1]))[:, : model.image_size]
        return torch.unflatten(found, 0, rows.shape[:2])

    proven = proven_forward(model, (model.image_size + model.noise_size,))
    gradients = _of_each(model) if proven is None else _of_sum(proven)
    return of_all


def _of_sum(forward: nn.Module) -> Gradients:
    """The forward provably keeps rows apart: the gradient of the summed loss has the gradient of each row."""

    def gradients(rows: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            rows = rows.requires_grad_()
            (found,) = torch.autograd.grad(F.cross_entropy(forward(rows), labels, reduction="sum"), rows)
        return found

    return gradients


def _of_each(model: nn.Module) -> Gradients:
    """The forward might mix rows: it runs on one row at a time."""
    return vmap(grad(lambda row, label: F.cross_entropy(model(row.unsqueeze(0)).squeeze(0), label)))
