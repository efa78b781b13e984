"""One row at a time: which models provably treat every row alone, and how the others are called so that they must.

Sensitivity counts what ONE example does, and a certificate is about ONE noisy input. Both are wrong if a model lets the rows of
a batch see each other. A chain of known layers provably does not (`keeps_rows_apart`), so it may run on a whole batch. Any
other forward is code we cannot read: it only ever runs on one unit at a time, under ``torch.func.vmap`` (or in a loop),
where the other rows do not exist. `refuse_mixing` looks for mixing as well, to refuse such a model with a clear message.

Guarantee: what `each_row_alone` returns for a row is a function of that row and the weights.
Assumes: the forward keeps nothing of what it has seen (a list, a global); `refuse_mixing` looks for that too.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules import module as _hooks_of_all_modules

from .errors import ModelError

Forward = Callable[[Tensor], Tensor]

_ELEMENTWISE = {
    nn.Identity,
    nn.Tanh,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid,
}
_ON_IMAGES = {  # with an input of four dimensions the first one is the batch; with three it would be the channels
    nn.Conv2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.BatchNorm2d,
    nn.ZeroPad2d,
}
_INACTIVE_IN_EVALUATION = {nn.Dropout, nn.Dropout1d, nn.Dropout2d}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def keeps_rows_apart(model: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether the model is a chain of known layers that cannot mix rows: a proof, not a test."""
    dimensions: int | None = 1 + len(input_shape)
    if any(getattr(_hooks_of_all_modules, f"_global{kind}") for kind in _HOOKS):
        return False
    for layer in _chain(model):
        dimensions = None if layer is None or dimensions is None or _altered(layer) else _dimensions_after(layer, dimensions)
    return dimensions is not None


def _chain(model: nn.Module) -> Iterator[nn.Module | None]:
    """The layers of nested ``nn.Sequential``, in order; None for one whose forward is not known."""
    if type(model) is not nn.Sequential:
        yield model
        return
    if _altered(model):
        yield None
    for child in model:
        yield from _chain(child)


def _altered(layer: nn.Module) -> bool:
    """Whether an instance does something else than its class: hooks, a replaced method, an odd kind of parameter."""
    replaced = any(callable(getattr(type(layer), name, None)) for name in vars(layer))  # forward, or what it calls
    plain = all(type(parameter) is nn.Parameter for parameter in layer.parameters(recurse=False))
    return replaced or not plain or any(getattr(layer, kind) for kind in _HOOKS)


def _dimensions_after(layer: Any, dimensions: int) -> int | None:
    """The dimensions of the output of a layer that treats rows alone; None where that is not known."""
    kind = type(layer)
    if kind in _ELEMENTWISE or (kind in _INACTIVE_IN_EVALUATION and not layer.training):
        return dimensions
    if kind in _ON_IMAGES:
        frozen = kind is not nn.BatchNorm2d or (not layer.training and layer.running_mean is not None)
        return 4 if dimensions == 4 and frozen else None
    if kind is nn.Linear:
        bias = None if layer.bias is None else layer.bias.shape  # a bias with a row for each position would tell them apart
        plain = layer.weight.shape == (layer.out_features, layer.in_features) and bias in (None, (layer.out_features,))
        return dimensions if dimensions >= 2 and plain else None
    if kind is nn.Flatten:
        last = layer.end_dim % dimensions
        return dimensions - (last - layer.start_dim) if 1 <= layer.start_dim <= last else None
    if kind is nn.GroupNorm:
        return dimensions if dimensions >= 2 else None
    if kind is nn.LayerNorm:
        return dimensions if len(layer.normalized_shape) < dimensions else None
    return None


def each_row_alone(model: nn.Module, input_shape: tuple[int, ...]) -> Forward:
    """The model as a function of rows ``[n, *input_shape]`` in which no row can see another."""
    if keeps_rows_apart(model, input_shape):
        return model
    return one_at_a_time(model)


def mapped_over_rows(forward: Forward) -> Forward:
    """``forward`` of a batch of one row, for every row: the others do not exist where it runs."""

    def of_one(row: Tensor) -> Tensor:
        output = forward(row.unsqueeze(0))
        if len(output) != 1:
            raise ValueError(f"the model makes {len(output)} rows of one")
        return output.squeeze(0)

    return vmap(of_one)


def one_at_a_time(forward: Forward) -> Forward:
    """`mapped_over_rows`, or a loop over the rows where the forward cannot be mapped."""
    mapped, can_be_mapped = mapped_over_rows(forward), True

    def run(rows: Tensor) -> Tensor:
        nonlocal can_be_mapped
        if can_be_mapped:
            try:
                return mapped(rows)
            except (RuntimeError, NotImplementedError):  # `.item()`, a branch on values, an operation without a rule
                can_be_mapped = False
        return torch.cat([forward(row) for row in rows.split(1)])  # type: ignore[no-untyped-call]

    return run


_DOUBLE_TOLERANCE, _SINGLE_TOLERANCE = 1e-9, 1e-4  # of the largest number; rounding is far below
_Outputs = list[tuple[str, Tensor]]


