"""The operations that keep rows apart: for each, where the batch is in its result. Used by `row_proof`.

A rule gets what is known of the arguments: `Rows`, `Fixed` or `BatchSize`. It raises `NoProofError` where the operation might
let one row see another. Results are computed for two batches, the larger of which starts with the rows of the smaller: the
shapes tell which dimension is the batch, and equal values are a second check of the rule.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .known_layers import ELEMENTWISE, dimensions_after
from .operator_norm import norm_gradient
from .tied import tied_residual

SMALL, LARGE = 2, 3  # two batch sizes: a dimension that is 2 for one and 3 for the other is the batch
_AGREEMENT = 1e-4  # of the largest value: rounding differs between batch sizes


class NoProofError(Exception):
    """The model is not proven; the message says why."""


@dataclass(frozen=True)
class Rows:
    """A tensor with one slice per row along `dim`, at both batch sizes."""

    small: Tensor
    large: Tensor
    dim: int

    @property
    def from_right(self) -> int:
        """The place of the batch counted from the last dimension, which is 1: broadcasting aligns tensors there."""
        return self.small.ndim - self.dim


@dataclass(frozen=True)
class Fixed:
    """A value that depends on no row: a parameter, a buffer, or a number."""

    value: Any


@dataclass(frozen=True)
class BatchSize:
    """The number of rows. It may appear in shapes only: as a number it would let a row see how many others there are."""

    small: int = SMALL
    large: int = LARGE


def after_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
    """Return the rows that a layer outputs; raise if it is not known to keep them apart."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Rows) or getattr(layer, "inplace", False):
        raise NoProofError(f"{type(layer).__name__} is called with unusual arguments, or works in place")
    rows, kind, ndim = args[0], type(layer), args[0].small.ndim
    after: int | None
    if kind in ELEMENTWISE:
        after, dim = ndim, rows.dim
    elif kind is nn.Linear:
        after, dim = dimensions_after(layer, ndim) if rows.dim < ndim - 1 else None, rows.dim
    elif kind is nn.LayerNorm:
        after, dim = ndim if rows.dim < ndim - len(layer.normalized_shape) else None, rows.dim
    elif kind is nn.Softmax:
        after, dim = ndim if layer.dim is not None and layer.dim % ndim != rows.dim else None, rows.dim
    elif kind is nn.Conv1d:
        after, dim = 3 if ndim == 3 and rows.dim == 0 else None, 0
    else:
        after, dim = dimensions_after(layer, ndim) if rows.dim == 0 else None, 0
    if after is None:
        raise NoProofError(f"{kind.__name__} is not known to keep rows apart here")
    found = _as_rows(layer(rows.small), layer(rows.large), dim)
    if found.small.ndim != after:
        raise NoProofError(f"{kind.__name__} returns an unexpected shape")
    return found


def _as_rows(small: Any, large: Any, dim: int) -> Rows:
    """Check that `dim` is the batch and that no other dimension depends on it."""
    if type(small) is not Tensor or type(large) is not Tensor or not 0 <= dim < small.ndim == large.ndim:
        raise NoProofError("an operation returns something that is not a tensor of rows")
    sizes = [(a, b) for place, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if place != dim]
    if (small.shape[dim], large.shape[dim]) != (SMALL, LARGE) or any(a != b for a, b in sizes):
        raise NoProofError(f"an operation mixes the batch with other dimensions: {list(small.shape)}, {list(large.shape)}")
    if not close(small, large.narrow(dim, 0, SMALL)):
        raise NoProofError("the values of a row change with the batch")
    return Rows(small, large, dim)


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding."""
    gap = (a.double() - b.double()).abs().nan_to_num(0.0)
    size = b.double().abs().nan_to_num(0.0, posinf=0.0)
    return a.numel() == 0 or bool(gap.max() <= _AGREEMENT * (1e-6 + size.max()))


def after_operation(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Return what is known of the result of a function or method; raise if it might mix rows."""
    target: Any = node.target
    method = node.op == "call_method"
    if target is getattr or target is operator.getitem or (method and target in ("size", "dim")):
        found = _about_shape(target, args)
        if found is not None:
            return found
    rule = _METHODS.get(target) if method else _FUNCTIONS.get(target)
    call: Callable[..., Any] = getattr(torch.Tensor, target) if method and rule is not None else target
    values = [*_flat(args), *_flat(kwargs)]
    if rule is None or (method and not isinstance(args[0], (Rows, Fixed))):
        raise NoProofError(f"{target} is not known to keep rows apart")
    if all(isinstance(value, Fixed) or not isinstance(value, (Rows, BatchSize)) for value in values):
        if rule in (_dropped, _attended):
            raise NoProofError(f"{target} of a constant might draw random numbers")
        return Fixed(call(*_at("small", args), **_at("small", kwargs)))
    dim = rule(*args, **kwargs)
    small, large = (call(*_at(size, args), **_at(size, kwargs)) for size in ("small", "large"))
    if isinstance(small, (tuple, list)):
        return tuple(_as_rows(a, b, dim) for a, b in zip(small, large, strict=True))
    return _as_rows(small, large, dim)


