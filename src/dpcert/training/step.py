"""One step of DP-CERT training (Algorithm 2 of the paper), a call a line."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..gradients.engine import Clip, ClippedSum, Engine, empty_sum, trainable
from ..methods import Method
from ..privacy.mechanism import Mechanism
from ..rng import Purpose, normal_at_positions


@dataclass(frozen=True)
class Problem:
    """What stays the same in every step."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    method: Method
    clip: Clip
    engine: Engine
    mechanism: Mechanism
    optimizer: torch.optim.Optimizer
    physical_batch: int


def private_step(problem: Problem, step: int) -> None:
    """Sample, make views, take and clip per-example gradients, sum, add noise, divide by B, descend.

    A function of (weights, optimiser state, data, key, step). `physical_batch` changes the memory it takes, not the result
    (up to the order of float64 additions).
    """
    batch = torch.from_numpy(problem.mechanism.sample(len(problem.images), step))
    total = empty_sum(problem.model, problem.clip)
    for part in _parts(len(batch), problem.physical_batch):
        total = total + _clipped_sum_of(problem, batch[part], part, step)
    gradient = problem.mechanism.release(total, step)
    _descend(problem, gradient)


def _clipped_sum_of(problem: Problem, indices: Tensor, part: slice, step: int) -> ClippedSum:
    device = next(problem.model.parameters()).device
    x, labels = problem.images[indices].to(device), problem.labels[indices].to(device)
    views_of = problem.method.views
    noise_shape = (views_of.copies, *x.shape[1:])
    noise = normal_at_positions(problem.mechanism.key, Purpose.VIEWS, part.start, part.stop, noise_shape, device, step)
    views = views_of(problem.model, x, labels, noise)
    return problem.engine(problem.model, problem.method.loss, views, labels, problem.clip)


def _descend(problem: Problem, gradient: Tensor) -> None:
    parameters = trainable(problem.model).values()
    for parameter, part in zip(parameters, torch.split(gradient, [p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).to(parameter.dtype)
    problem.optimizer.step()
    problem.optimizer.zero_grad(set_to_none=True)


def _parts(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
