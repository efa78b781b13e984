"""Choose the engine for a model: the fast one if it agrees with the reference, otherwise the reference engine."""

import torch
from torch import nn

from ..errors import ConfigError
from ..isolation import dissimilar_rows
from .engine import Engine, LossOfOne
from .layerwise import Layerwise
from .vmap import clipped_sum, per_example_gradients

ENGINES = ("auto", "layerwise", "vmap")
_AGREEMENT = 1e-3  # of an example's largest gradient: float32 rounding is far below, a wrong rule far above


def choose(
    name: str, model: nn.Module, loss: LossOfOne, input_shape: tuple[int, ...], workers: int = 1, checkpointing: bool = False
) -> tuple[Engine, ...]:
    """Return the engine called `name`, one instance per worker; ``auto`` uses `layerwise` where it supports the model.

    ``layerwise`` raises where it does not. The reference engine uses one worker: it swaps its weights into the model itself.
    It keeps all activations, so `checkpointing` raises where the reference engine would be used.
    """
    if name == "vmap":
        if checkpointing:
            raise ConfigError("gradients.checkpointing is on, but engine vmap keeps all activations; use auto or turn it off")
        return (clipped_sum,)
    engine = Layerwise(checkpointing)
    reason = engine.unsupported(model, input_shape) or _disagreement(engine, model, loss, input_shape)
    if reason is None:
        return (engine, *(Layerwise(checkpointing) for _ in range(workers - 1)))
    if checkpointing:
        raise ConfigError(f"gradients.checkpointing cannot be used with this model: {reason}; turn it off")
    if name == "layerwise":
        raise ConfigError(f"gradients.engine layerwise does not support this model: {reason}; use vmap or auto")
    return (clipped_sum,)


def _disagreement(engine: Layerwise, model: nn.Module, loss: LossOfOne, input_shape: tuple[int, ...]) -> str | None:
    """Compare with the reference engine on dissimilar examples; detects a forward that uses its weights in an unusual way."""
    device = next(model.parameters()).device
    rows = dissimilar_rows(input_shape)
    views = torch.stack([rows, rows.flip(0)], dim=1).to(device)
    labels = torch.zeros(len(views), dtype=torch.long, device=device)
    expected = per_example_gradients(model, loss, views, labels)
    scale = torch.stack([gradient.flatten(1).abs().amax(dim=1) for gradient in expected.values()]).amax(dim=0)
    try:
        found = engine.per_example(model, loss, views, labels)
        for name, gradient in expected.items():  # one parameter at a time: all of them may not fit in memory twice
            difference = (found[name].instantiate() - gradient.flatten(1)).abs().amax(dim=1)
            if bool((difference > _AGREEMENT * scale).any()):
                return f"its gradient of {name!r} differs from the reference engine's"
    except (RuntimeError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None