def _about_shape(target: Any, args: tuple[Any, ...]) -> Any:
    """Return the meaning of ``x.shape``, ``x.size()``, ``x.ndim`` and of entries of tuples; None for anything else."""
    subject, index = args[0], args[1] if len(args) > 1 else None
    if isinstance(subject, tuple) and target is operator.getitem:
        if not isinstance(index, (int, slice)):
            raise NoProofError("a tuple is indexed with something that is not a constant")
        return subject[index]
    if target is operator.getitem:
        return None
    tensor = subject.small if isinstance(subject, Rows) else getattr(subject, "value", None)
    if not isinstance(tensor, Tensor):
        raise NoProofError(f"{target} of something that is not a tensor")
    sizes = tuple(
        BatchSize() if isinstance(subject, Rows) and place == subject.dim else Fixed(size)
        for place, size in enumerate(tensor.shape)
    )
    if (target, index) == (getattr, "shape") or (target == "size" and len(args) == 1):
        return sizes
    if target == "size" and len(args) == 2:
        return sizes[_integer(index)]
    if (target, index) == (getattr, "ndim") or target == "dim":
        return Fixed(tensor.ndim)
    if (target, index) == (getattr, "dtype"):
        return Fixed(tensor.dtype)
    raise NoProofError(f"attribute {index!r} is not known to keep rows apart")


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from _flat(entry)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    elif isinstance(value, slice):
        yield from _flat([value.start, value.stop, value.step])
    else:
        yield value


def _at(size: str, value: Any) -> Any:
    """Return arguments with every known value replaced by what it is at one batch size."""
    if isinstance(value, (tuple, list)):
        return type(value)(_at(size, entry) for entry in value)
    if isinstance(value, dict):
        return {name: _at(size, entry) for name, entry in value.items()}
    if isinstance(value, slice):
        return slice(_at(size, value.start), _at(size, value.stop), _at(size, value.step))
    if isinstance(value, Fixed):
        return value.value
    return getattr(value, size) if isinstance(value, (Rows, BatchSize)) else value


def _integer(value: Any) -> int:
    number = value.value if isinstance(value, Fixed) else value
    if type(number) is not int:
        raise NoProofError(f"{value!r} is not a constant integer")
    return number


def _rows(value: Any) -> Rows:
    if not isinstance(value, Rows):
        raise NoProofError("the operation expects rows")
    return value


def _constant(*values: Any) -> None:
    """Refuse arguments that depend on rows or on their number."""
    if any(isinstance(value, (Rows, BatchSize)) for value in _flat(list(values))):
        raise NoProofError("an argument that must be a constant depends on the batch")


def _dims(values: Any, ndim: int) -> list[int]:
    entries = list(values) if isinstance(values, (tuple, list)) else [values]
    return [_integer(entry) % ndim for entry in entries]


