"""A noise bank shared by all inputs, with the model's first linear layer applied to it once.

A convolution or linear layer is affine: first(x + eta) = first(x) + W eta. If everything before it is
linear, the products W eta of a noise bank can be stored, and a vote needs neither random numbers nor the first layer.

Guarantee: each certificate stays valid on its own, because for one input the noises of the bank are independent N(0,
sigma^2 I), drawn after model and inputs are fixed, and selection and estimation use disjoint parts. Sharing has one cost:
the errors of different inputs are correlated. With fresh noise they are independent.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..isolation import Forward, each_row_alone, keeps_rows_apart, mapped_over_rows
from ..rng import Purpose, bulk_normal

LARGEST_BANK_BYTES = 1 << 30
_BLOCK = 1024
_AGREEMENT = 2e-5  # of the largest output: float32 rounding is below this, quantization to 1/255 above
PROBED = 64  # inputs at a time


class _ReachedError(Exception):
    """Carries the output of the first linear layer out of a forward pass that can stop there."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class SplitModel:
    """A model split after its first linear layer: `features` is the first part, `logits` the rest.

    Rows run together only if the model provably processes each row independently (`isolation`); `proven` if that is known.
    """

    def __init__(self, model: nn.Module, name: str, input_shape: tuple[int, ...], proven: bool | None = None) -> None:
        self.model, self.name = copy.deepcopy(model), name
        self._layer: Any = self.model.get_submodule(name)
        self._forward = self._layer.forward
        self._nothing = torch.zeros((1, *input_shape), device=next(self.model.parameters()).device)
        self._rows_together = keeps_rows_apart(model, input_shape) if proven is None else proven

    def features(self, x: Tensor) -> Tensor:
        """Return the output of the first linear layer for each row."""
        return self._features(x) if self._rows_together else mapped_over_rows(self._features)(x)

    def logits(self, features: Tensor) -> Tensor:
        """Apply the rest of the model to each row of `features`."""
        return self._logits(features) if self._rows_together else mapped_over_rows(self._logits)(features)

    def _features(self, x: Tensor) -> Tensor:

        def stop(*inputs: Tensor) -> Tensor:
            raise _ReachedError(self._forward(*inputs))

        self._layer.forward = stop
        try:
            self.model(x)
        except _ReachedError as reached:
            return reached.output
        raise RuntimeError("the first linear layer was not reached")

    def _logits(self, features: Tensor) -> Tensor:
        """The model is called with a placeholder input that is not used."""
        self._layer.forward = lambda *inputs: features
        logits: Tensor = self.model(self._nothing.expand(len(features), *self._nothing.shape[1:]))
        return logits


def split(model: nn.Module, x: Tensor, sigma: float, whole: Forward | None = None) -> SplitModel | None:
    """Split `model` after its first Conv or Linear layer; None if the split model differs on inputs like `x` at `sigma`.

    Checked on the inputs themselves with noise three times as large: the layer must be affine in the input (not after a
    clamp), and the rest must depend only on its output (no skip connection from the input).

    `whole` is the model as `each_row_alone` returns it: a module only if it provably keeps rows apart.
    """
    whole = whole or each_row_alone(model, tuple(x.shape[1:]))
    base = whole if isinstance(whole, nn.Module) else model
    for name, layer in base.named_modules():
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            cut = split_at(name, model, tuple(x.shape[1:]), whole)
            return cut if cut_is_the_same(cut, whole, x, sigma) else None
    return None


def split_at(name: str, model: nn.Module, input_shape: tuple[int, ...], whole: Forward) -> SplitModel:
    """Split `model` after the layer `name`, unchecked. `whole` is the model as `each_row_alone` returns it."""
    proven = isinstance(whole, nn.Module)
    return SplitModel(whole if isinstance(whole, nn.Module) else model, name, input_shape, proven)


def cut_is_the_same(cut: SplitModel, model: Forward, x: Tensor, sigma: float) -> bool:
    """Return whether a split model computes the same as `model` at every input `x` with noise of 3 `sigma`."""
    device = next(cut.model.parameters()).device
    parts = (x[start : start + PROBED] for start in range(0, len(x), PROBED))
    return all(_is_the_same_at(cut, model, rows.to(device), sigma) for rows in parts)


def _is_the_same_at(cut: SplitModel, model: Forward, x: Tensor, sigma: float) -> bool:
    noise = 3.0 * sigma * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device)
    try:
        with torch.inference_mode():
            at_zero = cut.features(torch.zeros_like(x[:1]))
            affine = cut.features(x) + (cut.features(noise) - at_zero)
            direct = cut.features(x + noise)
            logits, expected = cut.logits(direct).clone(), model(x + noise)
    except Exception:  # any model may fail here; one that cannot be split runs whole
        return False
    return agree(affine, direct) and logits.shape == expected.shape and agree(logits, expected)


def agree(a: Tensor, b: Tensor) -> bool:
    """Return whether `a` and `b` differ only by rounding."""
    return bool((a - b).abs().max() <= _AGREEMENT * b.abs().max())


def channels_last(tensor: Tensor) -> Tensor:
    """Convert a 4-D tensor to channels-last; return other tensors unchanged."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


@dataclass(frozen=True)
class NoiseBank:
    """``W eta`` for every noise of the bank, already scaled by sigma; selection and estimation have separate tensors."""

    parts: dict[Purpose, Tensor]


def draw_bank(
    cut: SplitModel,
    sigma: float,
    key: bytes,
    votes: dict[Purpose, int],
    input_shape: tuple[int, ...],
    device: torch.device,
    layout: Callable[[Tensor], Tensor] = channels_last,
) -> NoiseBank | None:
    """Draw the noise of each purpose and store the first layer's output for it; None if that takes too much memory."""
    with torch.inference_mode():
        zero = torch.zeros((1, *input_shape), device=device)
        offset = cut.features(zero)
        if sum(votes.values()) * offset[0].numel() * 4 > LARGEST_BANK_BYTES:
            return None
        parts = {}
        for purpose, count in votes.items():
            outputs = layout(torch.empty((count, *offset.shape[1:]), device=device))
            for block, start in enumerate(range(0, count, _BLOCK)):
                noise = bulk_normal(key, purpose, (_BLOCK, *input_shape), device, part=block)[: count - start]
                outputs[start : start + _BLOCK] = (cut.features(noise) - offset) * sigma
            parts[purpose] = outputs
    return NoiseBank(parts)
