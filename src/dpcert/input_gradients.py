"""Prepare a model for fast gradients of its *input*, without changing its function."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEW_CHANNELS = 4


def for_input_gradients(model: nn.Module) -> nn.Module:
    """Return a frozen copy of `model` with the same outputs up to rounding; the model itself is not changed.

    The copy is channels-last, and strided convolutions with few channels (the first layer of an image classifier) run over
    the phases of their input, which makes the backward pass four times as fast.
    """
    prepared = copy.deepcopy(model).requires_grad_(False)
    prepared.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parent in list(prepared.modules()):
        for name, layer in parent.named_children():
            if _has_phases(layer):
                setattr(parent, name, _OverPhases(layer))
    return prepared


def _has_phases(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d or layer.in_channels > _FEW_CHANNELS:
        return False
    (stride, other), plain = layer.stride, layer.groups == 1 and set(layer.dilation) == {1}
    whole = all(size % stride == 0 for size in layer.kernel_size)
    return plain and stride == other > 1 and whole and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


class _OverPhases(nn.Module):
    """A convolution of stride s, computed with stride 1: pixels (s i + a, s j + b) become channel (a, b) of pixel (i, j)."""

    weight: Tensor
    phases: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        assert isinstance(layer, nn.Conv2d)
        self.stride = layer.stride[0]
        self.padding = [int(p) for p in layer.padding]
        phases = F.pixel_unshuffle(layer.weight.detach(), self.stride)
        self.register_buffer("weight", layer.weight.detach(), persistent=False)  # for a parent that reads it
        self.register_buffer("phases", phases.contiguous(memory_format=torch.channels_last), persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, channels, height, width]``."""
        s, (vertical, horizontal) = self.stride, self.padding
        height, width = x.shape[-2] + 2 * vertical, x.shape[-1] + 2 * horizontal
        # Pad at the end, so that both sides are multiples of s. The extra windows that this adds are cut off below.
        padded = F.pad(x, (horizontal, horizontal + -width % s, vertical, vertical + -height % s))
        out = F.conv2d(F.pixel_unshuffle(padded, s), self.phases, self.bias)
        return out[..., : (height - self.phases.shape[-2] * s) // s + 1, : (width - self.phases.shape[-1] * s) // s + 1]