def dissimilar_rows(input_shape: tuple[int, ...]) -> Tensor:
    """Rows that differ in size, sign, spread and maximum, two of them equal: what mixes shows in some of them."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand((3, *input_shape), generator=generator)
    normal = torch.randn((3, *input_shape), generator=generator)
    spike = torch.zeros(input_shape)
    spike.view(-1)[0] = 100.0
    rows = [uniform[0], torch.zeros(input_shape), torch.ones(input_shape), uniform[1], 10.0 * normal[0], uniform[0]]
    return torch.stack([*rows, uniform[1] + 0.5 * normal[1], -uniform[2], 1e-3 * normal[2], spike])


def refuse_mixing(model: nn.Module, input_shape: tuple[int, ...], *, voting: bool = False) -> None:
    """Raise `ModelError` where the model's output for a row is seen to depend on other rows or on earlier calls.

    It is probed as it will run: in training with gradients, when `voting` without. A model that draws random numbers cannot
    be probed; it may vote, but not be trained.
    """
    with torch.set_grad_enabled(not voting):
        _refuse_mixing(model, input_shape, voting)


def _refuse_mixing(model: nn.Module, input_shape: tuple[int, ...], voting: bool) -> None:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rows = dissimilar_rows(input_shape).to(device)
    probed, tolerance = _in_double(model, rows)
    if probed is not model:
        rows = rows.double()
    first = _outputs(probed, rows[:1])
    if not _all_equal(first, _outputs(probed, rows[:1])):
        if not _all_equal(_outputs(probed, rows[:1], seed=0), _outputs(probed, rows[:1], seed=0)):
            raise ModelError("the model gives another output when it sees the same input again, so it remembers; freeze it")
        if not voting:
            raise ModelError(
                "the model draws random numbers in its forward pass, which a resumed run cannot draw again; remove them"
            )
        return
    layer = find_mixing(probed, rows, tolerance)
    if layer is not None:
        raise ModelError(
            f"layer {layer!r} mixes examples: its output for one row depends on the other rows or on earlier calls; "
            "use a layer that treats each row alone"
        )


def _in_double(model: nn.Module, rows: Tensor) -> tuple[nn.Module, float]:
    """A float64 copy where the model works in float64 (rounding then hides nothing), and the tolerance that goes with it."""
    try:
        wide = copy.deepcopy(model).double()
        with torch.no_grad():
            wide(rows[:1].double())
    except Exception:  # float32 written into the forward, or a device without float64
        return model, _SINGLE_TOLERANCE
    return wide, _DOUBLE_TOLERANCE


def find_mixing(model: nn.Module, rows: Tensor, tolerance: float) -> str | None:
    """The first layer whose output for a row depends on the other rows or on earlier calls; None where none was seen.

    Each row's outputs, alone, are compared with those in batches of several sizes and orders.
    """
    alone = [_outputs(model, rows[i : i + 1]) for i in range(len(rows))]
    everything = list(range(len(rows)))
    batches = [everything, everything[::-1], everything[::2], everything[1::3], [4, 0], [9, 1], [1, 9, 0], [0, 0, 0, 2, 6]]
    for batch in batches:
        together = _outputs(model, rows[batch])
        for place, row in enumerate(batch):
            for (name, single), (_, joint) in zip(alone[row], together, strict=False):
                if not _same_row(single, joint, place, len(batch), tolerance):
                    return name
    again = _outputs(model, rows[:1])  # after all the others: a model that remembers them answers otherwise
    return next((name for (name, a), (_, b) in zip(alone[0], again, strict=False) if not _equal(a, b, 0.0)), None)


def _all_equal(first: _Outputs, second: _Outputs) -> bool:
    return len(first) == len(second) and all(_equal(a, b, 0.0) for (_, a), (_, b) in zip(first, second, strict=True))


def _same_row(single: Tensor, joint: Tensor, place: int, size: int, tolerance: float) -> bool:
    """Whether row `place` of a batch's output is what the row gives alone; outputs without rows of their own are skipped."""
    if single.ndim == 0 or joint.ndim == 0 or len(joint) != size * len(single):
        return single.shape != joint.shape or _equal(single, joint, tolerance)
    own = joint[place * len(single) : (place + 1) * len(single)]
    return own.shape == single.shape and _equal(single, own, tolerance)


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    gap = tolerance * (1.0 + a.abs().nan_to_num(0.0).max()) if a.numel() else torch.tensor(0.0)
    return a.shape == b.shape and bool((((a - b).abs() <= gap) | (a == b) | (a.isnan() & b.isnan())).all())


def _outputs(model: nn.Module, rows: Tensor, seed: int | None = None) -> _Outputs:
    """The tensors that the layers give, in the order of their calls; the model's own come last."""
    seen: _Outputs = []

    def remember(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda layer, inputs, output: (
            seen.append((name, output.detach().clone())) if isinstance(output, Tensor) else None
        )

    handles = [layer.register_forward_hook(remember(name or "the model")) for name, layer in model.named_modules()]
    try:
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            model(rows)
    finally:
        for handle in handles:
            handle.remove()
    return seen
