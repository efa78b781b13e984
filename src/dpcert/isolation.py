"""Row isolation: which models provably process every row independently, and how to call the others so that they must.

Sensitivity is about ONE example, and a certificate is about ONE noisy input. Both are wrong if a model mixes the rows of a
batch. A chain of known layers provably does not (`keeps_rows_apart`), so it may run on a whole batch. Any other forward is
unknown code: it only runs on one unit at a time, under ``torch.func.vmap`` (or in a loop), where the other rows do not exist.
In addition, `refuse_mixing` tests for mixing, to refuse such a model with a clear message.

Guarantee: what `each_row_alone` returns for a row is a function of that row and the weights.
Assumes: the forward stores nothing about its inputs (in a list or a global); `refuse_mixing` tests for that too.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from .errors import ModelError
from .known_layers import altered, dimensions_after, hooks_on_every_module
from .row_proof import prove

Forward = Callable[[Tensor], Tensor]


def keeps_rows_apart(model: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Return whether the model is a chain of known layers that cannot mix rows: a proof, not a test."""
    dimensions: int | None = 1 + len(input_shape)
    if hooks_on_every_module():
        return False
    for layer in _chain(model):
        dimensions = None if layer is None or dimensions is None or altered(layer) else dimensions_after(layer, dimensions)
    return dimensions is not None


def _chain(model: nn.Module) -> Iterator[nn.Module | None]:
    """Yield the layers of nested ``nn.Sequential``, in order; None for an altered container."""
    if type(model) is not nn.Sequential:
        yield model
        return
    if altered(model):
        yield None
    for child in model:
        yield from _chain(child)


def each_row_alone(model: nn.Module, input_shape: tuple[int, ...]) -> Forward:
    """Return the model as a function of rows ``[n, *input_shape]`` in which no row can see another.

    A custom forward with a proof is returned as its trace, which has a copy of the weights as they are now.
    """
    if keeps_rows_apart(model, input_shape):
        return model
    proven = prove(model, input_shape)
    return one_at_a_time(model) if proven is None else proven.module


def mapped_over_rows(forward: Forward) -> Forward:
    """Map ``forward`` over the rows, each as a batch of one: no other row exists where it runs."""

    def of_one(row: Tensor) -> Tensor:
        output = forward(row.unsqueeze(0))
        if len(output) != 1:
            raise ValueError(f"the model returns {len(output)} rows for one")
        return output.squeeze(0)

    return vmap(of_one)


def one_at_a_time(forward: Forward) -> Forward:
    """Like `mapped_over_rows`, with a loop over the rows if the forward cannot be mapped."""
    mapped, can_be_mapped = mapped_over_rows(forward), True

    def run(rows: Tensor) -> Tensor:
        nonlocal can_be_mapped
        if can_be_mapped:
            try:
                return mapped(rows)
            except (RuntimeError, NotImplementedError):  # `.item()`, a branch on values, an operation without a batching rule
                can_be_mapped = False
        return torch.cat([forward(row) for row in rows.split(1)])  # type: ignore[no-untyped-call]

    return run


_DOUBLE_TOLERANCE, _SINGLE_TOLERANCE = 1e-9, 1e-4  # relative to the largest value; rounding is far below
_Outputs = list[tuple[str, Tensor]]


def dissimilar_rows(input_shape: tuple[int, ...]) -> Tensor:
    """Return rows that differ in scale, sign, spread and maximum, and two equal ones, so that mixing shows in some of them."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand((3, *input_shape), generator=generator)
    normal = torch.randn((3, *input_shape), generator=generator)
    spike = torch.zeros(input_shape)
    spike.view(-1)[0] = 100.0
    rows = [uniform[0], torch.zeros(input_shape), torch.ones(input_shape), uniform[1], 10.0 * normal[0], uniform[0]]
    return torch.stack([*rows, uniform[1] + 0.5 * normal[1], -uniform[2], 1e-3 * normal[2], spike])


def refuse_mixing(model: nn.Module, input_shape: tuple[int, ...], *, voting: bool = False) -> None:
    """Raise `ModelError` if a test shows that the model's output for a row depends on other rows or on earlier calls.

    The model is tested as it will run: with gradients for training, without for `voting`. A model that draws random numbers
    cannot be tested; it may vote, but not be trained.
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
            raise ModelError("the model gives different outputs for the same input: it remembers earlier calls; freeze it")
        if not voting:
            raise ModelError(
                "the model draws random numbers in its forward pass, which a resumed run cannot reproduce; remove them"
            )
        return
    layer = find_mixing(probed, rows, tolerance)
    if layer is not None:
        raise ModelError(
            f"layer {layer!r} mixes examples: its output for one row depends on the other rows or on earlier calls; "
            "use a layer that processes each row independently"
        )


def _in_double(model: nn.Module, rows: Tensor) -> tuple[nn.Module, float]:
    """Return a float64 copy if the model works in float64 (with less rounding to hide mixing), and the tolerance for it."""
    try:
        wide = copy.deepcopy(model).double()
        with torch.no_grad():
            wide(rows[:1].double())
    except Exception:  # float32 hard-coded in the forward, or a device without float64
        return model, _SINGLE_TOLERANCE
    return wide, _DOUBLE_TOLERANCE


def find_mixing(model: nn.Module, rows: Tensor, tolerance: float) -> str | None:
    """Return the first layer whose output for a row depends on other rows or on earlier calls; None if there is none.

    Compares the outputs for each single row with those in batches of several sizes and orders.
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
    again = _outputs(model, rows[:1])  # after all the others: a model with state gives another output
    return next((name for (name, a), (_, b) in zip(alone[0], again, strict=False) if not _equal(a, b, 0.0)), None)


def _all_equal(first: _Outputs, second: _Outputs) -> bool:
    return len(first) == len(second) and all(_equal(a, b, 0.0) for (_, a), (_, b) in zip(first, second, strict=True))


def _same_row(single: Tensor, joint: Tensor, place: int, size: int, tolerance: float) -> bool:
    """Return whether row `place` of a batch's output equals the output of the single row; outputs without rows are skipped."""
    if single.ndim == 0 or joint.ndim == 0 or len(joint) != size * len(single):
        return single.shape != joint.shape or _equal(single, joint, tolerance)
    row = joint[place * len(single) : (place + 1) * len(single)]
    return row.shape == single.shape and _equal(single, row, tolerance)


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    gap = tolerance * (1.0 + a.abs().nan_to_num(0.0).max()) if a.numel() else torch.tensor(0.0)
    return a.shape == b.shape and bool((((a - b).abs() <= gap) | (a == b) | (a.isnan() & b.isnan())).all())


def _outputs(model: nn.Module, rows: Tensor, seed: int | None = None) -> _Outputs:
    """Return the tensors that the layers output, in the order of their calls; the model's output comes last."""
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
