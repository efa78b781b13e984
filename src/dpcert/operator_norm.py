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

from .errors import ModelError

_ROUNDING = 2.0**-40  # far above the error of a float64 transform and SVD, relative to the sum of all |taps|


Geometry = tuple[tuple[int, ...], ...]  # height and width, paddings, strides, dilations, groups; () for a linear layer


def operator_norm(layer: nn.Module, input_shape: tuple[int, ...], scale: Tensor | None = None) -> Tensor:
    """Return an upper bound on ``||diag(scale)^-1 A||_2`` in float64, where A is the layer without its bias.

    `input_shape` is that of one example. `scale`, one positive value per output channel, is the standard deviation of noise
    that is added to the output; without it all are 1. The bound is differentiable in the layer's weight.

    Guarantee: never below the exact norm. For a linear layer it is exact up to rounding.
    """
    geometry = geometry_of(layer, input_shape)
    return norm_of_weight(layer.weight, geometry, scale)  # type: ignore[arg-type]


def norm_of_weight(weight: Tensor, geometry: Geometry, scale: Tensor | None = None) -> Tensor:
    """Return `operator_norm` of the layer with this weight and geometry; NaN if the weight is not finite."""
    kernel = _scaled(weight.double(), scale)
    if not bool(torch.isfinite(kernel).all()):
        return torch.full((), math.nan, dtype=torch.float64)
    norms = _spectral(_blocks(kernel, geometry)[0])
    return norms.max() + _ROUNDING * kernel.abs().sum()


def norm_gradient(weight: Tensor, scale: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient G of `norm_of_weight` (without its margin) in the weight, as a constant.

    The norm is homogeneous: its value is ``<G, weight>``, and G is the gradient of that expression too. A forward pass that
    divides by it is differentiable, and no engine has to differentiate a transform or an SVD for each example. A weight that
    is not finite gives NaN, like any other layer: training that diverges does not stop with an error.
    """
    with torch.no_grad():
        given = _scaled(weight.detach().double(), scale)
        finite = torch.isfinite(given).all()
        kernel = torch.where(finite, given, torch.zeros_like(given))
        blocks, grid = _blocks(kernel, geometry)
        top = _spectral(blocks).argmax()
        left, _, right = torch.linalg.svd(blocks[top], full_matrices=False)
        gradient = _pulled_back(left[:, 0], right[0], top, grid, kernel, geometry)
        return torch.where(finite, _scaled(gradient, scale), math.nan).to(weight.dtype)


def geometry_of(layer: nn.Module, input_shape: tuple[int, ...]) -> Geometry:
    """Return what the norm of a layer depends on besides its weight; refuse a layer whose norm is not known."""
    if type(layer) is nn.Linear:
        if torch.Size(input_shape).numel() != layer.in_features:
            raise ModelError(f"the linear layer has {layer.in_features} inputs, the input has the shape {input_shape}")
        return ()
    if type(layer) is not nn.Conv2d:
        raise ModelError(f"{type(layer).__name__} is not a linear layer; noise can enter after a Linear or a Conv2d")
    if layer.padding_mode != "zeros":
        raise ModelError(f"the padding mode of the convolution is {layer.padding_mode!r}; its norm is known for 'zeros' only")
    if len(input_shape) != 3 or input_shape[0] != layer.in_channels:
        raise ModelError(f"the convolution has {layer.in_channels} input channels, the input has the shape {input_shape}")
    return tuple(input_shape[1:]), _paddings(layer), tuple(layer.stride), tuple(layer.dilation), (layer.groups,)


def _scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return weight
    require_scales(scale, len(weight))
    return weight / scale.double().reshape(-1, *[1] * (weight.ndim - 1))


def require_scales(scale: Tensor, channels: int) -> None:
    """Raise unless `scale` has one positive finite value per output channel."""
    if scale.shape != (channels,) or not bool((scale > 0).all() and torch.isfinite(scale).all()):
        raise ModelError(f"the noise scale needs {channels} positive values, one per output channel")


def _paddings(layer: nn.Conv2d) -> tuple[int, ...]:
    """Return the total padding of height and width."""
    if layer.padding == "same":
        return tuple(d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    return (0, 0) if isinstance(layer.padding, str) else tuple(2 * int(p) for p in layer.padding)


def _blocks(kernel: Tensor, geometry: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """Return the block-diagonal form ``[blocks, out, in]``: for each group all frequencies of its grid, row by row."""
    if kernel.ndim != (4 if geometry else 2):
        raise ModelError(f"the weight has {kernel.ndim} dimensions, which does not fit the geometry {geometry}")
    if not geometry:
        return kernel.unsqueeze(0), (1, 1)
    size, paddings, stride, dilation, (groups,) = geometry
    phases = [_polyphase(_dilated(group, dilation), stride) for group in kernel.chunk(groups)]
    taps = phases[0].shape[2:]
    height, width = (math.ceil((n + p) / s) + k - 1 for n, p, s, k in zip(size, paddings, stride, taps, strict=True))
    # The kernel is real: the other half of the frequencies has the same norms.
    spectra = [torch.fft.rfft2(each, s=(height, width)).permute(2, 3, 0, 1).flatten(0, 1) for each in phases]
    return torch.cat(spectra), (height, width)


def _pulled_back(left: Tensor, right: Tensor, top: Tensor, grid: tuple[int, int], kernel: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of ``Re(left^H block right^H)`` of block `top` in the kernel: each tap enters with one phase."""
    if not geometry:
        return torch.outer(left, right)
    _, _, stride, dilation, (groups,) = geometry
    columns = grid[1] // 2 + 1
    group, frequency = top // (grid[0] * columns), top % (grid[0] * columns)
    places = [torch.arange(k, device=kernel.device) * d for k, d in zip(kernel.shape[2:], dilation, strict=True)]
    turns = [
        (p // s).double() * f / n
        for p, s, f, n in zip(places, stride, (frequency // columns, frequency % columns), grid, strict=True)
    ]
    angle = -2.0 * math.pi * (turns[0][:, None] + turns[1][None, :])
    inputs = right.conj().reshape(*stride, -1)[places[0] % stride[0]][:, places[1] % stride[1]]  # [height, width, in]
    outer = torch.einsum("o,hwi->oihw", left.conj(), inputs * torch.polar(torch.ones_like(angle), angle)[:, :, None]).real
    here = torch.arange(groups, device=kernel.device) == group
    return (here.to(outer.dtype).reshape(groups, 1, 1, 1, 1) * outer).flatten(0, 1)


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