def _not_the_batch(x: Rows, dims: Any) -> list[int]:
    found = _dims(dims, x.small.ndim)
    if not found or x.dim in found:
        raise NoProofError("an operation works along the batch")
    return found


# The rules. Each has the signature of its operation and returns the batch dimension of the result; an argument that the
# signature does not have (out, axis, a mask) is an error, and so no proof.


def _elementwise(*args: Any, **options: Any) -> int:
    """Broadcasting aligns last dimensions, so the batch must be at the same place from the right in every argument."""
    unknown = options.keys() - {"inplace", "approximate", "alpha", "min", "max", "negative_slope", "min_val", "max_val"}
    values = [*_flat(list(args)), *options.values()]
    if unknown or any(value is True or isinstance(value, BatchSize) for value in values):  # True: inplace
        raise NoProofError("an elementwise operation uses the batch size, works in place or has unknown options")
    places = {value.from_right for value in values if isinstance(value, Rows)}
    tensors = [value.value for value in values if isinstance(value, Fixed) and isinstance(value.value, Tensor)]
    if len(places) != 1:
        raise NoProofError("rows are broadcast against other rows")
    ndim = [value.small.ndim for value in values if isinstance(value, Rows)] + [tensor.ndim for tensor in tensors]
    return sorted(ndim)[-1] - places.pop()


def _copied(x: Any, *args: Any, dtype: Any = None, memory_format: Any = None) -> int:
    _constant(*args)
    return _rows(x).dim


