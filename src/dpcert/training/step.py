"""One step of DP-CERT training (Algorithm 2 of the paper), a call a line."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..gradients.engine import Clip, ClippedSum, Engine, empty_sum, trainable
from ..methods import Method, Views
from ..privacy.mechanism import Mechanism
from ..rng import POSITIONS_PER_BLOCK, Purpose, normal_at_positions
from ..workers import share


class StopAskedError(Exception):
    """Raised between two parts of a step that is to be given up; weights and optimiser are as they were before it."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Problem:
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
    stop_asked: Callable[[], bool] = _never


def private_step(problem: Problem, step: int) -> Tensor:
    """Sample, make views, take and clip per-example gradients, sum, add noise, divide by B, descend.

    A function of (weights, optimiser state, data, key, step). `physical_batch`, the number of rows (examples x views) in
    memory at once, does not change the result (up to the order of float64 additions). Returns the noised mean gradient.
    """
    batch = torch.from_numpy(problem.mechanism.sample(len(problem.images), step))
    clipped = clipped_sum(problem, batch, step, problem.physical_batch)
    gradient = problem.mechanism.release(clipped, step)
    _descend(problem, gradient)
    return gradient


def clipped_sum(problem: Problem, batch: Tensor, step: int, rows: int) -> ClippedSum:
    """The clipped sum over the whole batch, `rows` rows at a time; half as many where they do not fit in memory."""
    parts = _parts(len(batch), rows // problem.method.views.count, len(problem.engines))

    def work(engine: Engine, part: slice) -> ClippedSum:
        return _clipped_sum_of(problem, engine, batch[part], part, step)

    total = empty_sum(problem.model, problem.clip)
    try:
        for clipped in share(problem.engines, work, parts):
            total = total + clipped
            if problem.stop_asked():  # a large batch may take longer than the one who asked will wait
                raise StopAskedError
    except RuntimeError as error:
        if "memory" not in str(error).lower() or rows < 2 * problem.method.views.count:
            raise
        return clipped_sum(problem, batch, step, rows // 2)
    return total


def _clipped_sum_of(problem: Problem, engine: Engine, indices: Tensor, part: slice, step: int) -> ClippedSum:
    device = next(problem.model.parameters()).device
    x, labels = problem.images[indices].to(device), problem.labels[indices].to(device)
    views_of = problem.method.views_at(step * problem.mechanism.plan.sampling_probability)
    shape, key = (views_of.copies, *x.shape[1:]), problem.mechanism.key
    noise = normal_at_positions(key, Purpose.VIEWS, part.start, part.stop, shape, device, step)
    views = views_of(problem.model, x, labels, noise)
    return engine(problem.model, problem.method.loss, views, labels, problem.clip)


def check_views(views: Views, model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse views that mix examples: change one row, and no other row's views may move by a bit."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((3, *input_shape), generator=generator).to(device)
    noise = torch.randn((3, views.copies, *input_shape), generator=generator).to(device)
    labels = torch.zeros(3, dtype=torch.long, device=device)
    other = x.clone()
    other[0] = 1.0 - other[0]
    before, after = views(model, x, labels, noise), views(model, other, labels, noise)
    if before.shape[:2] != (3, views.count) or not torch.equal(before[1:], after[1:]):
        raise ModelError(
            f"the views {type(views).__name__} mix examples or give another number of views than they state; "
            "make the views of a row from that row alone"
        )


def _descend(problem: Problem, gradient: Tensor) -> None:
    parameters = trainable(problem.model).values()
    for parameter, part in zip(parameters, torch.split(gradient, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
    problem.optimizer.step()
    problem.optimizer.zero_grad(set_to_none=True)


def _parts(total: int, size: int, workers: int) -> list[slice]:
    """Positions 0..total in parts of at most about `size`, whole blocks of noise each, as many for every worker."""
    rounds = -(-total // (max(1, size) * workers))
    each = max(1, -(-total // max(1, rounds * workers)))
    if size > POSITIONS_PER_BLOCK:
        each = -(-each // POSITIONS_PER_BLOCK) * POSITIONS_PER_BLOCK  # no block is drawn twice
    return [slice(start, min(start + each, total)) for start in range(0, total, each)]
