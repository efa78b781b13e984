"""The training loop: charge, step, average, settle. Saving and resuming are in `lifecycle`."""

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..data.dataset import Dataset
from ..errors import ConfigError, DpcertWarning
from ..gradients.choose import choose
from ..gradients.engine import Clip, Engine, trainable
from ..interrupts import stop_requests
from ..methods import Method
from ..models.check import check_model
from ..privacy.accounting import GaussianSteps, compose
from ..privacy.ledger import Ledger
from ..privacy.mechanism import STEPS_PER_BLOCK, Mechanism, Plan, make_plan
from ..privacy.statement import Statement, state
from ..progress import Progress, silent
from ..rounding import ceil_text
from ..store.runs import RunDirectory
from ..workers import worker_count
from .averaging import Average
from .curve import COARSER
from .lifecycle import Begun, Training, begin_in, begin_in_memory, finish, is_finished, reload, remembering
from .optimizers import make_optimizer, set_learning_rate
from .provenance import initial_facts
from .settings import Settings
from .step import StepContext, StopAskedError, check_views, private_step, small_parts_change_no_bit

_MOST_EPSILONS = 64  # how often epsilon is computed for display: each takes a tenth of a second


@dataclass(frozen=True)
class Run:
    """A finished training run: the model and its privacy statement."""

    model: nn.Module
    ledger: Ledger
    statement: Statement
    plan: Plan
    path: Path | None = None

    @property
    def epsilon(self) -> float:
        """From the ledger; infinite when the run is not private."""
        return self.statement.epsilon


def plan_for(data: Dataset, method: Method, settings: Settings) -> Plan:
    """Return the plan: a function of public numbers only."""
    assert data.size is not None and data.classes is not None
    return make_plan(
        dataset_size=data.size,
        size_given=data.size_given,
        classes=data.classes,
        classes_given=data.classes_given,
        held_out=data.held_out,
        batch_size=settings.train.batch_size,
        epochs=settings.train.epochs,
        clip=method.clip_rule,
        clip_norm=settings.privacy.clip_norm,
        epsilon=settings.privacy.epsilon,
        delta=settings.privacy.delta,
        input_shape=data.input_shape,
    )


def fit(
    model: nn.Module,
    data: Dataset,
    method: Method,
    settings: Settings,
    *,
    directory: RunDirectory | None = None,
    labels: dict[str, str] | None = None,
    claim: Callable[[], str] | None = None,
    identify: Callable[[nn.Module], dict[str, str]] | None = None,
    progress: Progress = silent,
) -> Run:
    """Train `model` in place, or resume the run in `directory`; a finished run is only loaded.

    With averaging, the model has the averaged weights at the end: those are released.
    A model that was already trained on some of the records in this process is charged for both runs (`provenance`).

    All inputs are checked before the ledger opens. `labels` are public facts for the model's header. `claim` is called once
    the directory is locked; it writes the config there and returns its SHA-256. `identify` returns more public facts, about
    the trained model.
    """
    device = choose_device(settings.train.device)
    check_model(model, data.input_shape, data.classes or 0)
    plan = plan_for(data, method, settings)
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    model.to(device)
    engines = choose(settings.gradients.engine, model, method.loss, data.input_shape, worker_count(device))
    check_views(method.views, model, data.input_shape)
    for remark in method.remarks:
        warnings.warn(remark, DpcertWarning, stacklevel=2)
    parameters = list(trainable(model).values())
    optimizer, average = make_optimizer(parameters, settings.train), Average(parameters, settings.train, plan.steps)
    training = Training(model, data, settings, plan, optimizer, average, initial_facts(model, data.x_train))
    if directory is None:
        begun = begin_in_memory(training)
        return _train(training, begun, method, engines, dict, progress)
    directory.create()
    with directory.locked():
        config_sha256 = None if claim is None else claim()
        facts = {**(labels or {}), **({} if config_sha256 is None else {"config_sha256": config_sha256})}
        if is_finished(directory):
            ledger, statement = reload(directory, training, config_sha256)
            return Run(model, ledger, statement, plan, directory.path)
        begun = begin_in(directory, training, config_sha256)
        return _train(training, begun, method, engines, lambda: facts | (identify(model) if identify else {}), progress)


