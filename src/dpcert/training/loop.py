"""The training loop: charge, step, average, settle. Saving and resuming are in `lifecycle`."""

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.ahead import as_in_steps, reading_ahead
from ..data.dataset import Dataset
from ..data.fingerprint import digests as image_digests
from ..data.images import chunks, is_read_by_index
from ..errors import ConfigError, DpcertWarning
from ..gradients.choose import choose
from ..gradients.engine import Clip
from ..gradients.memory import default_physical_batch
from ..interrupts import stop_requests
from ..methods import Method
from ..models.check import check_model
from ..models.parts import ALL, head_name
from ..models.spec import public_weights_of, spec_of
from ..models.weights import refuse_same_images
from ..privacy.accounting import compose
from ..privacy.ledger import Ledger
from ..privacy.mechanism import STEPS_PER_BLOCK, EarlierPhase, Mechanism, Plan, make_plan
from ..privacy.statement import Statement, state
from ..progress import Progress, silent
from ..rounding import ceil_text
from ..store.runs import RunDirectory
from ..views import SmoothAdv
from ..workers import worker_count
from .curve import COARSER
from .features import ROWS_OF_FEATURES, method_of_head_phase, stored_features, trunk_of
from .lifecycle import Begun, Training, begin_in, begin_in_memory, finish, is_finished, reload, remembering
from .optimizers import set_learning_rate
from .phases import phases_of
from .provenance import initial_facts
from .settings import HeadConfig, Settings
from .state import steps_in_checkpoint
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


def plan_for(data: Dataset, method: Method, settings: Settings, trains: str = ALL) -> Plan:
    """Return the plan: a function of public numbers only."""
    assert data.size is not None and data.classes is not None
    *earlier, last = phases_of(settings, data.size, trains, adversarial=is_adversarial(method))
    return make_plan(
        dataset_size=data.size,
        size_given=data.size_given,
        classes=data.classes,
        classes_given=data.classes_given,
        held_out=data.held_out,
        batch_size=last.batch_size,
        epochs=settings.train.epochs,
        steps=last.steps if last.trains_the_head_first else None,
        clip=method.clip_rule,
        clip_norm=last.clip_norm,
        epsilon=settings.privacy.epsilon,
        delta=settings.privacy.delta,
        input_shape=data.input_shape,
        trains=last.trains,
        earlier=[
            EarlierPhase(phase.trains, phase.batch_size, phase.steps, phase.clip_norm, phase.budget or 0.0) for phase in earlier
        ],
    )


def is_adversarial(method: Method) -> bool:
    """Return whether the views depend on the model that is trained."""
    return isinstance(method.views, SmoothAdv)


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
    trains = spec_of(model).train
    plan = plan_for(data, method, settings, trains)
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    model.to(device)
    check_views(method.views, model, data.input_shape)
    for remark in method.remarks:
        warnings.warn(remark, DpcertWarning, stacklevel=2)
    phases = phases_of(settings, plan.dataset_size, trains, adversarial=is_adversarial(method))
    checking = _named(progress, "data", 0, plan.steps) if is_read_by_index(data.x_train) else silent
    training = Training(model, data, method, settings, plan, phases, _facts_about_initial_weights(model, data, checking))
    if directory is None:
        training.enter(0)
        return _train(training, begin_in_memory(training), dict, progress)
    directory.create()
    with directory.locked():
        config_sha256 = None if claim is None else claim()
        facts = {**(labels or {}), **({} if config_sha256 is None else {"config_sha256": config_sha256})}
        if is_finished(directory):
            ledger, statement = reload(directory, training, config_sha256)
            return Run(model, ledger, statement, plan, directory.path)
        done = steps_in_checkpoint(directory)
        training.enter(plan.phase_of(min(max(done - 1, 0), plan.steps - 1)))
        begun = begin_in(directory, training, config_sha256, checking)
        return _train(training, begun, lambda: facts | (identify(model) if identify else {}), progress)


def _facts_about_initial_weights(model: nn.Module, data: Dataset, checking: Progress) -> dict[str, Any]:
    """Return what the ledger says about the initial weights. Public weights must not have been trained on these images."""
    public = public_weights_of(model)
    if public is None:
        return initial_facts(model, data.x_train, checking)
    for part, images in (("training", data.x_train), ("test", data.x_test)):
        if public.sketch:
            digests = (digest for rows in chunks(images, checking) for digest in image_digests(rows.numpy()))
            refuse_same_images(public, digests, f"the {part} set {data.name}")
    return {**initial_facts(model, data.x_train, checking), "public_inputs": [public.facts]}


