"""One step of DP-CERT training (Algorithm 2 of the paper), a call a line."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from ..gradients.engine import Clip, ClippedSum, Engine, FirstOnly, empty_sum, trainable
from ..isolation import dissimilar_rows
from ..methods import VIEWS, Method, Views
from ..privacy.mechanism import Mechanism
from ..rng import POSITIONS_PER_BLOCK, Purpose, normal_at_positions
from ..workers import parallel_map


class StopAskedError(Exception):
    """Raised between two parts of a step that is to be given up; weights and optimiser are as they were before it."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class StepContext:
    """What stays the same in every step. Each engine works on parts of its own, in a thread of its own."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    method: Method
    clip: Clip
    engines: tuple[Engine, ...]
    mechanism: Mechanism
    optimizer: torch.optim.Optimizer
    physical_batch: int
    small_parts: bool = False  # whether `small_parts_change_no_bit` was seen to hold
    stop_asked: Callable[[], bool] = _never


@dataclass(frozen=True)
class Part:
    """Positions start..stop of a batch, computed as `size` examples: the rest is padding."""

    start: int
    stop: int
    size: int


def private_step(context: StepContext, step: int) -> Tensor:
    """Sample, make views, take and clip per-example gradients, sum, add noise, divide by B, descend.

    A function of (weights, optimiser state, data, key, step). `physical_batch`, the most rows (examples x views) in
    memory at once, changes the result by rounding only. Returns the noised mean gradient.
    """
    batch = torch.from_numpy(context.mechanism.sample(len(context.images), step))
    clipped = clipped_sum(context, batch, step, context.physical_batch)
    gradient = context.mechanism.release(clipped, step)
    _descend(context, gradient)
    return gradient


def clipped_sum(context: StepContext, batch: Tensor, step: int, rows: int) -> ClippedSum:
    """The clipped sum over the whole batch, `rows` rows at a time; half as many where they do not fit in memory."""

    def work(engine: Engine, part: Part) -> ClippedSum:
        return _clipped_sum_of(context, engine, batch[part.start : part.stop], part, step)

    total = empty_sum(context.model, context.clip)
    try:
        for clipped in parallel_map(context.engines, work, _parts(len(batch), _part_sizes(context, rows))):
            total = total + clipped
            if context.stop_asked():  # a large batch may take longer than the one who asked will wait
                raise StopAskedError
    except RuntimeError as error:
        if not _is_about_memory(error) or rows < 2 * context.method.views.count:
            raise
        return clipped_sum(context, batch, step, rows // 2)
    return total


def _clipped_sum_of(context: StepContext, engine: Engine, indices: Tensor, part: Part, step: int) -> ClippedSum:
    """The clipped sum of one part, padded to the part's size with examples that count for nothing."""
    device = next(context.model.parameters()).device
    missing = part.size - len(indices)
    x, labels = (
        F.pad(values[indices].to(device), (0, 0) * (values.ndim - 1) + (0, missing))
        for values in (context.images, context.labels)
    )
    views_of = context.method.views_at(step * context.mechanism.plan.sampling_probability)
    shape, key = (views_of.copies, *x.shape[1:]), context.mechanism.key
    noise = normal_at_positions(key, Purpose.VIEWS, part.start, part.start + part.size, shape, device, step)
    views = views_of_each(views_of, context.model, x, labels, noise)
    clipped = engine(context.model, context.method.loss, views, labels, FirstOnly(context.clip, len(indices)))
    return ClippedSum(clipped.value, clipped.sensitivity, clipped.norms[: len(indices)])


