"""The training loop: charge, step, checkpoint; go on after a crash; stop cleanly when asked to."""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in, one_of
from ..data.dataset import Dataset
from ..errors import ConfigError, DpcertWarning, LedgerError, RunError
from ..gradients.choose import ENGINES, choose
from ..gradients.engine import Clip, Engine, trainable
from ..interrupts import Interrupted, stop_requests
from ..methods import Method
from ..models.check import check_model
from ..privacy.accounting import GaussianSteps, compose
from ..privacy.ledger import ASSUMED_INDEPENDENT, Ledger
from ..privacy.mechanism import RECORDED_LATER, STEPS_PER_BLOCK, Mechanism, Plan, make_plan, opening_facts
from ..privacy.statement import Statement, installed_versions, recorded_versions, state
from ..progress import Progress, silent
from ..rng import KEY_BYTES, Purpose, key_from_seed, secret_key, stream_bytes
from ..rounding import ceil_text
from ..store.durable import canonical_json, write_atomically
from ..store.metrics import FORMAT
from ..store.runs import RunDirectory
from ..workers import worker_count
from .curve import COARSER, Point, watcher
from .curve import file_of as curve_file
from .provenance import initial_facts, remember, tensor_digests
from .state import (
    Origin,
    data_identity,
    load_checkpoint,
    load_weights,
    model_bytes,
    read_model,
    require_made_with,
    save_checkpoint,
)
from .step import StepContext, StopAskedError, check_views, private_step, small_parts_change_no_bit

OPTIMIZERS = ("sgd", "adam")
_MOST_EPSILONS = 64  # how often epsilon is computed for the eyes: each takes a tenth of a second