def _train(training: Training, begun: Begun, labels: Callable[[], dict[str, str]], progress: Progress) -> Run:
    with remembering(training, begun.ledger):
        for index in range(training.phase, len(training.phases)):
            if index != training.phase:
                training.enter(index)
            _run_phase(training, begun, progress)
            training.average.release()
    statement = finish(training, begun, labels())
    path = None if begun.keeper is None else begun.keeper.directory.path
    return Run(training.model, begun.ledger, statement, training.plan, path)


def _run_phase(training: Training, begun: Begun, progress: Progress) -> None:
    """Take the remaining steps of the current phase."""
    start, count, total = training.first_step, training.steps_of_phase, training.plan.steps
    remaining = range(max(begun.first, start), start + count)
    if not remaining:
        return
    keys = training.phases[training.phase].keys
    context = _step_context(training, begun, progress)
    spent = None if progress is silent else _SpentSoFar(context.mechanism)
    with stop_requests() as asked_to_stop, reading_ahead(context.images) as ahead:
        context = replace(context, images=ahead.images, stop_asked=lambda: bool(asked_to_stop))
        ahead.announce(partial(_records_of, context, remaining.start))
        for step in remaining:
            context.mechanism.charge(step)
            ahead.announce(partial(_records_of, context, step + 1) if step + 1 in remaining else None)
            set_learning_rate(context.optimizer, keys.learning_rate_at(step - start, count))
            done = step
            with contextlib.suppress(StopAskedError):  # the step is abandoned; a resumed run takes exactly the same step
                gradient = private_step(context, step)
                done = step + 1
                training.average.include(done - start)
                if begun.keeper is not None:
                    begun.keeper.look(done, gradient)
                progress(done, total, **({} if spent is None else {"epsilon": spent.text()}))
            begun.settle(done, total, stop=bool(asked_to_stop))


def _records_of(context: StepContext, step: int) -> np.ndarray:
    """Return the records that a step reads, in increasing order."""
    return context.mechanism.sample(len(context.images), step)


def _step_context(training: Training, begun: Begun, progress: Progress) -> StepContext:
    """Return what the steps of the current phase share: the model, or its head with stored features."""
    data, settings, asked = training.data, training.settings, training.phases[training.phase]
    stored = _head_on_features(training, begun, progress) if isinstance(asked.keys, HeadConfig) else None
    model, images, method = stored or (training.model, data.x_train, training.method)
    rows = min(settings.train.physical_batch, default_physical_batch(model, data.input_shape))
    inputs = tuple(images.shape[2:] if stored else images.shape[1:])
    workers = worker_count(next(model.parameters()).device)
    context = StepContext(
        model,
        images,
        data.y_train,
        method,
        Clip(method.clip_rule, asked.clip_norm),
        choose(settings.gradients.engine, model, method.loss, inputs, workers),
        Mechanism(training.plan, begun.key, begun.ledger),
        training.optimizer,
        ROWS_OF_FEATURES if stored else rows,
        stored_views=stored is not None,
        phase=training.phase,
    )
    return replace(context, small_parts=small_parts_change_no_bit(context))


def _head_on_features(training: Training, begun: Begun, progress: Progress) -> tuple[nn.Module, Tensor, Method] | None:
    """Return the head, the features of all records and the method of a head phase; None if features cannot be stored."""
    model, images, keys = training.model, as_in_steps(training.data.x_train), training.phases[training.phase].keys
    assert isinstance(keys, HeadConfig)
    method = method_of_head_phase(training.method, keys.copies)
    trunk = trunk_of(model, method, training.data.input_shape)
    if trunk is None:
        return None

    tell = _named(progress, "features", max(begun.first, training.first_step), training.plan.steps)
    device = next(model.parameters()).device
    features = stored_features(trunk, images, method, begun.key, training.first_step, device, worker_count(device), tell)
    return model.get_submodule(head_name(model)), features, method


def _named(progress: Progress, name: str, step: int, steps: int) -> Progress:
    """Return a progress that shows a preparation for `step` as a percentage: ``features 12 %``."""

    def tell(done: int, total: int, **facts: str) -> None:
        progress(step, steps, **{name: f"{100 * done / total:.0f} %"})

    return tell


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
        epsilon = compose([*earlier, *plan.releases(steps)], plan.delta, 1.0 if steps == plan.steps else COARSER)
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
