"""Built-in models by name."""

from collections.abc import Callable

import torch
from torch import nn

from .._validate import one_of
from ..errors import ModelError
from .cnn import cnn, linear

MODELS: dict[str, Callable[..., nn.Module]] = {"cnn": cnn, "linear": linear}


def build_model(
    name: str, *, input_shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10, seed: int | None = None
) -> nn.Module:
    """A freshly initialized model by name; `seed` fixes the initialization without changing the global generator."""
    one_of("model.name", name, MODELS, error=ModelError)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model = MODELS[name](input_shape, classes)
    model.dpcert_name = name  # type: ignore[assignment]  # recorded in the config of a run
    return model