@dataclass(frozen=True)
class Settings:
    """Everything a run needs beside model, data and method. The last four change speed, not the promise."""

    epsilon: float
    delta: float
    epochs: float
    batch_size: int
    learning_rate: float
    momentum: float
    optimizer: str
    clip_norm: float
    noise_seed: int | None = None
    physical_batch: int = 480
    engine: str = "auto"
    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class Run:
    """A finished training: the model and what can be said about it."""

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
    """The plan: a function of public numbers only."""
    assert data.size is not None and data.classes is not None
    return make_plan(
        dataset_size=data.size,
        size_given=data.size_given,
        classes=data.classes,
        classes_given=data.classes_given,
        held_out=data.held_out,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        clip=method.clip_rule,
        clip_norm=settings.clip_norm,
        epsilon=settings.epsilon,
        delta=settings.delta,
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
    """Train `model` in place, or go on where `directory` stopped; on a finished run only load it.

    A model that has already seen some of the records in this process is charged for both trainings (`provenance`).

    Everything that can be wrong is checked before the ledger opens. `labels` are public facts for the model's header.
    `claim` is called once the directory is ours; it writes the config there and returns its SHA-256. `identify` gives more
    public facts, about the trained model.
    """
    _check_settings(settings)
    device = choose_device(settings.device)
    check_model(model, data.input_shape, data.classes or 0)
    plan = plan_for(data, method, settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model.to(device)
    optimizer = _optimizer(model, settings)
    engines = choose(settings.engine, model, method.loss, data.input_shape, worker_count(device))
    check_views(method.views, model, data.input_shape)
    for remark in method.remarks:
        warnings.warn(remark, DpcertWarning, stacklevel=2)
    initial = initial_facts(model, data.x_train)
    if directory is None:
        _warn_of_warm_start(initial)
        key = _new_key(settings)
        ledger = _open_ledger(None, key, plan, settings, initial)
        with _remembering(model, data, ledger):
            _steps(_step_context(model, data, method, settings, Mechanism(plan, key, ledger), optimizer, engines), 0, progress)
        return Run(model, ledger, state(ledger, installed_versions()), plan)
    directory.create()
    with directory.locked():
        facts = {**(labels or {}), **({"config_sha256": claim()} if claim is not None else {})}
        if is_finished(directory):
            return _reload(directory, model, data, plan, settings, facts.get("config_sha256"))
        return _fit_in(directory, model, data, method, settings, plan, optimizer, engines, facts, initial, identify, progress)


def is_finished(directory: RunDirectory) -> bool:
    """Whether nothing is left to train."""
    return directory.model.exists() and directory.ledger.exists() and Ledger.load(directory.ledger).is_closed


def _fit_in(
    directory: RunDirectory,
    model: nn.Module,
    data: Dataset,
    method: Method,
    settings: Settings,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    engines: tuple[Engine, ...],
    labels: dict[str, str],
    initial: dict[str, Any],
    identify: Callable[[nn.Module], dict[str, str]] | None,
    progress: Progress,
) -> Run:
    resumed = load_checkpoint(directory, model, optimizer)
    key = directory.load_key()
    if resumed is None:
        _refuse_to_begin_again(directory)
        _warn_of_warm_start(initial)
        key = _new_key(settings)
        origin = Origin(data_identity(key, data.x_train, data.y_train), labels.get("config_sha256"), canonical_json(initial))
        directory.store_key(key)
        save_checkpoint(directory, 0, model, optimizer, "", origin)  # the initial weights: step 0 can be replayed
        first, head = 0, ""
    else:
        if key is None:
            raise RunError(f"{directory.key} is missing; without it the same steps cannot be taken again: use another --out")
        origin = Origin(
            data_identity(key, data.x_train, data.y_train), labels.get("config_sha256"), resumed.origin.initial_weights
        )
        _refuse_other_origin(directory, resumed.origin, origin)
        first, head = resumed.step, resumed.ledger_head
    ledger = _continue_ledger(directory.ledger, key, plan, settings, head, json.loads(origin.initial_weights))
    mechanism = Mechanism(plan, key, ledger)
    context = _step_context(model, data, method, settings, mechanism, optimizer, engines)
    points = [] if resumed is None else resumed.curve
    with _remembering(model, data, ledger):
        _steps(context, first, progress, _Keeper(directory, origin, watcher(model, data, plan), points))
    if not ledger.is_closed:
        ledger.close()
    statement = state(ledger, installed_versions())
    facts = {"epsilon": repr(statement.epsilon), "delta": repr(statement.delta), "privacy": statement.short}
    facts["statement"] = canonical_json(statement.as_metrics())
    facts |= {"ledger_head": ledger.head, "ledger_sha256": ledger.sha256, "format": FORMAT}
    facts |= {"input_shape": canonical_json(list(data.input_shape)), "classes": str(plan.classes)}
    facts |= {} if identify is None else identify(model)
    write_atomically(directory.curve, curve_file(points, plan, statement))
    write_atomically(directory.model, model_bytes(model, {**labels, **facts}))
    directory.forget_secrets()
    return Run(model, ledger, statement, plan, directory.path)


def _refuse_to_begin_again(directory: RunDirectory) -> None:
    """Steps that were taken here and are not charged in a ledger we can read must not be taken a second time."""
    for file in (directory.ledger, directory.model):
        if file.exists():
            missing = "checkpoint" if file == directory.ledger else "ledger"
            raise LedgerError(
                f"{directory.path} has a {file.name} but no {missing}; its state was removed: restore it, or use another --out"
            )


def _refuse_other_origin(directory: RunDirectory, before: Origin, now: Origin) -> None:
    if now.data_identity != before.data_identity:
        raise RunError(
            f"{directory.path} was started on other training data, or its key is damaged; use what it was started "
            "with, or another --out"
        )
    if before.config_sha256 is not None and now.config_sha256 != before.config_sha256:
        raise RunError(f"{directory.config} was changed since this run began; restore it from a copy, or use another --out")


def _reload(
    directory: RunDirectory, model: nn.Module, data: Dataset, plan: Plan, settings: Settings, config_sha256: str | None
) -> Run:
    ledger = Ledger.load(directory.ledger)
    _refuse_other_plan(ledger, plan, settings)
    weights, header = read_model(directory.model)
    require_made_with(directory, header, ledger, config_sha256)
    with _remembering(model, data, ledger):
        load_weights(model, weights, directory.model)
    directory.forget_secrets()  # a crash may have come between the last write and this
    return Run(model, ledger, state(ledger, recorded_versions(header)), plan, directory.path)


@dataclass(frozen=True)
class _Keeper:
    """What a run with a directory keeps: checkpoints, and the points of its curve."""

    directory: RunDirectory
    origin: Origin
    watch: Callable[[int, Tensor], Point | None]
    points: list[Point]

    def look(self, done: int, gradient: Tensor) -> None:
        """Note the point of this step, if it is due one."""
        point = self.watch(done, gradient)
        if point is not None:
            self.points.append(point)

    def save(self, context: StepContext, done: int) -> None:
        """A checkpoint after `done` steps."""
        head = context.mechanism.ledger.head
        save_checkpoint(self.directory, done, context.model, context.optimizer, head, self.origin, self.points)


def _steps(context: StepContext, first: int, progress: Progress, keeper: _Keeper | None = None) -> None:
    mechanism, total = context.mechanism, context.mechanism.plan.steps
    spent = None if progress is silent else _SpentSoFar(mechanism)
    with stop_requests() as asked_to_stop:
        context = replace(context, stop_asked=lambda: bool(asked_to_stop))
        for step in range(first, total):
            mechanism.charge(step)
            done = step
            with contextlib.suppress(StopAskedError):  # the step is given up and will be the same when it is taken again
                gradient = private_step(context, step)
                done = step + 1
                if keeper is not None:
                    keeper.look(done, gradient)
                progress(done, total, **({} if spent is None else {"epsilon": spent.text()}))
            stop = bool(asked_to_stop)
            if keeper is not None and (done % STEPS_PER_BLOCK == 0 or done == total or stop):
                keeper.save(context, done)
            if stop and done < total:
                raise Interrupted(f"stopped after step {done} of {total}")
    if keeper is None:
        mechanism.ledger.close()


class _SpentSoFar:
    """Epsilon of the steps that are charged, rounded up, for whoever watches: never less than the ledger says.

    In a long run it is of a few blocks more than are charged, so that it is not computed for every block.
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
        if self._private is None:  # asked once: it follows from the ledger's first line
            self._private = plan.target_epsilon is not None and state(self._ledger).private
        if plan.target_epsilon is None or not self._private:
            return "inf"
        earlier = self._ledger.earlier
        events = [*earlier, GaussianSteps(plan.noise_multiplier, plan.sampling_probability, steps)]
        epsilon = compose(events, plan.delta, 1.0 if steps == plan.steps else COARSER)
        return ceil_text(epsilon if earlier else min(epsilon, plan.target_epsilon), 2)  # the noise keeps all steps within it


def _new_key(settings: Settings) -> bytes:
    return secret_key() if settings.noise_seed is None else key_from_seed(settings.noise_seed, "noise")


def _mac_key(key: bytes) -> bytes:
    return stream_bytes(key, Purpose.LEDGER_MAC, KEY_BYTES)


def _open_ledger(path: Path | None, key: bytes, plan: Plan, settings: Settings, initial: dict[str, Any]) -> Ledger:
    ledger = Ledger(path, _mac_key(key))
    ledger.open({**opening_facts(plan, noise_is_secret=settings.noise_seed is None), **initial})
    return ledger


@contextlib.contextmanager
def _remembering(model: nn.Module, data: Dataset, ledger: Ledger) -> Iterator[None]:
    """Whatever happens inside, the module knows afterwards that it has seen the records as far as the ledger says."""
    before = tensor_digests(model)
    try:
        yield
    finally:
        remember(model, before, data.x_train, ledger)


def _warn_of_warm_start(initial: dict[str, Any]) -> None:
    if initial.get("initial_weights") != ASSUMED_INDEPENDENT:
        warnings.warn(
            "this model has already been trained on these records, so the privacy statement covers both trainings; "
            "for a budget of its own start from a new model",
            DpcertWarning,
            stacklevel=3,
        )


def _continue_ledger(path: Path, key: bytes, plan: Plan, settings: Settings, head: str, initial: dict[str, Any]) -> Ledger:
    """The ledger of a run that goes on; the checkpoint's head must be one of its lines."""
    if not path.exists():
        if head:
            raise LedgerError(f"ledger {path} is missing although steps were taken; restore it from a copy")
        return _open_ledger(path, key, plan, settings, initial)
    ledger = Ledger.load(path, _mac_key(key))
    if head and not ledger.contains(head):
        raise LedgerError(f"ledger {path} does not hold the entry the checkpoint stands on (it was cut); restore it")
    _refuse_other_plan(ledger, plan, settings)
    return ledger


def _refuse_other_plan(ledger: Ledger, plan: Plan, settings: Settings) -> None:
    wanted = opening_facts(plan, noise_is_secret=settings.noise_seed is None)
    for name, value in wanted.items():
        if name in RECORDED_LATER and name not in ledger.opening:
            continue  # a run that an older version began
        if ledger.opening.get(name) != value:
            raise RunError(
                f"this run was planned with {name} = {ledger.opening.get(name)}, now {value} is asked for; "
                "a run keeps its plan: use another --out"
            )


def _step_context(
    model: nn.Module,
    data: Dataset,
    method: Method,
    settings: Settings,
    mechanism: Mechanism,
    optimizer: torch.optim.Optimizer,
    engines: tuple[Engine, ...],
) -> StepContext:
    clip = Clip(method.clip_rule, settings.clip_norm)
    context = StepContext(
        model, data.x_train, data.y_train, method, clip, engines, mechanism, optimizer, settings.physical_batch
    )
    return replace(context, small_parts=small_parts_change_no_bit(context))


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    parameters = list(trainable(model).values())
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=settings.learning_rate)
    return torch.optim.SGD(parameters, lr=settings.learning_rate, momentum=settings.momentum)


def choose_device(name: str) -> torch.device:
    """A device by name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device, dtype=torch.float64)  # norms and sums are float64
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}; use cpu") from error
    return device


def _check_settings(settings: Settings) -> None:
    finite_in("train.learning_rate", settings.learning_rate, 0.0, 1e6, open_low=True)
    finite_in("train.momentum", settings.momentum, 0.0, 1.0, open_high=True)
    one_of("train.optimizer", settings.optimizer, OPTIMIZERS)
    one_of("gradients.engine", settings.engine, ENGINES)
    integer_in("train.physical_batch", settings.physical_batch, 1)
    if settings.threads is not None:
        integer_in("train.threads", settings.threads, 1, 1024)
    if settings.noise_seed is not None:
        integer_in("privacy.noise_seed", settings.noise_seed, 0)
