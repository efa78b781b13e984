"""Run a proven trace of a model on the whole batch, and record what the layer rules need.

`row_proof` proves that the trace keeps rows apart, so all rows run together. Frozen layers before the first trained one run
without a record for differentiation. A parameter that no layer owns (a class token, a position embedding) is expanded to one
copy per row where it meets the rows; the gradient of the copies is the gradient per row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import vmap

from ..row_proof import Proven
from ..row_rules import has_no_derivative, is_elementwise
from .engine import LossOfOne
from .layers import RULES, Buffers, Call, has_rule
from .parts import Instantiated, Part, Stacked, total


@dataclass(frozen=True)
class _Copies:
    """A parameter as one copy per row, along `dim`."""

    name: str
    parameter: Tensor
    output: Tensor
    dim: int


class Traced:
    """A proven trace with the trained parameters `names` of the original model.

    The weights of a `chain` get the strides that the engine gives them without a trace: a weight with one input channel has
    two sets of strides for the same order, and the kernels differ.
    """

    def __init__(self, proven: Proven, names: list[str], chain: bool = False) -> None:
        self.proven, self.names = proven, names
        self.trained = {local for local, (name, _) in proven.sources.items() if name in names}
        self.ruled = {
            name
            for name, layer in proven.module.named_modules()
            if has_rule(layer) and any(f"{name}.{local}" in self.trained for local, _ in layer.named_parameters(recurse=False))
        }
        for _, parameter in proven.module.named_parameters():
            if parameter.ndim == 4:  # convolutions and pools then run in this layout
                last = torch.channels_last
                parameter.data = (
                    parameter.data.clone(memory_format=last) if chain else parameter.data.contiguous(memory_format=last)
                )

    def unsupported(self) -> str | None:
        """Return the first trained parameter that has neither a rule nor a simple use; None if there is none."""
        for node in self.proven.module.graph.nodes:
            if node.op == "get_attr" and node.target in self.trained and not all(map(self._makes_copies, node.users)):
                return str(node.target)
        owners: dict[int, set[str]] = {}
        for name, parameter in self.proven.module.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), set()).add(name)
        bare = {node.target for node in self.proven.module.graph.nodes if node.op == "get_attr"}
        for name, parameter in self.proven.module.named_parameters(remove_duplicate=False):
            covered = name.rpartition(".")[0] in self.ruled or name in bare
            if name in self.trained and (not covered or len(owners[id(parameter)]) > 1):
                return name
        return None

    def _makes_copies(self, node: fx.Node) -> bool:
        """Return whether the result of the node has rows, and the parameter enters it by broadcasting, or is a constant."""
        if has_no_derivative(node):
            return True
        expands = node.op == "call_method" and node.target in ("expand", "repeat")
        return node.name in self.proven.batch_dims and (expands or is_elementwise(node))

    def per_example(
        self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor, memory: Callable[[Any], Buffers]
    ) -> dict[str, Part]:
        """Return the per-example gradients of every trained parameter."""
        self.proven.refresh(model)
        with torch.enable_grad():
            run = Run(self)
            logits = run.run(views.flatten(0, 1), enable_io_processing=False)
            losses = vmap(loss)(torch.unflatten(logits, 0, views.shape[:2]), labels)
            deltas = torch.autograd.grad(losses.sum(), run.outputs, allow_unused=True, materialize_grads=True)
        return self.parts(run, deltas, model, self.names, len(views), memory)

    def parts(
        self,
        run: "Run",
        deltas: tuple[Tensor, ...],
        model: nn.Module,
        names: list[str],
        examples: int,
        memory: Callable[[Any], Buffers],
    ) -> dict[str, Part]:
        """Return the gradients of the parameters `names`, from a run and the gradients of its `outputs`."""
        parts: dict[str, list[Part]] = {}
        with torch.no_grad():
            for call, place, delta in zip(run.calls, run.places, deltas, strict=False):
                rule = RULES[type(call.layer)]
                for local, part in rule(call.layer, _full(call.inputs), _full(delta), examples, memory(place)).items():
                    parts.setdefault(f"{call.name}.{local}", []).append(part)
            for copies, delta in zip(run.copies, deltas[len(run.calls) :], strict=False):
                parts.setdefault(copies.name, []).append(_of_copies(copies, _full(delta), examples))
        return {name: self._joined(name, model, parts, examples) for name in names}

    def used_by(self, node: fx.Node) -> set[str]:
        """Return the trained parameters of the original model that a call uses."""
        bare = {str(value.target) for value in node.all_input_nodes if value.op == "get_attr"}
        layer = self.proven.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        owned = {f"{node.target}.{local}" for local, _ in layer.named_parameters()} if layer else set()
        return {self.proven.sources[local][0] for local in (bare | owned) & self.trained}

    @property
    def unused(self) -> list[str]:
        """The trained parameters that the forward does not use: their gradients are 0."""
        used = {name for node in self.proven.module.graph.nodes for name in self.used_by(node)}
        return [name for name in self.names if name not in used]

    def _joined(self, name: str, model: nn.Module, parts: dict[str, list[Part]], examples: int) -> Part:
        """Return the gradient of one original parameter, which may be in several parts in the trace."""
        pieces = [(cut or (0, 0), local) for local, (source, cut) in self.proven.sources.items() if source == name]
        found = [total(parts[local]) for _, local in sorted(pieces) if local in parts]
        if not found:  # the forward does not use it
            parameter = model.get_parameter(name)
            return Instantiated(torch.zeros(examples, parameter.numel(), dtype=parameter.dtype, device=parameter.device))
        return found[0] if len(found) == 1 else Stacked(found)


class Run(fx.Interpreter):
    """One pass over the trace."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.proven.module)
        self.traced = traced
        self.calls: list[Call] = []
        self.copies: list[_Copies] = []
        self.places: list[str] = []  # the node of each call
        self._node = ""

    @property
    def outputs(self) -> list[Tensor]:
        """What the rules need the gradients of: the outputs of the calls, then the copies of parameters."""
        return [*(call.output for call in self.calls), *(copies.output for copies in self.copies)]

    def through(self, nodes: list[fx.Node], entry: fx.Node, value: Tensor, leaves: fx.Node) -> Tensor:
        """Run some nodes; `value` is the result of `entry`. Return the result of `leaves`."""
        self.env = {entry: value}
        for node in nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in self.env:
                    self.env[source] = self.run_node(source)
            self.env[node] = self.run_node(node)
        result: Tensor = self.env[leaves]
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer's own forward, so that no hook can run, and record it if it has trained parameters."""
        layer = self.fetch_attr(target)
        output = layer.forward(*args, **kwargs)
        if target in self.traced.ruled:
            output = output if output.requires_grad else output.requires_grad_()
            self.calls.append(Call(target, layer, args[0].detach(), output))
            self.places.append(self._node)
        return output

    def run_node(self, n: fx.Node) -> Any:
        """Give every row its own copy of a trained parameter that meets rows here."""
        self._node = n.name
        bare = [node for node in n.all_input_nodes if node.op == "get_attr" and node.target in self.traced.trained]
        if not bare or has_no_derivative(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        dim = self.traced.proven.batch_dims[n.name]
        if not is_elementwise(n):
            output = getattr(self, n.op)(n.target, args, kwargs).detach().requires_grad_()
            self.copies.append(_Copies(str(bare[0].target), self.env[bare[0]], output, dim))
            return output
        tensors = [value for value in self._values(n) if isinstance(value, Tensor)]
        rows = next(self.env[node].shape[place] for node, place in self._rows_of(n))
        copies = {node: self._per_row(node, max(value.ndim for value in tensors), dim, rows) for node in bare}
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda node: copies.get(node, self.env[node]))
        return getattr(self, n.op)(n.target, args, kwargs)

    def _values(self, n: fx.Node) -> Iterator[Any]:
        return (self.env[node] for node in n.all_input_nodes)

    def _rows_of(self, n: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        dims = self.traced.proven.batch_dims
        return ((node, dims[node.name]) for node in n.all_input_nodes if node.name in dims)

    def _per_row(self, node: fx.Node, ndim: int, dim: int, rows: int) -> Tensor:
        parameter: Tensor = self.env[node]
        shape = [1] * (ndim - parameter.ndim) + list(parameter.shape)
        wide = parameter.reshape(shape).expand(*shape[:dim], rows, *shape[dim + 1 :]).requires_grad_()
        self.copies.append(_Copies(str(node.target), parameter, wide, dim))
        return wide


def _of_copies(copies: _Copies, delta: Tensor, examples: int) -> Part:
    shape = [1] * (delta.ndim - copies.parameter.ndim) + list(copies.parameter.shape)
    shape[copies.dim] = delta.shape[copies.dim]
    by_row = delta.sum_to_size(shape).movedim(copies.dim, 0).flatten(1)
    return Instantiated(by_row.reshape(examples, -1, by_row.shape[1]).sum(dim=1))


def _full(tensor: Tensor) -> Tensor:
    """Convert half precision (autocast) to float32 before anything is summed."""
    return tensor.float() if tensor.is_floating_point() else tensor
