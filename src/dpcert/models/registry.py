"""Built-in models by name."""

from typing import Any

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
    **settings: Any,
) -> nn.Module:
    """A model by name. `seed` fixes the initialization without changing the global generator.

    `weights` are public weights to start from: the name of a packaged file or the path of a ``.safetensors`` file. `train`
    selects the parameters to train: all, head, last:N, norms, biases or a pattern of their names. `settings` are the other keys
    of the config section ``[model]``: those of the architecture, for example ``width=2``, or a `system` with its `noise`.
    """
    return ModelSpec(name, weights, train, **settings).build(input_shape, classes, seed=seed)
