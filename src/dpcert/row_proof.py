"""A proof that a custom forward processes every row independently: trace it, then check every operation of the trace.

`prove` records the forward with ``torch.fx``: a list of layers and functions, without Python in between. Every entry must be
an operation known to keep rows apart, and the dimension of the batch is tracked through all of them. What runs afterwards is
the recorded list (`Proven.module`), not the original code. So data-dependent Python, hooks and global state cannot differ
between what was proven and what runs. Anything unknown is no proof; such a model runs on one example at a time.

Guarantee: row i of the output of `Proven.module` is a function of row i of the input, the parameters and the buffers.
Assumes: PyTorch's own layers and functions do what they are documented to do.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .known_layers import altered, hooks_on_every_module
from .row_rules import LARGE, SMALL, Fixed, NoProofError, Rows, after_layer, after_operation, close

_TRACING = threading.Lock()  # torch.fx patches nn.Module for the whole process
_CALL, _GETATTR, _APPLY = nn.Module.__call__, nn.Module.__getattr__, torch.autograd.Function.__dict__["apply"]


@dataclass(frozen=True)
class Proven:
    """A traced model whose rows are provably independent.

    `batch_dims` gives the dimension of the batch for each node that has one. `sources` gives, for each parameter and buffer
    of `module`, its name in the original model and, for a part of it, the first and last row.
    """

    module: fx.GraphModule
    batch_dims: dict[str, int]
    sources: dict[str, tuple[str, tuple[int, int] | None]]

    def refresh(self, model: nn.Module) -> None:
        """Copy the current parameters and buffers of the original model, those that changed.

        A thread may be in the middle of a backward pass through the trace, which no longer works once a weight is written,
        even with the value that it has.
        """
        originals = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        with torch.no_grad():
            for name, tensor in _tensors(self.module):
                original, part = self.sources[name]
                value = originals[original].detach()
                value = value if part is None else value[slice(*part)]
                if not _alike(tensor, value):
                    tensor.copy_(value)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; NaN equals NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def prove(model: nn.Module, input_shape: tuple[int, ...]) -> Proven | None:
    """Return a traced copy of the model that provably keeps rows apart, with the weights of now; None if there is no proof."""
    try:
        with _TRACING:
            return _prove(model, input_shape)
    except Exception:  # the forward is unknown code, and anything unexpected is no proof
        return None


_Known = dict[tuple[int, ...], Proven | None]
_PROOFS: "WeakKeyDictionary[nn.Module, tuple[object, _Known]]" = WeakKeyDictionary()
_LOOKING_UP = threading.Lock()


def proven_forward(model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module | None:
    """Return the proven trace with the current weights, which need no gradients; None without a proof.

    A proof is kept with the model until a layer, its mode or a hook changes. Threads share the trace, so the weights must not
    change while it runs.
    """
    state = state_of(model)
    with _LOOKING_UP:
        kept = _PROOFS.get(model)
        if kept is None or kept[0] != state:
            kept = _PROOFS[model] = (state, {})
        if input_shape not in kept[1]:
            kept[1][input_shape] = prove(model, input_shape)
        proven = kept[1][input_shape]
        if proven is None:
            return None
        proven.refresh(model)
        return proven.module


def state_of(model: nn.Module) -> object:
    """Return what a proof depends on besides the weights: the layers, their modes and what was done to them."""
    return hooks_on_every_module(), [(id(layer), layer.training, altered(layer)) for layer in model.modules()]


def reason_for_no_proof(model: nn.Module, input_shape: tuple[int, ...]) -> str | None:
    """Return why `prove` gives no proof; None if it does."""
    try:
        with _TRACING:
            _prove(model, input_shape)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _prove(model: nn.Module, input_shape: tuple[int, ...]) -> Proven:
    if hooks_on_every_module():
        raise NoProofError("a hook is registered for all modules")
    for name, layer in model.named_modules():
        _refuse_unusual(name, layer)
    traced = copy.deepcopy(model).requires_grad_(False)
    sources = {name: (name, None) for name, _ in _tensors(traced)} | _with_plain_attention(traced)
    graph = _trace(traced)
    if str(graph) != str(_trace(traced)):
        raise NoProofError("two calls of the forward do different things")
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # the same values for every memory layout
    module = fx.GraphModule(traced, graph)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    rows = torch.rand((LARGE, *input_shape), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        known = _check_every_node(module, set(sources), rows)
        output = _output(known)
        alone = torch.cat([model(row) for row in rows.split(1)])  # type: ignore[no-untyped-call]
    if output.large.shape != alone.shape or not close(output.large, alone):  # global state, or a tensor changed in place
        raise NoProofError("the trace differs from the model")
    batch_dims = {node.name: value.dim for node, value in known.items() if isinstance(value, Rows)}
    return Proven(module, batch_dims, {name: sources[name] for name, _ in _tensors(module)})


def _refuse_unusual(name: str, layer: nn.Module) -> None:
    """Refuse hooks, replaced methods, custom parameters, and classes that change how a module is called or read."""
    kind = type(layer)
    if isinstance(layer, fx.GraphModule):
        raise NoProofError(f"{name!r} is a traced module")
    if kind in (nn.ParameterList, nn.ParameterDict):  # containers, whose call is an error
        kind = nn.Module
    plain = kind.__call__ is _CALL and kind.__getattr__ is _GETATTR and kind.__getattribute__ is object.__getattribute__
    if altered(layer) or not plain:
        raise NoProofError(f"layer {name!r} has hooks, replaced methods or custom parameters")
    if any(type(buffer) is not Tensor for buffer in layer.buffers(recurse=False)):
        raise NoProofError(f"layer {name!r} has a custom buffer")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class _Tracer(fx.Tracer):
    """Records layers of torch.nn as they are and everything else as functions. Other threads are left alone."""

    proxy_buffer_attributes = True  # in-place changes of a buffer then show in the trace

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _trace(model: nn.Module) -> fx.Graph:
    with _without_custom_derivatives():
        return _Tracer().trace(model)


@contextmanager
def _without_custom_derivatives() -> Iterator[None]:
    """Refuse ``torch.autograd.Function`` in this thread: a trace would keep its forward and lose its backward."""
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise NoProofError(f"the forward uses the custom derivative {cls.__name__}")
        return _APPLY.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]


_PROJECTIONS = ("query", "key", "value")  # the three parts of in_proj_weight, in this order


class _Attention(nn.Module):
    """What ``nn.MultiheadAttention`` computes, from linear layers that have gradient rules."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = layer.num_heads
        width, weight, bias = layer.embed_dim, cast(Tensor, layer.in_proj_weight).detach(), layer.in_proj_bias
        for place, name in enumerate(_PROJECTIONS):
            part = nn.Linear(width, width, bias=bias is not None, device=weight.device, dtype=weight.dtype).requires_grad_(
                False
            )
            part.weight.copy_(weight[place * width : (place + 1) * width])
            if bias is not None:
                part.bias.copy_(bias.detach()[place * width : (place + 1) * width])
            self.add_module(name, part)
        out = layer.out_proj
        self.out_proj = nn.Linear(width, width, bias=out.bias is not None, device=weight.device, dtype=weight.dtype)
        self.out_proj.load_state_dict(out.state_dict())
        self.out_proj.requires_grad_(False)

    def forward(self, query: Any, key: Any, value: Any, *, need_weights: bool = True, average_attn_weights: bool = True) -> Any:
        """Return the output and None; a model that uses the attention weights is not proven."""
        q, k, v = (
            self.get_submodule(name)(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name, x in zip(_PROJECTIONS, (query, key, value), strict=True)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


def _with_plain_attention(model: nn.Module) -> dict[str, tuple[str, tuple[int, int] | None]]:
    """Replace every ``nn.MultiheadAttention`` in place; return where the parameters of the replacements come from."""
    sources: dict[str, tuple[str, tuple[int, int] | None]] = {}
    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.MultiheadAttention:
            continue
        plain = layer.batch_first and layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
        if not plain or (layer.training and layer.dropout) or not name:
            raise NoProofError(f"attention {name!r} has options that are not supported")
        model.set_submodule(name, _Attention(layer))
        width, prefix = layer.embed_dim, f"{name}."
        for place, part in enumerate(_PROJECTIONS):
            for kind in ("weight", "bias"):
                sources[f"{prefix}{part}.{kind}"] = f"{prefix}in_proj_{kind}", (place * width, (place + 1) * width)
        for kind in ("weight", "bias"):
            sources[f"{prefix}out_proj.{kind}"] = f"{prefix}out_proj.{kind}", None
    return sources


def _check_every_node(module: fx.GraphModule, registered: set[str], rows: Tensor) -> dict[fx.Node, Any]:
    """Return what is known of every node; raise if one is not known to keep rows apart."""
    known: dict[fx.Node, Any] = {}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    tensors = dict(_tensors(module))
    if len(inputs) != 1:
        raise NoProofError(f"the forward has {len(inputs)} inputs")
    for node in module.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        if node.op == "placeholder":
            known[node] = Rows(rows[:SMALL], rows[:LARGE], dim=0)
        elif node.op == "get_attr":
            if node.target not in registered:
                raise NoProofError(f"{node.target!r} is neither a parameter nor a buffer")
            known[node] = Fixed(tensors[node.target].detach())
        elif node.op == "call_module":
            known[node] = after_layer(module.get_submodule(node.target), args, kwargs)
        elif node.op in ("call_function", "call_method"):
            known[node] = after_operation(node, args, kwargs)
        else:
            known[node] = args[0]
    return known


def _output(known: dict[fx.Node, Any]) -> Rows:
    output = next(value for node, value in known.items() if node.op == "output")
    if not isinstance(output, Rows) or output.dim != 0:
        raise NoProofError("the output is not a tensor of rows")
    return output
