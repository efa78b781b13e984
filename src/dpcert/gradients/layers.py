"""Rules that turn a layer's input and the gradient of its output into per-example parameter gradients.

A rule takes the layer, its input ``[b*R, ...]``, the gradient of its output ``[b*R, ...]`` and b, and returns the gradients
of its parameters by name. Rows of one example are adjacent, so ``[b*R, ...]`` reshapes to ``[b, R, ...]``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import (
    PLAIN,
    Allocate,
    Arithmetic,
    ChannelsLast,
    Instantiated,
    Part,
    deferred_product,
    factors_are_cheaper,
    is_large,
    product,
)


class Buffers(dict[Any, Tensor]):
    """Memory that every step uses again, and how large gradients are computed in it."""

    def __init__(self, arithmetic: Arithmetic = PLAIN) -> None:
        super().__init__()
        self.arithmetic = arithmetic


Rule = Callable[[Any, Tensor, Tensor, int, Buffers], dict[str, Part]]


@dataclass(frozen=True)
class Call:
    """One call of a layer that has a rule."""

    name: str
    layer: nn.Module
    inputs: Tensor
    output: Tensor


def _bias(layer: Any, deltas: Tensor) -> dict[str, Part]:
    return {} if layer.bias is None else {"bias": Instantiated(deltas.sum(dim=1))}


def linear(layer: nn.Linear, x: Tensor, delta: Tensor, examples: int, buffers: Buffers) -> dict[str, Part]:
    """W x + b: the product over views and positions."""
    inputs = x.reshape(examples, -1, layer.in_features)
    deltas = delta.reshape(examples, -1, layer.out_features)
    return {"weight": product(inputs, deltas, _memory(layer, deltas, buffers), buffers.arithmetic), **_bias(layer, deltas)}


def convolution(layer: Any, x: Tensor, delta: Tensor, examples: int, buffers: Buffers) -> dict[str, Part]:
    """A convolution is a linear map of patches; views and positions are summed together, groups are separate."""
    deltas = delta.movedim(1, -1).reshape(examples, -1, layer.out_channels)
    bias = _bias(layer, deltas)
    if layer.in_channels == 1 and len(layer.kernel_size) == 2 and layer.kernel_size[1] < 32:
        inputs, deltas = _shifted_images(layer, _padded(layer, x), delta, examples, buffers)
        return {"weight": product(inputs, deltas, _memory(layer, deltas, buffers), buffers.arithmetic), **bias}
    kernel, channels = layer.kernel_size, layer.in_channels
    if layer.groups == 1:
        return {"weight": ChannelsLast(_ungrouped(layer, x, deltas, buffers), (layer.out_channels, *kernel, channels)), **bias}
    return {"weight": Instantiated(_grouped(layer, _padded(layer, x), delta, examples)), **bias}


def _grouped(layer: Any, x: Tensor, delta: Tensor, examples: int) -> Tensor:
    """Return the weight gradients ``[b, size]`` by one call of the backward kernel per example.

    A group has few channels, one in a depthwise convolution: too few for a product of patches, which would copy each input
    once per entry of the kernel.
    """
    weight, views, space = layer.weight.detach(), len(x) // examples, len(layer.kernel_size)
    options = [None, layer.stride, [0] * space, layer.dilation, False, [0] * space, layer.groups, [False, True, False]]
    pairs = zip(delta.split(views), x.split(views), strict=True)  # type: ignore[no-untyped-call]
    gradients = [torch.ops.aten.convolution_backward(of_one, rows, weight, *options)[1] for of_one, rows in pairs]
    return torch.stack(gradients).flatten(1)


def _padded(layer: Any, x: Tensor) -> Tensor:
    padding = _padding(layer)
    if not any(amount for pair in padding for amount in pair):
        return x
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, [amount for pair in reversed(padding) for amount in pair], mode=mode)


def _ungrouped(layer: Any, x: Tensor, deltas: Tensor, buffers: Buffers) -> Part:
    """Return the products of patches and gradients; large ones are formed later, from patches of a few examples."""
    examples, summed, width_out = deltas.shape
    width_in = layer.in_channels * torch.Size(layer.kernel_size).numel()
    allocate = _memory(layer, deltas, buffers)
    if factors_are_cheaper(summed, width_in, width_out) or not is_large(width_in * width_out):
        return product(_patches(layer, _padded(layer, x), examples, buffers).flatten(2), deltas, allocate, buffers.arithmetic)
    return deferred_product(
        _PatchesOfSome(layer, x, len(x) // examples, buffers), deltas, width_in, allocate, buffers.arithmetic
    )


class _PatchesOfSome:
    """The patches of a few examples, ``[m, R * positions, kernel * channels]``, in memory that the next call uses again.

    Zeros around the images are written once: only the inner part of the padded images changes.
    """

    def __init__(self, layer: Any, x: Tensor, views: int, buffers: Buffers) -> None:
        self._layer, self._x, self._views, self._buffers = layer, x.movedim(1, -1), views, buffers
        self._places: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # by number of examples

    def __call__(self, some: range) -> Tensor:
        inner, seen, patches, flat = self._places.get(len(some)) or self._place(len(some))
        x = self._x[self._views * some.start : self._views * some.stop]
        if self._layer.padding_mode == "zeros":
            inner.copy_(x)
        else:
            seen = _patch_view(self._layer, _padded(self._layer, x.movedim(-1, 1)))
        patches.copy_(seen)
        return flat

    def _place(self, examples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inner part of the padded images, the view of their patches, memory for a copy, and that as a matrix."""
        space, padding, name = self._x.shape[1:-1], _padding(self._layer), id(self._layer)
        sizes = (size + low + high for size, (low, high) in zip(space, padding, strict=True))
        shape = (examples * self._views, *sizes, self._x.shape[-1])
        padded = _buffer(self._buffers, (name, "padded"), shape, self._x)
        inner = padded[:, *(slice(low, low + size) for size, (low, _) in zip(space, padding, strict=True))]
        seen = _patch_view(self._layer, padded.movedim(-1, 1))
        patches = _buffer(self._buffers, (name, "patches of some"), tuple(seen.shape), self._x)
        flat = patches.view(examples, self._views * seen.shape[1 : 1 + len(space)].numel(), -1)
        return self._places.setdefault(examples, (inner, seen, patches, flat))


