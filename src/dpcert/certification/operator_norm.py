"""Spectral norms of linear layers: upper bounds that a certificate may rely on.

Noise that enters after a linear layer A gives the radius s * Phi^-1(p_A) / ||A||_2, so the norm must never be too small. Power
iteration converges from below and is not a certificate. The bound for convolutions comes from the Fourier transform:

1. The input, shifted by the padding, is split into the stride^2 grids of positions that are equal modulo the stride. On these
   the convolution has stride 1 and a kernel of ceil(k / stride) taps (its polyphase form). Both maps are isometries.
2. A zero-padded convolution of n positions with k taps is a circular one on any grid of at least n + k - 1 positions,
   applied to an input that is extended by zeros, with some of the outputs left out. Neither step increases the norm.
3. The Fourier transform makes the circular convolution a block-diagonal matrix with one block per frequency. Its norm is the
   largest norm of a block.
"""

import math

import torch
from torch import Tensor, nn

from ..errors import ModelError

_ROUNDING = 2.0**-40  # far above the error of a float64 transform and SVD, relative to the sum of all |taps|


def operator_norm(layer: nn.Module, input_shape: tuple[int, ...], scale: Tensor | None = None) -> Tensor:
    """Return an upper bound on ``||diag(scale)^-1 A||_2`` in float64, where A is the layer without its bias.

    `input_shape` is that of one example. `scale`, one positive value per output channel, is the standard deviation of noise
    that is added to the output; without it all are 1. The bound is differentiable in the layer's weight.

    Guarantee: never below the exact norm. For a linear layer it is exact up to rounding.
    """
    if isinstance(layer, nn.Linear):
        matrix = _scaled(layer.weight.double(), scale)
        return _with_margin(_spectral(matrix), matrix)
    if not isinstance(layer, nn.Conv2d):
        raise ModelError(f"{type(layer).__name__} is not a linear layer; noise can enter after a Linear or a Conv2d")
    if layer.padding_mode != "zeros":
        raise ModelError(f"the padding mode of the convolution is {layer.padding_mode!r}; its norm is known for 'zeros' only")
    if len(input_shape) != 3 or input_shape[0] != layer.in_channels:
        raise ModelError(f"the convolution has {layer.in_channels} input channels, the input has the shape {input_shape}")
    kernel = _scaled(layer.weight.double(), scale)
    blocks = [_of_group(group, layer, input_shape[1:]) for group in kernel.chunk(layer.groups)]
    return _with_margin(torch.stack(blocks).max(), kernel)


def _scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return weight
    if scale.shape != (len(weight),) or not bool((scale > 0).all() and torch.isfinite(scale).all()):
        raise ModelError(f"the noise scale needs {len(weight)} positive values, one per output channel")
    return weight / scale.double().reshape(-1, *[1] * (weight.ndim - 1))


def _with_margin(norm: Tensor, weight: Tensor) -> Tensor:
    return norm + _ROUNDING * weight.abs().sum()


def _of_group(kernel: Tensor, layer: nn.Conv2d, size: tuple[int, ...]) -> Tensor:
    """Return the largest norm over all frequencies of one group of channels, ``[out, in, height, width]``."""
    phases = _polyphase(_dilated(kernel, layer.dilation), layer.stride)
    padded = [n + before + after for n, (before, after) in zip(size, _paddings(layer), strict=True)]
    grid = [math.ceil(n / s) + k - 1 for n, s, k in zip(padded, layer.stride, phases.shape[2:], strict=True)]
    spectrum = torch.fft.rfft2(phases, s=grid)  # the kernel is real: the other half has the same norms
    return _spectral(spectrum.permute(2, 3, 0, 1)).max()


def _paddings(layer: nn.Conv2d) -> list[tuple[int, int]]:
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(layer.padding, str):  # "valid"
        return [(0, 0), (0, 0)]
    return [(int(p), int(p)) for p in layer.padding]


def _dilated(kernel: Tensor, dilation: tuple[int, ...]) -> Tensor:
    """Return the same kernel with zeros between its taps."""
    if tuple(dilation) == (1, 1):
        return kernel
    height, width = ((k - 1) * d + 1 for k, d in zip(kernel.shape[2:], dilation, strict=True))
    spread = kernel.new_zeros((*kernel.shape[:2], height, width))
    spread[:, :, :: dilation[0], :: dilation[1]] = kernel
    return spread


def _polyphase(kernel: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the kernel of stride 1 on stride^2 times as many channels, ``[out, in * stride^2, ...]``."""
    (rows, columns), (height, width) = stride, kernel.shape[2:]
    padded = torch.nn.functional.pad(kernel, (0, -width % columns, 0, -height % rows))
    return torch.cat([padded[:, :, r::rows, c::columns] for r in range(rows) for c in range(columns)], dim=1)


def _spectral(matrices: Tensor) -> Tensor:
    """Return the largest singular value of each matrix."""
    norms: Tensor = torch.linalg.matrix_norm(matrices, ord=2)
    return norms
