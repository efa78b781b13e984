"""Features inside a model: the input of its last linear layer, or the output of a named layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError


def feature_layer(model: nn.Module, example: Tensor, name: str | None = None) -> str:
    """Return the name of the features: ``input of <the last linear layer that runs>``, or the layer's name."""
    layers = {known: layer for known, layer in model.named_modules() if known}
    if name is not None:
        if name not in layers:
            raise ModelError(f"--layer {name!r} is not a layer of this model; choose one of: {', '.join(layers)}")
        return name
    ran: list[str] = []
    handles = [
        layer.register_forward_hook(lambda *_, known=known: ran.append(known))
        for known, layer in layers.items()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with torch.no_grad():
            model(example.unsqueeze(0))
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise ModelError(f"the model has no nn.Linear layer; choose a layer with --layer: {', '.join(layers)}")
    return f"input of {ran[-1]}"


def features_of(model: nn.Module, layer: str) -> Callable[[Tensor], Tensor]:
    """Return the features that `feature_layer` named, as a function. The hook stays on `model`: pass a separate copy."""
    seen: list[Any] = []
    if layer.startswith("input of "):
        watched = model.get_submodule(layer.removeprefix("input of "))
        watched.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    else:
        model.get_submodule(layer).register_forward_hook(lambda _, inputs, output: seen.append(output))

    def features(x: Tensor) -> Tensor:
        seen.clear()
        model(x)
        if not seen or not isinstance(seen[-1], Tensor) or seen[-1].shape[:1] != x.shape[:1]:
            raise ModelError(f"layer {layer!r} does not return features for each input; choose another with --layer")
        output: Tensor = seen[-1]
        seen.clear()  # keeps no graph alive
        return output

    return features