def _patches(layer: Any, x: Tensor, examples: int, buffers: Buffers) -> Tensor:
    """``[b, R * positions, kernel..., channels]``: strided views of the padded input, copied into a reused buffer.

    With channels last, a row of the kernel is contiguous in memory, so the copy runs at memory speed.
    """
    view = _patch_view(layer, x)
    buffer = _buffer(buffers, (id(layer), "patches"), tuple(view.shape), x)
    buffer.copy_(view)
    return buffer.view(examples, -1, *view.shape[1 + len(layer.kernel_size) :])


def _patch_view(layer: Any, x: Tensor) -> Tensor:
    """``[rows, positions..., kernel..., channels]``, without a copy."""
    space = len(layer.kernel_size)
    x = x.movedim(1, -1)  # [rows, space..., channels]
    for axis, (kernel, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True), start=1
    ):
        x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return x.movedim(1 + space, -1)


def _shifted_images(layer: Any, x: Tensor, delta: Tensor, examples: int, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Return patches of a one-channel image as ``[b, summed, kernel]``, and the matching gradients ``[b, summed, out]``.

    With one channel, the contiguous runs of `_patches` are short. Instead the image is split into its stride x stride
    phases. Kernel tap (i, j) then sees one phase shifted by a constant, a single long run. A run covers whole rows of the
    phase: its last columns are outside the output, and the gradients there are 0.
    """
    (kernel_h, kernel_w), (stride_h, stride_w), (dilation_h, dilation_w) = layer.kernel_size, layer.stride, layer.dilation
    rows, out_channels, height, width = delta.shape
    views = rows // examples
    phase_w = max(-(-x.shape[3] // stride_w), width)
    phase_h = max(-(-x.shape[2] // stride_h), height + dilation_h * (kernel_h - 1) // stride_h) + 1  # one row for the last run
    phases = _buffer(buffers, (id(layer), "phases"), (examples, stride_h, stride_w, views, phase_h, phase_w), x)
    for phase_i in range(stride_h):
        for phase_j in range(stride_w):
            seen = x[:, 0, phase_i::stride_h, phase_j::stride_w].unflatten(0, (examples, views))  # type: ignore[no-untyped-call]
            phases[:, phase_i, phase_j, :, : seen.shape[2], : seen.shape[3]].copy_(seen)
    run = height * phase_w
    taps = _buffer(buffers, (id(layer), "taps"), (examples, kernel_h, kernel_w, views, run), x)
    for i in range(kernel_h):
        down, phase_i = divmod(i * dilation_h, stride_h)
        for j in range(min(stride_w, kernel_w)):  # taps j, j + stride, ... see the same phase, shifted by one each
            right, phase_j = divmod(j * dilation_w, stride_w)
            source = phases[:, phase_i, phase_j].flatten(2)
            shifted = torch.as_strided(
                source,
                (examples, -(-(kernel_w - j) // stride_w), views, run),
                (source.stride(0), dilation_w, source.stride(1), 1),
                source.storage_offset() + down * phase_w + right,
            )
            taps[:, i, j::stride_w].copy_(shifted)
    wide = _buffer(buffers, (id(layer), "wide"), (rows, height, phase_w, out_channels), delta)
    wide[:, :, :width].copy_(delta.movedim(1, -1))
    return taps.view(examples, kernel_h * kernel_w, views * run).mT, wide.view(examples, -1, out_channels)


def _buffer(buffers: Buffers, name: Any, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a reused zero-filled tensor, so that memory stays mapped and in cache; smaller batches use its first rows."""
    dtype = dtype or like.dtype
    key = (name, shape[1:], dtype, like.device)
    if key not in buffers or len(buffers[key]) < shape[0]:
        buffers[key] = torch.zeros(shape, dtype=dtype, device=like.device)
    return buffers[key][: shape[0]]


def _memory(layer: Any, like: Tensor, buffers: Buffers) -> Allocate:
    """Return where the gradients of a large weight are stored: memory that every step reuses."""
    return lambda shape, dtype: _buffer(buffers, (id(layer), "gradients"), shape, like, dtype)


def _padding(layer: Any) -> list[tuple[int, int]]:
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(amount // 2, amount - amount // 2) for amount in totals]
    return [(amount, amount) for amount in layer.padding]


def layer_norm(layer: nn.LayerNorm, x: Tensor, delta: Tensor, examples: int, buffers: Buffers) -> dict[str, Part]:
    """w * normalized + b, elementwise: sum over all axes before the normalized ones."""
    normalized = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    size = normalized[0].numel() and torch.Size(layer.normalized_shape).numel()
    return _scale_and_shift(layer, normalized.reshape(examples, -1, size), delta.reshape(examples, -1, size))


def group_norm(layer: nn.GroupNorm, x: Tensor, delta: Tensor, examples: int, buffers: Buffers) -> dict[str, Part]:
    """w_c * normalized + b_c: sum over views and positions."""
    normalized = F.group_norm(x, layer.num_groups, eps=layer.eps)
    return _by_channel(layer, normalized, delta, examples)


def frozen_batch_norm(layer: Any, x: Tensor, delta: Tensor, examples: int, buffers: Buffers) -> dict[str, Part]:
    """BatchNorm with running statistics is an affine map of each channel."""
    normalized = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
    return _by_channel(layer, normalized, delta, examples)


def _by_channel(layer: Any, normalized: Tensor, delta: Tensor, examples: int) -> dict[str, Part]:
    channels = normalized.shape[1]
    rows = normalized.movedim(1, -1).reshape(examples, -1, channels)
    return _scale_and_shift(layer, rows, delta.movedim(1, -1).reshape(examples, -1, channels))


def _scale_and_shift(layer: Any, normalized: Tensor, deltas: Tensor) -> dict[str, Part]:
    return {"weight": Instantiated(normalized.mul_(deltas).sum(dim=1)), **_bias(layer, deltas)}


def embedding(layer: nn.Embedding, x: Tensor, delta: Tensor, examples: int, buffers: Buffers) -> dict[str, Part]:
    """Add each gradient to the table row that the example looked up."""
    deltas = delta.reshape(examples, -1, layer.embedding_dim)
    tokens = x.reshape(examples, -1)
    if layer.padding_idx is not None:
        deltas = torch.where((tokens == layer.padding_idx)[..., None], 0.0, deltas)
    table = deltas.new_zeros(examples, layer.num_embeddings, layer.embedding_dim)
    table.scatter_add_(1, tokens[..., None].expand_as(deltas), deltas)
    return {"weight": Instantiated(table.flatten(1))}


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: frozen_batch_norm,
    nn.BatchNorm2d: frozen_batch_norm,
    nn.Embedding: embedding,
}


def has_rule(layer: nn.Module) -> bool:
    """Return whether the gradients of the layer's parameters follow from its input and the gradient of its output."""
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq):
        return False
    return type(layer) in RULES
