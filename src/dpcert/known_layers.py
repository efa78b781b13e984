"""Layers of PyTorch that process every row of a batch independently, and how to recognize an altered instance of one."""

from typing import Any

from torch import nn
from torch.nn.modules import module as _hooks_of_all_modules

ELEMENTWISE = {
    nn.Identity,
    nn.Tanh,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid,
}
_ON_IMAGES = {  # in a 4-D input the first dimension is the batch; in a 3-D input it would be the channels
    nn.Conv2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.BatchNorm2d,
    nn.ZeroPad2d,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
}
_INACTIVE_IN_EVALUATION = {nn.Dropout, nn.Dropout1d, nn.Dropout2d}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_on_every_module() -> bool:
    """Return whether a hook is registered for all modules: it may do anything to any layer."""
    return any(getattr(_hooks_of_all_modules, f"_global{kind}") for kind in _HOOKS)


def altered(layer: nn.Module) -> bool:
    """Return whether an instance may differ from its class: hooks, a replaced method, or a custom parameter type."""
    replaced = any(callable(getattr(type(layer), name, None)) for name in vars(layer))  # forward, or a method it calls
    plain = all(type(parameter) is nn.Parameter for parameter in layer.parameters(recurse=False))
    return replaced or not plain or any(getattr(layer, kind) for kind in _HOOKS)


def dimensions_after(layer: Any, dimensions: int) -> int | None:
    """Return the number of output dimensions of a layer that does not mix rows; None if that is unknown."""
    kind = type(layer)
    if kind in ELEMENTWISE or (kind in _INACTIVE_IN_EVALUATION and not layer.training):
        return dimensions
    if kind in _ON_IMAGES:
        frozen = kind is not nn.BatchNorm2d or (not layer.training and layer.running_mean is not None)
        return 4 if dimensions == 4 and frozen else None
    if kind is nn.Linear:
        bias = None if layer.bias is None else layer.bias.shape  # a bias with one row per position would depend on the position
        plain = layer.weight.shape == (layer.out_features, layer.in_features) and bias in (None, (layer.out_features,))
        return dimensions if dimensions >= 2 and plain else None
    if kind is nn.Flatten:
        last = layer.end_dim % dimensions
        return dimensions - (last - layer.start_dim) if 1 <= layer.start_dim <= last else None
    if kind is nn.GroupNorm:
        return dimensions if dimensions >= 2 else None
    if kind is nn.LayerNorm:
        return dimensions if len(layer.normalized_shape) < dimensions else None
    return None
