"""Describe a model as a chain of the layers that `chain.cpp` knows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..isolation import keeps_rows_apart

_LARGEST = 1 << 24  # numbers in an image or in a weight
_SKIPPED = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)  # `keeps_rows_apart` refuses active dropout
_ELEMENTWISE = {nn.Tanh: "TANH", nn.ReLU: "RELU"}
_POOLS = {nn.MaxPool2d: "MAX", nn.AvgPool2d: "AVERAGE"}
Pair = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """One layer: the fields of ``struct Layer``, and where its parameters are in the model."""

    kind: str
    image: tuple[int, int, int]  # height, width, channels
    output: tuple[int, int, int]
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    weight: str | None = None  # names of parameters
    bias: str | None = None
    trained: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As C++."""
        numbers = (*self.image, *self.output, *self.kernel, *self.stride, *self.padding)
        flags = (self.bias is not None, self.weight in self.trained, self.bias in self.trained)
        return f"{{{self.kind}, {', '.join(map(str, numbers))}, {', '.join(str(flag).lower() for flag in flags)}}}"

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters, in order."""
        return [name for name in (self.weight, self.bias) if name is not None]

    def in_order(self, values: Tensor) -> Tensor:
        """Convert ``[..., kernel, in, out]`` to the order of the weight: ``[..., out * in * kernel]``."""
        (height, width), channels, outputs = self.kernel, self.image[2], self.output[2]
        split = values.reshape(*values.shape[:-1], height, width, channels, outputs)
        return split.movedim((-1, -2), (-4, -3)).flatten(-4)


def layers_of(model: nn.Module, input_shape: tuple[int, ...]) -> list[Layer] | None:
    """Return the model as a chain; None if it has other layers, shared parameters or hooks, or is not float32 on a CPU."""
    names = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    plain = all(str(parameter.dtype) == "torch.float32" and parameter.device.type == "cpu" for parameter in model.parameters())
    if len(names) != len(set(names)) or not plain or not keeps_rows_apart(model, input_shape):
        return None
    if len(input_shape) not in (1, 3):
        return None
    channels, height, width = input_shape if len(input_shape) == 3 else (*input_shape, 1, 1)
    image, flat, found = (height, width, channels), len(input_shape) == 1, list[Layer]()
    for name, layer in named_layers(model):
        if isinstance(layer, nn.Flatten):
            flat = True
        elif not isinstance(layer, _SKIPPED):
            described = _described(name, layer, image, flat)
            if described is None or min(described.output) < 1 or max(_sizes(described)) > _LARGEST:
                return None
            found.append(replace(described, trained=_trained(described, model)))
            image = described.output
    return found if found and flat and image[:2] == (1, 1) else None


def _sizes(layer: Layer) -> tuple[int, int]:
    (height, width, channels), (down, right) = layer.image, layer.padding
    taps = layer.kernel[0] * layer.kernel[1] * channels
    return (height + 2 * down) * (width + 2 * right) * channels, taps * layer.output[2] if layer.weight else 0


def _trained(layer: Layer, model: nn.Module) -> tuple[str, ...]:
    return tuple(name for name in layer.parameters if model.get_parameter(name).requires_grad)


def named_layers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested ``nn.Sequential`` with their names; nothing if a layer occurs twice."""
    if type(model) is not nn.Sequential:
        yield prefix, model
        return
    for name, child in model.named_children() if len(set(map(id, model))) == len(model) else ():
        yield from named_layers(child, f"{prefix}.{name}" if prefix else name)


def _described(name: str, layer: Any, image: tuple[int, int, int], flat: bool) -> Layer | None:
    kind = type(layer)
    if kind in _ELEMENTWISE:
        return Layer(_ELEMENTWISE[kind], image, image)
    if kind is nn.Linear and flat and image[0] * image[1] * image[2] == layer.in_features:
        return _convolution(name, layer, image, layer.out_features, image[:2], (1, 1), (0, 0))
    if kind is nn.Conv2d and not flat:
        padding = (0, 0) if layer.padding == "valid" else layer.padding
        usual = layer.groups == 1 and layer.padding_mode == "zeros" and layer.dilation == (1, 1) and padding != "same"
        if usual and layer.in_channels == image[2]:
            return _convolution(name, layer, image, layer.out_channels, layer.kernel_size, layer.stride, padding)
    if kind in _POOLS and not flat and not layer.ceil_mode and _pair(layer.padding) == (0, 0):
        usual = layer.divisor_override is None if kind is nn.AvgPool2d else _pair(layer.dilation) == (1, 1)
        kernel, stride = _pair(layer.kernel_size), _pair(layer.stride)
        return Layer(_POOLS[kind], image, (*_outputs(image, kernel, stride), image[2]), kernel, stride) if usual else None
    return None


def _convolution(
    name: str, layer: Any, image: tuple[int, int, int], outputs: int, kernel: Pair, stride: Pair, padding: Pair
) -> Layer:
    prefix = f"{name}." if name else ""
    output = (*_outputs(image, kernel, stride, padding), outputs)
    bias = None if layer.bias is None else f"{prefix}bias"
    return Layer("CONVOLUTION", image, output, _pair(kernel), _pair(stride), _pair(padding), f"{prefix}weight", bias)


def _outputs(image: tuple[int, int, int], kernel: Pair, stride: Pair, padding: Pair = (0, 0)) -> Pair:
    height, width = ((image[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    return height, width


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
