"""One step of DP-CERT training (Algorithm 2 of the paper), one call per line."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from ..gradients.engine import Clip, ClippedSum, Engine, FirstOnly, empty_sum, trainable
from ..isolation import dissimilar_rows
from ..methods import VIEWS, Method, Views, noise_shape, view_shape
from ..privacy import noise as dp_noise
from ..privacy.clipping import BatchMean
from ..privacy.mechanism import Mechanism
from ..rng import POSITIONS_PER_BLOCK, Purpose, normal_at_positions
from ..scale.world import ALONE, World
from ..workers import parallel_map


class StopAskedError(Exception):
    """Raised between two parts of a step to abandon it; weights and optimizer are as before the step."""


def never() -> bool:
    """Return False: nothing asks to stop."""
    return False


@dataclass(frozen=True)
class StepContext:
    """What stays the same in every step. Each engine works on separate parts, in its own thread.

    With `stored_views`, a row of `images` has the views of a record, made before the first step (`features`); this rank has
    them from record `first_stored` on, and works on these records. `workers` counts the engines of all ranks.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    method: Method
    clip: Clip
    engines: tuple[Engine, ...]
    mechanism: Mechanism
    optimizer: torch.optim.Optimizer
    physical_batch: int
    small_parts: bool = False  # the result of `small_parts_change_no_bit`
    stop_asked: Callable[[], bool] = never
    stored_views: bool = False
    phase: int = -1
    world: World = ALONE
    workers: int | None = None
    first_stored: int = 0
    network: nn.Module | None = None  # what the engines differentiate, if it has more outputs than the model

    @property
    def differentiated(self) -> nn.Module:
        """What the engines differentiate: it has the parameters of the model."""
        return self.model if self.network is None else self.network

    @property
    def batch_size(self) -> int:
        """B of this phase of the plan."""
        return self.mechanism.plan.every_phase[self.phase].batch_size


@dataclass(frozen=True)
class Part:
    """Positions start..stop of a batch, padded to `size` examples."""

    start: int
    stop: int
    size: int


def private_step(context: StepContext, step: int) -> Tensor:
    """Sample, make views, compute and clip per-example gradients, sum, add noise, divide by B, update the weights.

    A function of (weights, optimizer state, data, key, step). `physical_batch`, the most rows (examples x views) in
    memory at once, and the number of ranks change the result only by rounding. Returns the noised mean gradient.
    All ranks draw the same batch; each sums its share. Rank 0 adds the noise, and all ranks use its result, bit for bit.
    """
    batch = _batch_of(context, step)
    share = _unless_a_rank_stops(context, lambda: clipped_sum(context, batch, step, context.physical_batch))
    clipped = context.world.sum(share)
    gradient = context.world.from_first(lambda: context.mechanism.release(clipped, step), like=clipped.value)
    if isinstance(context.method.clip_rule, BatchMean):
        gradient = _clipped_mean(context, context.method.clip_rule, gradient, step)
    _descend(context, gradient)
    return gradient


def _clipped_mean(context: StepContext, rule: BatchMean, mean: Tensor, step: int) -> Tensor:
    """Return what SecureSGD as published (not private) uses: the mean gradient, clipped as a whole and noised for C / B."""
    parameters = list(trainable(context.model).values())
    parts = torch.split(mean, [parameter.numel() for parameter in parameters])
    shaped = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
    clipped = torch.cat([tensor.flatten() for tensor in rule.of_mean(shaped, context.clip.norm)])
    charged = ClippedSum(clipped, context.clip.norm / context.batch_size, clipped[:0])  # far less than one record moves it
    return dp_noise.add(charged, rule.noise, context.mechanism.key, step)


def _unless_a_rank_stops(context: StepContext, compute: Callable[[], ClippedSum]) -> ClippedSum:
    """Return what `compute` returns, or raise `StopAskedError` on every rank if one rank abandons the step."""
    share = None
    with contextlib.suppress(StopAskedError):
        share = compute()
    if context.world.any(share is None) or share is None:
        raise StopAskedError
    return share