def views_of_each(views: Views, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
    """The views of every example; views of the user's own see one example at a time, so they cannot mix them."""
    if type(views) in VIEWS.values():
        return views(model, x, labels, noise)
    rows = zip(x.split(1), labels.split(1), noise.split(1), strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([views(model, *row) for row in rows])


def _part_sizes(context: StepContext, rows: int) -> tuple[int, int]:
    """(large, small): the sizes of all parts of all steps, from public numbers only.

    A kernel may add in another order for another number of rows. If a part had as many rows as there happen to be
    records, one record more or less could move the others' gradients by a rounding error each. With fixed sizes it cannot.
    """
    workers, expected = len(context.engines), context.mechanism.plan.batch_size
    most = max(1, rows // context.method.views.count)
    each = expected / (workers * -(-expected // (most * workers)))
    if most < POSITIONS_PER_BLOCK:
        return most, most
    if context.small_parts:
        large = _whole_blocks(each, most)
        return large, _whole_blocks(large / 4, most)
    headroom = 2 * math.sqrt(expected) / workers  # so that hardly a batch needs one part more
    large = _whole_blocks(min(each + headroom + POSITIONS_PER_BLOCK, expected + headroom), most)
    return large, large


def _whole_blocks(size: float, most: int) -> int:
    """Whole blocks of view noise, at least one: no block is drawn twice."""
    return max(1, int(min(size, most)) // POSITIONS_PER_BLOCK) * POSITIONS_PER_BLOCK


def _parts(total: int, sizes: tuple[int, int]) -> list[Part]:
    """Positions 0..total in large parts as long as they are full, then in small ones."""
    large, small = sizes
    parts, start = [], 0
    while start < total:
        size = large if total - start >= large else small
        parts.append(Part(start, min(start + size, total), size))
        start += size
    return parts


def small_parts_change_no_bit(context: StepContext) -> bool:
    """Whether an example's gradient is the same to the bit in a small part as in a large one, seen on this machine.

    Compared by the float64 norms of made-up examples, in the threads that take the steps.
    """
    large, small = _part_sizes(replace(context, small_parts=True), context.physical_batch)
    device = next(context.model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    views = torch.rand((large, context.method.views.count, *context.images.shape[1:]), generator=generator).to(device)
    labels = torch.zeros(large, dtype=torch.long, device=device)

    def norms(engine: Engine, part: Part) -> Tensor:
        padded = torch.zeros((part.size, *views.shape[1:]), device=device)
        padded[: part.stop - part.start] = views[part.start : part.stop]
        clipped = engine(context.model, context.method.loss, padded, labels[: part.size], context.clip)
        return clipped.norms[: part.stop - part.start]

    if large == small:
        return True
    try:
        whole, *_ = parallel_map(context.engines, norms, [Part(0, large, large)])
        in_small = list(parallel_map(context.engines, norms, _parts(large, (large + 1, small))))
    except RuntimeError as error:
        if _is_about_memory(error):  # the steps will find what fits
            return False
        raise
    return torch.equal(whole, torch.cat(in_small))


def _is_about_memory(error: RuntimeError) -> bool:
    return "memory" in str(error).lower()


def check_views(views: Views, model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse views that mix examples: change one of several unlike rows, and no other row's views may move by a bit."""
    device = next(model.parameters()).device
    x = dissimilar_rows(input_shape).to(device)
    noise = torch.randn((len(x), views.copies, *input_shape), generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.zeros(len(x), dtype=torch.long, device=device)
    before = views(model, x, labels, noise)
    alike = before.shape[:2] == (len(x), views.count)
    for place in (0, len(x) - 1):  # the last one holds the largest number
        other, others = x.clone(), torch.arange(len(x)) != place
        other[place] = 1.0 - other[place]
        alike = alike and torch.equal(before[others], views(model, other, labels, noise)[others])
    if not alike:
        raise ModelError(
            f"the views {type(views).__name__} mix examples or give another number of views than they state; "
            "make the views of a row from that row alone"
        )


def _descend(context: StepContext, gradient: Tensor) -> None:
    parameters = trainable(context.model).values()
    for parameter, part in zip(parameters, torch.split(gradient, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
    context.optimizer.step()
    context.optimizer.zero_grad(set_to_none=True)
