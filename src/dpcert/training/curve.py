"""The training curve: what can be shown about training without using privacy budget.

Every number is a function of released values (weights, noised gradients) and of the test set. There is no training loss, and
no gradient norm without noise.
Points are kept in the checkpoint, so a resumed run has the same ones. `training.tsv` is written once, after the last step.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..certification.votes import evaluating
from ..data.dataset import Dataset
from ..data.images import rows_per_chunk
from ..gradients.engine import trainable
from ..models.parts import head_name, layers_before_head, parameters_of
from ..privacy.accounting import compose
from ..privacy.mechanism import Plan
from ..privacy.statement import Statement
from ..store.records import CurveRow, header, text_of

_MOST_POINTS = 50
_BYTES_AT_ONCE = 16 << 20  # of images: activations take many times as much
COARSER = 10.0  # wider buckets for all points but the last: still an upper bound, 7 times as fast


@dataclass(frozen=True)
class Point:
    """State after `step` steps: the norm of the last noised mean gradient, and the test accuracy."""

    step: int
    gradient_norm: float | None  # None: there is no noise
    test_accuracy: float | None


def watcher(
    model: nn.Module, data: Dataset, plan: Plan, released: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[[int, Tensor], Point | None]:
    """Return a function that makes the point of a step, at the end of an epoch and of training; None for other steps.

    With records held out for validation the test set is not used. Inside `released` the model has the weights that would be
    released now (the average, if there is one); the test accuracy is theirs.
    """
    every = max(1.0, plan.epochs_after(plan.steps) / _MOST_POINTS)  # epochs between two points
    test_set = _TestSet(model, data)

    def watch(done: int, gradient: Tensor) -> Point | None:
        if done < plan.steps and plan.epochs_after(done) // every == plan.epochs_after(done - 1) // every:
            return None
        with released():
            tested = None if data.held_out else test_set.accuracy()
        return Point(done, float(gradient.norm()) if plan.noise_multiplier > 0 else None, tested)

    return watch


class _TestSet:
    """The test set of one model. While only the head trains, the features of the frozen layers are computed once."""

    def __init__(self, model: nn.Module, data: Dataset) -> None:
        self._model, self._data = model, data
        self._features: Tensor | None = None

    def accuracy(self) -> float:
        """Return the accuracy with the current weights."""
        if not _only_the_head_trains(self._model):
            self._features = None
            return accuracy(self._model, self._data.x_test, self._data.y_test)
        if self._features is None:
            trunk = layers_before_head(self._model, self._data.input_shape)
            if trunk is None:
                return accuracy(self._model, self._data.x_test, self._data.y_test)
            self._features = torch.cat(list(_outputs(trunk, self._data.x_test)))
        return accuracy(self._model.get_submodule(head_name(self._model)), self._features, self._data.y_test)


def _only_the_head_trains(model: nn.Module) -> bool:
    trained = set(trainable(model))
    return len(trained) < sum(1 for _ in model.parameters()) and trained == parameters_of(model, head_name(model))


def accuracy(model: nn.Module, x: Tensor, y: Tensor, rows: int = 1000) -> float:
    """Return the share of inputs that the model classifies correctly, without smoothing."""
    predicted = torch.cat([logits.argmax(dim=1) for logits in _outputs(model, x, rows)])
    return int((predicted == y).sum()) / len(x)


def _outputs(model: nn.Module, x: Tensor, rows: int = 1000) -> Iterator[Tensor]:
    """Yield the outputs of the model in evaluation mode, `rows` rows at a time, or fewer if they are large."""
    device = next(model.parameters()).device
    rows = min(rows, rows_per_chunk(x, _BYTES_AT_ONCE))
    with evaluating(model) as voter:
        for start in range(0, len(x), rows):
            yield voter(x[start : start + rows].to(device)).cpu()


def file_of(points: Iterable[Point], plan: Plan, statement: Statement) -> bytes:
    """Return training.tsv: the points, with the epsilon of the steps so far, which follows from the plan."""
    lines = [header(CurveRow)]
    for point in points:
        row = (
            point.step,
            plan.epochs_after(point.step),
            spent(point.step, statement),
            point.gradient_norm,
            point.test_accuracy,
        )
        lines.append(text_of(CurveRow(*row)))
    return ("\n".join(lines) + "\n").encode()


def spent(step: int, statement: Statement) -> float:
    """Return an upper bound on epsilon of the first `step` steps, about 0.1 % above `epsilon_after` except at the last step."""
    return min(epsilon_after(step, statement, COARSER), statement.epsilon)


def epsilon_after(step: int, statement: Statement, coarser: float = 1.0) -> float:
    """Return epsilon of the first `step` steps of a finished run; infinite if it is not private.

    A model that a search selected was selected after its last step: all its steps cost what the search costs.
    """
    if not statement.private or step >= statement.steps or statement.selection is not None:
        return statement.epsilon if statement.private else math.inf
    return compose(statement.releases_after(step), statement.delta, coarser)