def _reduced(x: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> int:
    _constant(keepdim)
    removed = _not_the_batch(_rows(x), dim)
    return _rows(x).dim - (0 if _at("small", keepdim) else sum(place < x.dim for place in removed))


def _along(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> int:
    _not_the_batch(_rows(x), dim)
    return _rows(x).dim


def _reshaped(x: Any, *sizes: Any) -> int:
    """Entries keep their order, so row i stays row i if the batch has as many entries before it as it had."""
    rows = _rows(x)
    small, large = (getattr(rows, size).reshape(*_at(size, sizes)).shape for size in ("small", "large"))
    return _place_after_reshape(rows, small, large)


def _place_after_reshape(rows: Rows, small: Sequence[int], large: Sequence[int]) -> int:
    before = torch.Size(rows.small.shape[: rows.dim]).numel()
    for place, sizes in enumerate(zip(small, large, strict=True)):
        if sizes == (SMALL, LARGE) and torch.Size(small[:place]).numel() == before:
            return place
    raise NoProofError("rows are folded into another dimension")


def _flattened(x: Any, start_dim: Any = 0, end_dim: Any = -1) -> int:
    rows, first, last = _rows(x), _integer(start_dim), _integer(end_dim)
    return _place_after_reshape(rows, *(part.flatten(first, last).shape for part in (rows.small, rows.large)))


def _unflattened(x: Any, dim: Any, sizes: Any) -> int:
    rows = _rows(x)
    _not_the_batch(rows, dim)
    shapes = (torch.unflatten(part, _integer(dim), _at("small", sizes)).shape for part in (rows.small, rows.large))
    return _place_after_reshape(rows, *shapes)


def _squeezed(x: Any, dim: Any) -> int:
    removed = _not_the_batch(_rows(x), dim)  # without `dim`, or along the batch, it would depend on the number of rows
    return int(x.dim - sum(place < x.dim and x.small.shape[place] == 1 for place in removed))


def _unsqueezed(x: Any, dim: Any) -> int:
    rows = _rows(x)
    return rows.dim + int(_integer(dim) % (rows.small.ndim + 1) <= rows.dim)


def _permuted(x: Any, *dims: Any) -> int:
    rows = _rows(x)
    order = _dims(dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims, rows.small.ndim)
    return order.index(rows.dim)


def _transposed(x: Any, dim0: Any, dim1: Any) -> int:
    rows = _rows(x)
    first, second = _dims((dim0, dim1), rows.small.ndim)
    return {first: second, second: first}.get(rows.dim, rows.dim)


def _joined(tensors: Any, dim: Any = 0) -> int:
    dims = {_rows(x).dim for x in tensors}
    _not_the_batch(tensors[0], dim)
    if len(dims) != 1:
        raise NoProofError("tensors with different batch dimensions are joined")
    return dims.pop()


def _stacked(tensors: Any, dim: Any = 0) -> int:
    dims = {_unsqueezed(x, dim) for x in tensors}
    if len(dims) != 1:
        raise NoProofError("tensors with different batch dimensions are stacked")
    return dims.pop()


def _divided(x: Any, pieces: Any, dim: Any = 0) -> int:
    _constant(pieces)
    _not_the_batch(_rows(x), dim)
    return _rows(x).dim


def _unbound(x: Any, dim: Any = 0) -> int:
    return _rows(x).dim - int(_not_the_batch(_rows(x), dim)[0] < x.dim)


def _indexed(x: Any, index: Any) -> int:
    """Integers, slices, None and ``...``; the batch must be taken whole."""
    rows, entries = _rows(x), list(index) if isinstance(index, tuple) else [index]
    _constant(entries)
    entries = [entry.value if isinstance(entry, Fixed) else entry for entry in entries]
    if not all(entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in entries):
        raise NoProofError("rows are indexed with something that is not an integer or a slice")
    taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
    where = next((place for place, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[where : where + 1] = [slice(None)] * (rows.small.ndim - taken)
    source = place = 0
    for entry in entries:
        if source == rows.dim and entry is not None:
            if entry != slice(None):
                raise NoProofError("some rows are taken out of the batch")
            return place
        source += int(entry is not None)
        place += int(type(entry) is not int)
    raise NoProofError("the batch is not among the dimensions")


def _expanded(x: Any, *sizes: Any) -> int:
    given = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)
    if isinstance(x, Fixed):  # the same values for every row
        places = [place for place, size in enumerate(given) if isinstance(size, BatchSize)]
        if len(places) != 1:
            raise NoProofError("a constant is expanded to more than one batch")
        return places[0]
    place = len(given) - _rows(x).from_right
    if place < 0 or not (isinstance(given[place], BatchSize) or _integer(given[place]) == -1):
        raise NoProofError("rows are expanded along the batch")
    return place


def _repeated(x: Any, *sizes: Any) -> int:
    if not isinstance(x, Fixed):
        raise NoProofError("rows are repeated")
    return _expanded(x, *sizes)


def _multiplied(a: Any, b: Any) -> int:
    """Matrix products: the batch must not be summed over, nor be the columns, nor meet another batch."""
    left, right = (value.small if isinstance(value, Rows) else value.value for value in (a, b))
    if min(left.ndim, right.ndim) < 2:
        raise NoProofError("a product with a vector")
    places = {value.from_right for value in (a, b) if isinstance(value, Rows)}
    allowed = 2 if isinstance(b, Fixed) else 3
    if len(places) != 1 or min(places) < allowed:
        raise NoProofError("a matrix product sums over rows")
    return max(left.ndim, right.ndim) - int(places.pop())


def _attended(query: Any, key: Any, value: Any, *, dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None) -> int:
    _constant(scale)
    places = {_rows(x).from_right for x in (query, key, value)}
    if len(places) != 1 or min(places) < 3 or dropout_p != 0.0:
        raise NoProofError("attention over the batch, or with dropout")
    return cast(int, query.dim)


def _on_images(x: Any, *args: Any, **kwargs: Any) -> int:
    """Pooling, convolution with fixed weights, and resizing of ``[rows, channels, height, width]``."""
    _constant(args, kwargs)
    if _rows(x).dim != 0 or x.small.ndim != 4 or any(kwargs.get(name) for name in ("out", "return_indices")):
        raise NoProofError("an operation on images gets something else")
    return 0


def _projected(x: Any, weight: Any, bias: Any = None) -> int:
    _constant(weight, bias)
    if _rows(x).from_right < 2 or weight.value.ndim != 2 or (isinstance(bias, Fixed) and bias.value.ndim != 1):
        raise NoProofError("a linear map of the batch")
    return cast(int, x.dim)


def _layer_normed(x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> int:
    _constant(normalized_shape, weight, bias)
    if _rows(x).from_right <= len(normalized_shape):
        raise NoProofError("the batch is normalized over")
    return cast(int, x.dim)


def _padded(x: Any, pad: Any, mode: str = "constant", value: Any = None) -> int:
    _constant(pad, value)
    if _rows(x).from_right <= len(pad) // 2 or (mode != "constant" and (x.dim, x.small.ndim) != (0, 4)):
        raise NoProofError("the batch is padded")
    return cast(int, x.dim)


def _of_weights(*args: Any) -> int:
    raise NoProofError("the norm of a weight that depends on rows")


def _tied(x: Any, hidden: Any, weight: Any, divisor: Any, stride: Any, padding: Any) -> int:
    _constant(weight, stride, padding)
    if any(_rows(value).dim != 0 or value.small.ndim != 4 for value in (x, hidden, divisor)):
        raise NoProofError("a reconstruction of something that is not images")
    return 0


def _dropped(x: Any, p: float = 0.5, training: Any = True, inplace: Any = False) -> int:
    if training is not False or inplace is not False:
        raise NoProofError("dropout is active")
    return _rows(x).dim


Rule = Callable[..., int]
_ELEMENTWISE = """
    relu relu6 gelu silu mish tanh sigmoid elu selu celu leaky_relu softplus hardswish hardsigmoid hardtanh
    exp log log1p sqrt rsqrt abs square erf add sub mul div neg pow clamp maximum minimum where
"""
_BY_NAME: dict[str, Rule] = {  # a function of `torch` or `torch.nn.functional`, and a method of tensors if there is one
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(["mean", "sum", "amax", "amin", "logsumexp"], _reduced),
    **dict.fromkeys(["softmax", "log_softmax"], _along),
    **dict.fromkeys(["conv2d", "avg_pool2d", "adaptive_avg_pool2d", "max_pool2d", "interpolate"], _on_images),
    **dict.fromkeys(["chunk", "split"], _divided),
    **{"reshape": _reshaped, "flatten": _flattened, "unflatten": _unflattened, "squeeze": _squeezed, "unsqueeze": _unsqueezed},
    **{"permute": _permuted, "transpose": _transposed, "cat": _joined, "stack": _stacked, "unbind": _unbound},
    **{"matmul": _multiplied, "bmm": _multiplied, "layer_norm": _layer_normed, "linear": _projected, "pad": _padded},
    **{"scaled_dot_product_attention": _attended, "dropout": _dropped},
}
_METHODS: dict[str, Rule] = {
    **{name: rule for name, rule in _BY_NAME.items() if hasattr(Tensor, name)},
    **dict.fromkeys(["contiguous", "clone", "float", "double", "to"], _copied),
    **{"expand": _expanded, "repeat": _repeated},
}
_FUNCTIONS: dict[Any, Rule] = {
    **{getattr(space, name): rule for space in (torch, F) for name, rule in _BY_NAME.items() if hasattr(space, name)},
    **dict.fromkeys([operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow], _elementwise),
    **dict.fromkeys([operator.floordiv, operator.mod], _elementwise),
    **{operator.matmul: _multiplied, operator.getitem: _indexed, norm_gradient: _of_weights},
    tied_residual: _tied,
}


def is_elementwise(node: fx.Node) -> bool:
    """Return whether the node combines its arguments entry by entry, with broadcasting."""
    rules: dict[Any, Rule] = _METHODS if node.op == "call_method" else _FUNCTIONS
    return node.op in ("call_method", "call_function") and rules.get(node.target) is _elementwise


def has_no_derivative(node: fx.Node) -> bool:
    """Return whether the result of the node is a constant for differentiation, although it depends on parameters."""
    return node.target in (norm_gradient, tied_residual)
