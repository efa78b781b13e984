"""Views with noise inside the model: packed rows of an image and standard normal coordinates (see `models.noisy`)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in
from ..errors import ConfigError, ModelError
from ..models.noisy import NoisyModel

_SYSTEMS = "pixeldp, securesgd or stobatch"


def noisy_model(model: nn.Module, views: str) -> NoisyModel:
    """Return `model` if it has noise after its first layer; otherwise raise `ModelError`."""
    if isinstance(model, NoisyModel):
        return model
    raise ModelError(f"views {views} need a model with noise inside, and this one has none; set model.system to {_SYSTEMS}")


def site_sizes(model: NoisyModel) -> tuple[int, int]:
    """Return how many values have noise: pixels of the image (0 without noise there), and hidden values."""
    return model.image_size if float(model.input_scale) > 0.0 else 0, model.noise_size


def packed(model: NoisyModel, x: Tensor, noise: Tensor) -> Tensor:
    """Return rows ``[b, K, d + m]`` of images ``[b, K or 1, d]``, with ``noise [b, K, sizes]`` for the noisy values."""
    at_input, inside = noise.split(list(site_sizes(model)), dim=-1)  # type: ignore[no-untyped-call]
    images = x + model.input_scale * at_input if at_input.shape[-1] else x.expand(-1, noise.shape[1], -1)
    return torch.cat([images, inside], dim=-1)


@dataclass(frozen=True)
class Inner:
    """K packed rows of x, each with its own noise at every site of the model; with `keep_original` also one without noise.

    The model knows the standard deviations. `sigma` is what they amount to for noise at the input (||A|| = 1).
    """

    sigma: float = 0.5
    copies: int = 3
    keep_original: bool = False
    name: ClassVar[str] = "inner"

    def __post_init__(self) -> None:
        finite_in("method.sigma", self.sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
        integer_in("method.copies", self.copies, 0, 1024)
        if self.copies == 0:
            raise ConfigError(f"method.copies is 0, views {self.name} need at least one noisy copy; set it to 1 or more")

    @property
    def count(self) -> int:
        """R, the number of views of an example."""
        return self.copies + int(self.keep_original)

    def noise_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the noise of one view."""
        return (sum(site_sizes(noisy_model(model, self.name))),)

    def view_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one view."""
        noisy = noisy_model(model, self.name)
        return (noisy.image_size + noisy.noise_size,)

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``x [b, ...]``, standard normal ``noise [b, K, values]`` -> ``[b, R, d + m]``."""
        noisy, images = noisy_model(model, self.name), x.flatten(1).unsqueeze(1)
        rows = packed(noisy, images, noise)
        return torch.cat([packed(noisy, images, torch.zeros_like(noise[:, :1])), rows], dim=1) if self.keep_original else rows


@dataclass(frozen=True)
class InnerOnce(Inner):
    """NOT fresh noise: one draw for all views, examples and steps, as the released code of SecureSGD trains."""

    name: ClassVar[str] = "inneronce"

    def noise_shape(self, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """No noise is drawn for a view."""
        noisy_model(model, self.name)
        return (0,)

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``x [b, ...]`` -> ``[b, R, d + m]``."""
        values = sum(site_sizes(noisy_model(model, self.name)))
        return Inner.__call__(self, model, x, labels, drawn_once(values, "normal").to(x.device).expand(len(x), self.copies, -1))


@lru_cache(maxsize=8)
def drawn_once(values: int, law: str) -> Tensor:
    """Return a fixed draw of unit variance, the same in every process: what a released program with one draw has."""
    generator = torch.Generator().manual_seed(0)
    if law == "normal":
        return torch.randn(values, generator=generator)
    uniform = torch.rand(values, generator=generator).sub(0.5).clamp(-0.4999999, 0.4999999)
    laplace: Tensor = -uniform.sign() * torch.log1p(-2.0 * uniform.abs()) / 2.0**0.5
    return laplace