def clipped_sum(context: StepContext, batch: Tensor, step: int, rows: int) -> ClippedSum:
    """Return the clipped sum over this rank's share of the batch, `rows` rows at a time."""
    return _sum_of_parts(context, batch, _share(context, batch, _part_sizes(context, rows)), step, rows)


def records_of_step(context: StepContext, step: int) -> np.ndarray:
    """Return the records that this rank reads in a step, in increasing order."""
    batch = _batch_of(context, step)
    parts = _share(context, batch, _part_sizes(context, context.physical_batch))
    return torch.cat([batch[:0], *(batch[part.start : part.stop] for part in parts)]).numpy()


def _batch_of(context: StepContext, step: int) -> Tensor:
    """Return the records of a step, in increasing order: the same on every rank."""
    return torch.from_numpy(context.mechanism.sample(len(context.labels), step))


def _share(context: StepContext, batch: Tensor, sizes: tuple[int, int]) -> list[Part]:
    """Return the parts of the batch that this rank works on: every part has one rank. May be empty.

    All ranks compute the same split, from numbers that they agree on.
    """
    if context.stored_views:  # of these records only; `batch` is in increasing order
        stored = torch.tensor([context.first_stored, context.first_stored + len(context.images)])
        first, stop = torch.searchsorted(batch, stored).tolist()
        return _parts(stop, sizes, first)
    loads, own = [0] * context.world.size, []
    for part in _parts(len(batch), sizes):
        rank = loads.index(min(loads))
        loads[rank] += part.size
        own += [part] if rank == context.world.rank else []
    return own