def _train(
    training: Training,
    begun: Begun,
    method: Method,
    engines: tuple[Engine, ...],
    labels: Callable[[], dict[str, str]],
    progress: Progress,
) -> Run:
    with remembering(training, begun.ledger):
        _steps(_step_context(training, begun, method, engines), training, begun, progress)
        training.average.release()
    statement = finish(training, begun, labels())
    path = None if begun.keeper is None else begun.keeper.directory.path
    return Run(training.model, begun.ledger, statement, training.plan, path)


def _steps(context: StepContext, training: Training, begun: Begun, progress: Progress) -> None:
    mechanism, total, train = context.mechanism, context.mechanism.plan.steps, training.settings.train
    spent = None if progress is silent else _SpentSoFar(mechanism)
    with stop_requests() as asked_to_stop:
        context = replace(context, stop_asked=lambda: bool(asked_to_stop))
        for step in range(begun.first, total):
            mechanism.charge(step)
            set_learning_rate(context.optimizer, train.learning_rate_at(step, total))
            done = step
            with contextlib.suppress(StopAskedError):  # the step is abandoned; a resumed run takes exactly the same step
                gradient = private_step(context, step)
                done = step + 1
                training.average.include(done)
                if begun.keeper is not None:
                    begun.keeper.look(done, gradient)
                progress(done, total, **({} if spent is None else {"epsilon": spent.text()}))
            begun.settle(done, total, stop=bool(asked_to_stop))


def _step_context(training: Training, begun: Begun, method: Method, engines: tuple[Engine, ...]) -> StepContext:
    data, settings = training.data, training.settings
    clip, mechanism = Clip(method.clip_rule, settings.privacy.clip_norm), Mechanism(training.plan, begun.key, begun.ledger)
    context = StepContext(
        training.model,
        data.x_train,
        data.y_train,
        method,
        clip,
        engines,
        mechanism,
        training.optimizer,
        settings.train.physical_batch,
    )
    return replace(context, small_parts=small_parts_change_no_bit(context))


class _SpentSoFar:
    """Epsilon of the charged steps, rounded up, for the progress display: never less than the ledger says.

    In a long run it includes a few more blocks than are charged, so that it is not computed for every block.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._plan, self._ledger, self._through, self._text = mechanism.plan, mechanism.ledger, 0, ""
        self._private: bool | None = None
        blocks = math.ceil(self._plan.steps / STEPS_PER_BLOCK)
        self._stretch = STEPS_PER_BLOCK * math.ceil(blocks / _MOST_EPSILONS)

    def text(self) -> str:
        charged = self._ledger.steps_authorised
        if charged > self._through:
            self._through = min(self._plan.steps, self._stretch * math.ceil(charged / self._stretch))
            self._text = self._epsilon_text(self._through)
        return self._text

    def _epsilon_text(self, steps: int) -> str:
        plan = self._plan
        if self._private is None:  # computed once: it follows from the ledger's first line
            self._private = plan.target_epsilon is not None and state(self._ledger).private
        if plan.target_epsilon is None or not self._private:
            return "inf"
        earlier = self._ledger.earlier
        events = [*earlier, GaussianSteps(plan.noise_multiplier, plan.sampling_probability, steps)]
        epsilon = compose(events, plan.delta, 1.0 if steps == plan.steps else COARSER)
        return ceil_text(epsilon if earlier else min(epsilon, plan.target_epsilon), 2)  # all steps stay within it


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; raise `ConfigError` if this machine does not have it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device, dtype=torch.float64)  # norms and sums are float64
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}; use cpu") from error
    return device
