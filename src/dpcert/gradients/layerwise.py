"""The fast engine: one forward pass, gradients of layer *outputs* only, then one batched product per layer.

It computes no ordinary weight gradients and no input gradient. Views and positions are summed inside the product, so memory
use is that of b gradients, whatever the number of views.

A chain of known layers runs on the whole batch, and so does the trace of a custom forward if it is proven to keep rows apart
(`traced`). Any other forward runs on one example at a time under ``vmap``, so that no example can see another. Parameters
without a layer rule get their gradients from the same pass.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ..isolation import keeps_rows_apart
from ..row_proof import prove, state_of
from .checkpointed import Checkpointed, Segment, segments
from .engine import ClippedSum, Clipping, LossOfOne, empty_sum, trainable
from .layers import RULES, Buffers, Call, has_rule
from .parts import PLAIN, Arithmetic, Instantiated, Part, total
from .sums import Sums, pieces
from .traced import Traced

_MANY_PARAMETERS, _FEW_ROWS, _SOME_ROWS = 1 << 18, 96, 192


class _Skeleton:
    """A private copy of the model, called with the current weights of the original.

    Its hooks record the input and output of every layer with a rule. Several engines can run at once on one model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.original, self.copy = model, copy.deepcopy(model)
        self.parameters = trainable(model)
        self.calls: list[Call] = []
        self.perturbations: list[Tensor] | None = None
        self.ruled = _ruled(model, self.parameters)
        self._state = state_of(model)
        self._outputs_may_change = _may_write_in_place(model)
        for name, layer in self.copy.named_modules():
            if name in self.ruled:
                layer.register_forward_hook(self._recorder(name))

    def fits(self, model: nn.Module) -> bool:
        """Return whether this is a copy of the model as it is: the same layers in the same mode, and the same trained ones."""
        return self.original is model and self._state == state_of(model) and list(self.parameters) == list(trainable(model))

    @property
    def without_rule(self) -> dict[str, Tensor]:
        """The trained parameters that no layer rule covers."""
        covered = {
            _prefixed(name, local) for name in self.ruled for local, _ in self.copy.get_submodule(name).named_parameters()
        }
        return {name: parameter.detach() for name, parameter in self.parameters.items() if name not in covered}

    def forward(self, rows: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return the logits of all rows; `calls` then has the inputs and outputs of each layer."""
        self.calls.clear()
        every = {name: _channels_last(parameter.detach()) for name, parameter in self.original.named_parameters()}
        logits: Tensor = functional_call(self.copy, {**every, **(weights or {})}, (rows,))
        return logits

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        def record(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            copied = self._outputs_may_change
            seen = inputs[0].detach().clone() if copied else inputs[0].detach()
            if self.perturbations is not None:  # under vmap: the gradient for a 0 added to an output equals that for the output
                place = len(self.calls)
                self.calls.append(Call(name, layer, seen, output))
                return output + self.perturbations[place] if place < len(self.perturbations) else None
            known = output if output.requires_grad else output.requires_grad_()
            self.calls.append(Call(name, layer, seen, known))
            return known.clone() if copied else None

        return record


class Layerwise:
    """The engine; it reuses its buffers between calls, so that no step has to allocate them again.

    With `checkpointing` it keeps few activations and computes the others again: the same bits in less memory and more time.
    """

    def __init__(self, checkpointing: bool = False, arithmetic: Arithmetic = PLAIN) -> None:
        self.arithmetic = arithmetic
        self._buffers: dict[Any, Buffers] = {}  # by position of the call: a layer used twice has two
        self._skeleton: _Skeleton | None = None
        self._traced: dict[tuple[int, ...], Traced | None] = {}  # by shape of an example
        self._segments: dict[tuple[int, ...], list[Segment]] = {}
        self._checkpointing = checkpointing

    def __call__(self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor, clip: Clipping) -> ClippedSum:
        """The contract of `engine`."""
        if len(views) == 0:
            return empty_sum(model, clip)
        sizes = {name: parameter.numel() for name, parameter in trainable(model).items()}
        sums = Sums(sizes, len(views), clip, views.device)
        for some in pieces(len(views), self._at_once(model, views)):
            if self._checkpointing:
                self._add_checkpointed(sums, some, model, loss, views[some], labels[some])
                continue
            parts = self.per_example(model, loss, views[some], labels[some])
            with torch.no_grad():
                sums.add(some, parts)
        return sums.result

    def _add_checkpointed(
        self, sums: Sums, some: slice, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor
    ) -> None:
        self._prepared(model)
        shape = tuple(views.shape[2:])
        traced = self._trace(model, shape)
        assert traced is not None, "`unsupported` refuses such a model"
        traced.proven.refresh(model)
        passed = Checkpointed(traced, self._segments[shape], loss, views, labels, self.arithmetic)
        with torch.no_grad():
            sums.add_in_two_passes(some, lambda: passed.backward(model), traced.names)

    def _at_once(self, model: nn.Module, views: Tensor) -> int:
        """Return how many examples to take at a time: few enough to keep large gradients and activations near the cache."""
        many = sum(parameter.numel() for parameter in trainable(model).values()) > _MANY_PARAMETERS
        if not many and keeps_rows_apart(model, tuple(views.shape[2:])):
            return len(views)
        return max(1, (_FEW_ROWS if many else _SOME_ROWS) // views.shape[1])

    def per_example(self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor) -> dict[str, Part]:
        """Return per-example gradients of every trained parameter, in the order of `trainable`."""
        skeleton = self._prepared(model)
        whole_batch = keeps_rows_apart(model, tuple(views.shape[2:])) and not skeleton.without_rule
        traced = None if whole_batch and not self._checkpointing else self._trace(model, tuple(views.shape[2:]))
        if traced is not None:
            return traced.per_example(model, loss, views, labels, self._memory)
        calls, deltas, rest = (_on_the_batch if whole_batch else _on_each_example)(skeleton, loss, views, labels)
        parts: dict[str, list[Part]] = {name: [Instantiated(gradient.flatten(1))] for name, gradient in rest.items()}
        with torch.no_grad():
            for place, (call, delta) in enumerate(zip(calls, deltas, strict=True)):
                rule = RULES[type(call.layer)]
                for local, part in rule(call.layer, _full(call.inputs), _full(delta), len(views), self._memory(place)).items():
                    parts.setdefault(_prefixed(call.name, local), []).append(part)
        skeleton.calls.clear()
        return {name: total(parts[name]) for name in skeleton.parameters}

    def _memory(self, place: Any) -> Buffers:
        return self._buffers.setdefault(place, Buffers(self.arithmetic))

    def _prepared(self, model: nn.Module) -> _Skeleton:
        if self._skeleton is None or not self._skeleton.fits(model):
            self._skeleton = _Skeleton(model)
            self._traced.clear()
            self._segments.clear()
        return self._skeleton

    def unsupported(self, model: nn.Module, input_shape: tuple[int, ...]) -> str | None:
        """Return why this engine has no advantage for the model, or None."""
        skeleton = self._prepared(model)
        if self._checkpointing and self._trace(model, input_shape) is None:
            return "checkpointing needs a forward that is proven to keep examples apart, and this one is not"
        return None if skeleton.ruled or self._trace(model, input_shape) else "no trained parameter has a rule"

    def _trace(self, model: nn.Module, input_shape: tuple[int, ...]) -> Traced | None:
        """Return the proven trace of a custom forward; None if there is no proof or a parameter it cannot differentiate."""
        if input_shape not in self._traced:
            proven = prove(model, input_shape)
            chain = keeps_rows_apart(model, input_shape)
            traced = None if proven is None else Traced(proven, list(trainable(model)), chain)
            self._traced[input_shape] = traced = None if traced is None or traced.unsupported() else traced
            self._segments[input_shape] = [] if traced is None or not self._checkpointing else segments(traced)
        return self._traced[input_shape]


_Passed = tuple[list[Call], tuple[Tensor, ...], dict[str, Tensor]]


def _on_the_batch(skeleton: _Skeleton, loss: LossOfOne, views: Tensor, labels: Tensor) -> _Passed:
    """Run all rows at once; return each layer's call, and the gradient of the summed losses for each layer's output."""
    with torch.enable_grad():
        logits = skeleton.forward(views.flatten(0, 1))
        losses = vmap(loss)(torch.unflatten(logits, 0, views.shape[:2]), labels)
        outputs = [call.output for call in skeleton.calls]
        deltas = torch.autograd.grad(losses.sum(), outputs, allow_unused=True, materialize_grads=True)
    return list(skeleton.calls), deltas, {}


def _on_each_example(skeleton: _Skeleton, loss: LossOfOne, views: Tensor, labels: Tensor) -> _Passed:
    """Like `_on_the_batch`, for a forward that might mix rows: it runs on one example's views, mapped over the examples."""
    with torch.no_grad():
        skeleton.perturbations = []
        skeleton.forward(views[0])
    zeros = [views.new_zeros(()).expand(call.output.shape) for call in skeleton.calls]

    def of_one(zeros: list[Tensor], rest: dict[str, Tensor], views: Tensor, label: Tensor) -> tuple[Tensor, list[Tensor]]:
        skeleton.perturbations = zeros
        value = loss(skeleton.forward(views, rest), label)
        return value, [call.inputs for call in skeleton.calls]

    try:
        gradients = vmap(grad(of_one, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0, 0))
        (deltas, rest), inputs = gradients(zeros, skeleton.without_rule, views, labels)
    finally:
        skeleton.perturbations = None
    calls = [
        Call(call.name, call.layer, seen.flatten(0, 1), call.output) for call, seen in zip(skeleton.calls, inputs, strict=True)
    ]
    return calls, tuple(delta.flatten(0, 1) for delta in deltas), rest


def _may_write_in_place(model: nn.Module) -> bool:
    """Return whether later code might overwrite a layer's output: ``ReLU(inplace=True)``, or a custom forward."""
    custom_forward = any(not type(layer).__module__.startswith("torch.nn.") for layer in model.modules())
    return custom_forward or any(getattr(layer, "inplace", False) for layer in model.modules())


def _ruled(model: nn.Module, trained: dict[str, nn.Parameter]) -> set[str]:
    """Return the layers with a rule that have trained parameters and share none of their parameters."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return {
        name
        for name, layer in model.named_modules()
        if has_rule(layer)
        and all(uses[id(parameter)] == 1 for parameter in layer.parameters(recurse=False))
        and any(_prefixed(name, local) in trained for local, _ in layer.named_parameters(recurse=False))
    }


def _prefixed(layer: str, local: str) -> str:
    return f"{layer}.{local}" if layer else local


def _channels_last(weight: Tensor) -> Tensor:
    """Convert a 4-D weight to channels-last; convolutions and pools then run in that layout."""
    return weight.clone(memory_format=torch.channels_last) if weight.ndim == 4 else weight


def _full(tensor: Tensor) -> Tensor:
    """Convert half precision (autocast) to float32 before anything is summed."""
    return tensor.float() if tensor.is_floating_point() else tensor