def _sum_of_parts(context: StepContext, batch: Tensor, parts: list[Part], step: int, rows: int) -> ClippedSum:
    """Return the clipped sum over `parts`; splits them to half the `rows` if they do not fit in memory."""

    def work(engine: Engine, part: Part) -> ClippedSum:
        return _clipped_sum_of(context, engine, batch[part.start : part.stop], part, step)

    total = empty_sum(context.model, context.clip)
    try:
        for clipped in parallel_map(context.engines, work, parts):
            total = total + clipped
            if context.stop_asked():  # a large batch may take longer than the user wants to wait
                raise StopAskedError
    except RuntimeError as error:
        if not _is_about_memory(error) or rows < 2 * context.method.views.count:
            raise
        sizes = _part_sizes(context, rows // 2)  # the share stays the same: other ranks may have enough memory
        smaller = [half for part in parts for half in _parts(part.stop, sizes, part.start)]
        return _sum_of_parts(context, batch, smaller, step, rows // 2)
    return total


def _clipped_sum_of(context: StepContext, engine: Engine, indices: Tensor, part: Part, step: int) -> ClippedSum:
    """Return the clipped sum of one part, padded to the part's size with examples that do not count."""
    device = next(context.model.parameters()).device
    missing = part.size - len(indices)
    x, labels = (
        F.pad(values[places].to(device), (0, 0) * (values.ndim - 1) + (0, missing))
        for values, places in ((context.images, indices - context.first_stored), (context.labels, indices))
    )
    views = x if context.stored_views else _views_of_part(context, x, labels, part, step)
    clipped = engine(context.differentiated, context.method.loss, views, labels, FirstOnly(context.clip, len(indices)))
    return ClippedSum(clipped.value, clipped.sensitivity, clipped.norms[: len(indices)])


def _views_of_part(context: StepContext, x: Tensor, labels: Tensor, part: Part, step: int) -> Tensor:
    """Return the views of one part; their noise depends on the positions in the batch, not on how it is split."""
    views_of = context.method.views_at(context.mechanism.plan.epochs_after(step))
    shape, key = (views_of.copies, *noise_shape(views_of, context.model, tuple(x.shape[1:]))), context.mechanism.key
    noise = normal_at_positions(key, Purpose.VIEWS, part.start, part.start + part.size, shape, x.device, step)
    return views_of_each(views_of, context.model, x, labels, noise)


def views_of_each(views: Views, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
    """Return the views of every example; custom views see one example at a time, so they cannot mix examples."""
    if type(views) in VIEWS.values():
        return views(model, x, labels, noise)
    rows = zip(x.split(1), labels.split(1), noise.split(1), strict=True)  # type: ignore[no-untyped-call]
    return torch.cat([views(model, *row) for row in rows])


def _part_sizes(context: StepContext, rows: int) -> tuple[int, int]:
    """Return (large, small): the sizes of all parts of all steps, from public numbers only.

    A kernel may sum in a different order for a different number of rows. If the number of rows followed the number of
    sampled records, one more record could change the other gradients by a rounding error each. With fixed sizes it cannot.
    """
    workers, expected = context.workers or len(context.engines), context.batch_size
    most = max(1, rows // context.method.views.count)
    each = expected / (workers * -(-expected // (most * workers)))
    if most < POSITIONS_PER_BLOCK:
        return most, most
    if context.small_parts:
        large = _whole_blocks(each, most)
        return large, _whole_blocks(large / 4, most)
    headroom = 2 * math.sqrt(expected) / workers  # so that batches rarely need one more part
    large = _whole_blocks(min(each + headroom + POSITIONS_PER_BLOCK, expected + headroom), most)
    return large, large


def _whole_blocks(size: float, most: int) -> int:
    """Round down to whole blocks of view noise, at least one, so that no block is drawn twice."""
    return max(1, int(min(size, most)) // POSITIONS_PER_BLOCK) * POSITIONS_PER_BLOCK


def _parts(total: int, sizes: tuple[int, int], first: int = 0) -> list[Part]:
    """Split positions first..total into full large parts, then small ones."""
    large, small = sizes
    parts, start = [], first
    while start < total:
        size = large if total - start >= large else small
        parts.append(Part(start, min(start + size, total), size))
        start += size
    return parts


def small_parts_change_no_bit(context: StepContext) -> bool:
    """Return whether gradients are bitwise equal in small and large parts on this machine.

    Compares the float64 norms of synthetic examples, in the threads that run the steps.
    """
    large, small = _part_sizes(replace(context, small_parts=True), context.physical_batch)
    device = next(context.model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...] = context.images.shape[2:]
    if not context.stored_views:
        shape = view_shape(context.method.views, context.model, tuple(context.images.shape[1:]))
    views = torch.rand((large, context.method.views.count, *shape), generator=generator).to(device)
    labels = torch.zeros(large, dtype=torch.long, device=device)

    def norms(engine: Engine, part: Part) -> Tensor:
        padded = torch.zeros((part.size, *views.shape[1:]), device=device)
        padded[: part.stop - part.start] = views[part.start : part.stop]
        clipped = engine(context.differentiated, context.method.loss, padded, labels[: part.size], context.clip)
        return clipped.norms[: part.stop - part.start]

    if large == small:
        return True
    try:
        whole, *_ = parallel_map(context.engines, norms, [Part(0, large, large)])
        in_small = list(parallel_map(context.engines, norms, _parts(large, (large + 1, small))))
    except RuntimeError as error:
        if _is_about_memory(error):  # the steps find a size that fits
            return False
        raise
    return torch.equal(whole, torch.cat(in_small))


def _is_about_memory(error: RuntimeError) -> bool:
    return "memory" in str(error).lower()


def check_views(views: Views, model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse views that mix examples: changing one row must not change any bit of another row's views."""
    device = next(model.parameters()).device
    x = dissimilar_rows(input_shape).to(device)
    shape = (len(x), views.copies, *noise_shape(views, model, input_shape))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.zeros(len(x), dtype=torch.long, device=device)
    before = views(model, x, labels, noise)
    alike = before.shape[:2] == (len(x), views.count)
    for place in (0, len(x) - 1):  # the last row has the largest value
        other, others = x.clone(), torch.arange(len(x)) != place
        other[place] = 1.0 - other[place]
        alike = alike and torch.equal(before[others], views(model, other, labels, noise)[others])
    if not alike:
        raise ModelError(
            f"the views {type(views).__name__} mix examples or do not return `count` views per example; "
            "compute the views of a row from that row only"
        )


def _descend(context: StepContext, gradient: Tensor) -> None:
    parameters = trainable(context.model).values()
    for parameter, part in zip(parameters, torch.split(gradient, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
    context.optimizer.step()
    context.optimizer.zero_grad(set_to_none=True)
