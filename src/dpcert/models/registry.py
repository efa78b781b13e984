"""Built-in models by name."""

from collections.abc import Sequence

from torch import nn

from .architectures import MODELS
from .spec import ModelSpec

__all__ = ["MODELS", "build_model"]


def build_model(
    name: str,
    *,
    input_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    seed: int | None = None,
    weights: str | None = None,
    train: str = "all",
    input_size: int | None = None,
    system: str | None = None,
    noise: float | None = None,
    noise_weights: str | Sequence[float] | None = None,
) -> nn.Module:
    """A model by name. `seed` fixes the initialization without changing the global generator.

    `weights` are public weights to start from: the name of a packaged file or the path of a ``.safetensors`` file. `train`
    selects the parameters to train: all, head, last:N, norms, biases or a pattern of their names. `input_size` is the size
    that some models resize images to. `system` is pixeldp, securesgd, stobatch or denoiser: noise of standard deviation `noise`
    inside the model (with the relative variances `noise_weights` of the channels), or a denoiser in front of it.
    """
    return ModelSpec(name, weights, train, input_size, system, noise, noise_weights).build(input_shape, classes, seed=seed)
