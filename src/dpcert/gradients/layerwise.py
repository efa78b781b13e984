"""The fast engine: one forward pass, gradients of layer *outputs* only, then one batched product a layer.

No ordinary weight gradient is computed and none for the input. Views and positions are summed inside the product, so the
memory is that of b gradients whatever the number of views. What it cannot do it refuses (`unsupported`), and the reference
engine takes over for the whole model.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .engine import Clip, ClippedSum, LossOfOne, empty_sum, trainable
from .layers import RULES, Buffers
from .parts import Part, total

_Record = tuple[str, nn.Module, Tensor, Tensor]


class _Skeleton:
    """A copy of the model that only this engine runs, with the model's own weights put in at each call.

    Its hooks write down the input and output of every trained layer. Several engines can run at once on one model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.original, self.copy = model, copy.deepcopy(model)
        self.parameters = trainable(model)
        self.records: list[_Record] = []
        outputs_may_change = _may_write_in_place(model)
        for name, layer in self.copy.named_modules():
            if _owns(name, layer, self.parameters):
                layer.register_forward_hook(_recorder(name, self.records, outputs_may_change))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of all rows; `records` then holds what each layer saw."""
        self.records.clear()
        weights = {name: _channels_last(parameter.detach()) for name, parameter in self.original.named_parameters()}
        logits: Tensor = functional_call(self.copy, weights, (rows,))
        return logits


class Layerwise:
    """The engine; it keeps its buffers between calls, so that memory is not touched anew in every step."""

    def __init__(self) -> None:
        self._buffers: dict[int, Buffers] = {}  # by the place of the layer's call: a layer used twice has two
        self._skeleton: _Skeleton | None = None

    def __call__(self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor, clip: Clip) -> ClippedSum:
        """The contract of `engine`."""
        if len(views) == 0:
            return empty_sum(model, clip)
        parts = list(self.per_example(model, loss, views, labels).values())
        with torch.no_grad():
            squares = torch.stack([part.norms_squared() for part in parts])
            norms = squares.sum(dim=0).sqrt_()
            factors = clip.factors(norms)
            unusable = ~torch.isfinite(norms)
            if bool(unusable.any()):  # 0 * inf is nan: such gradients must be emptied, not only weighted by 0
                parts = [part.without(unusable) for part in parts]
            return ClippedSum(torch.cat([part.weighted_sum(factors) for part in parts]), clip.sensitivity, norms)

    def per_example(self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor) -> dict[str, Part]:
        """Per-example gradients of every trained parameter, in the order of `trainable`."""
        if self._skeleton is None or self._skeleton.original is not model:
            self._skeleton = _Skeleton(model)
        records, deltas = _forward_and_deltas(self._skeleton, loss, views, labels)
        found: dict[str, list[Part]] = {}
        with torch.no_grad():
            for call, ((name, layer, inputs, _), delta) in enumerate(zip(records, deltas, strict=True)):
                prefix = f"{name}." if name else ""
                rule, buffers = RULES[type(layer)], self._buffers.setdefault(call, {})
                for kind, part in rule(layer, _full(inputs), _full(delta), len(views), buffers).items():
                    found.setdefault(prefix + kind, []).append(part)
        self._skeleton.records.clear()
        return {name: total(found[name]) for name in self._skeleton.parameters}


def _forward_and_deltas(
    skeleton: _Skeleton, loss: LossOfOne, views: Tensor, labels: Tensor
) -> tuple[list[_Record], tuple[Tensor, ...]]:
    """Run all rows once; return each layer's input, and the gradient of the summed losses for each layer's output."""
    with torch.enable_grad():
        logits = skeleton.forward(views.flatten(0, 1))
        losses = vmap(loss)(torch.unflatten(logits, 0, views.shape[:2]), labels)
        outputs = [output for *_, output in skeleton.records]
        deltas = torch.autograd.grad(losses.sum(), outputs, allow_unused=True, materialize_grads=True)
    return list(skeleton.records), deltas


def _recorder(name: str, records: list[_Record], copied: bool) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
    def record(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        known = output if output.requires_grad else output.requires_grad_()
        records.append((name, layer, inputs[0].detach().clone() if copied else inputs[0].detach(), known))
        return known.clone() if copied else None

    return record


def _may_write_in_place(model: nn.Module) -> bool:
    """Whether what follows a layer might overwrite its output: ``ReLU(inplace=True)``, or a forward of the user's own."""
    own_forward = any(not type(layer).__module__.startswith("torch.nn.") for layer in model.modules())
    return own_forward or any(getattr(layer, "inplace", False) for layer in model.modules())


def _owns(name: str, layer: nn.Module, names: dict[str, nn.Parameter]) -> bool:
    prefix = f"{name}." if name else ""
    return any(prefix + own in names for own, _ in layer.named_parameters(recurse=False))


def _channels_last(weight: Tensor) -> Tensor:
    """A weight of four dimensions with its channels innermost: convolutions and pools then run in that layout."""
    return weight.clone(memory_format=torch.channels_last) if weight.ndim == 4 else weight


def _full(tensor: Tensor) -> Tensor:
    """Half precision (autocast) is widened before anything is summed."""
    return tensor.float() if tensor.is_floating_point() else tensor


def unsupported(model: nn.Module) -> str | None:
    """Why this engine cannot take the model, or None."""
    names = trainable(model)
    if len(dict(model.named_parameters(remove_duplicate=False))) != len(dict(model.named_parameters())):
        return "a parameter is shared between layers"
    for name, layer in model.named_modules():
        if not _owns(name, layer, names):
            continue
        if type(layer) not in RULES:
            return f"layer {name!r} ({type(layer).__name__}) has trainable parameters and no rule"
        if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq):
            return f"layer {name!r} (Embedding) uses max_norm, sparse or scale_grad_by_freq"
    return None
