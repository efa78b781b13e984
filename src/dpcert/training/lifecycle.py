"""The life of a run: key, ledger, checkpoints, resuming, stop requests, and the files of a finished run."""

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.dataset import Dataset
from ..errors import DpcertWarning, LedgerError, RunError
from ..gradients.choose import was_measured
from ..gradients.engine import trainable
from ..interrupts import Interrupted
from ..methods import Method
from ..models.parts import head_name, parameters_of
from ..privacy.ledger import ASSUMED_INDEPENDENT, Ledger
from ..privacy.mechanism import RECORDED_LATER, STEPS_PER_BLOCK, Plan, opening_facts
from ..privacy.statement import Statement, installed_versions, recorded_versions, state
from ..progress import Progress, silent
from ..rng import KEY_BYTES, Purpose, key_from_seed, secret_key, stream_bytes
from ..scale.world import ALONE, World
from ..store.durable import canonical_json, write_atomically
from ..store.metrics import FORMAT
from ..store.runs import RunDirectory
from .averaging import Average
from .curve import Point, watcher
from .curve import file_of as curve_file
from .optimizers import make_optimizer
from .phases import PhaseSettings
from .provenance import remember, tensor_digests
from .settings import Settings
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


class Training:
    """What is trained, on what, and how. `initial` is what is known about the initial weights (`provenance`).

    Optimizer, average and the name of the engine belong to the phase that was entered last.
    """

    optimizer: torch.optim.Optimizer
    average: Average
    phase: int
    engine: str  # empty until it is chosen

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        method: Method,
        settings: Settings,
        plan: Plan,
        phases: Sequence[PhaseSettings],
        initial: dict[str, Any],
    ) -> None:
        self.model, self.data, self.method, self.settings = model, data, method, settings
        self.plan, self.phases, self.initial = plan, phases, initial
        self._main = set(trainable(model))  # what the last phase trains

    def enter(self, phase: int) -> None:
        """Begin a phase: freeze the parameters it does not train, with a new optimizer and a new average."""
        asked, self.phase, self.engine = self.phases[phase], phase, ""
        names = parameters_of(self.model, head_name(self.model)) if asked.trains_the_head_first else self._main
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in names)
        parameters = list(trainable(self.model).values())
        self.optimizer = make_optimizer(parameters, asked.keys)
        self.average = Average(parameters, asked.keys, self.steps_of_phase)

    @property
    def first_step(self) -> int:
        """The number of the first step of the phase."""
        return self.plan.first_step_of(self.phase)

    @property
    def steps_of_phase(self) -> int:
        """The number of steps of the phase."""
        return self.plan.every_phase[self.phase].steps

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Put the weights that would be released now into the model, inside the block."""
        with self.average.released():
            yield


SECONDS_BETWEEN_CHECKPOINTS = 180.0


@dataclass(frozen=True)
class Keeper:
    """What a run with a directory stores between steps: checkpoints, and the points of its curve."""

    directory: RunDirectory
    origin: Origin
    training: Training
    ledger: Ledger
    watch: Callable[[int, Tensor], Point | None]
    points: list[Point]

    def look(self, done: int, gradient: Tensor) -> None:
        """Record the curve point of this step, if there is one."""
        point = self.watch(done, gradient)
        if point is not None:
            self.points.append(point)

    def save(self, done: int) -> None:
        """Save a checkpoint after `done` steps."""
        now, average = self.training, self.training.average.values
        head, points = self.ledger.head, self.points
        save_checkpoint(self.directory, done, now.model, now.optimizer, head, self.origin, points, average, now.engine)


@dataclass(frozen=True)
class Begun:
    """A run that is ready for step `first`; with `finished` nothing is left to do.

    Every rank has the key and a copy of the ledger in memory. Only rank 0 has a keeper and the ledger's file.
    """

    key: bytes = field(repr=False)
    ledger: Ledger
    first: int = 0
    keeper: Keeper | None = None
    finished: Statement | None = None
    world: World = ALONE
    saved_at: list[float] = field(default_factory=lambda: [time.monotonic()], repr=False)

    def settle(self, done: int, total: int, *, stop: bool) -> None:
        """Call after each step: save at the end of a block, at the end and on a stop request; then raise on a stop request.

        Slow steps are also saved every few minutes. A checkpoint refers to charged steps only, so this costs nothing.
        """
        due = time.monotonic() - self.saved_at[0] > SECONDS_BETWEEN_CHECKPOINTS
        if self.keeper is not None and (done % STEPS_PER_BLOCK == 0 or done == total or stop or due):
            self.keeper.save(done)
            self.saved_at[0] = time.monotonic()
        if stop and done < total:
            self.world.wait()  # until rank 0 has saved: a rank that ends early would end the others
            raise Interrupted(f"stopped after step {done} of {total}")


def begin_in_memory(training: Training) -> Begun:
    """Begin a run without a directory."""
    _warn_of_warm_start(training.initial)
    key = _new_key(training.settings)
    return Begun(key, _open_ledger(None, key, training, training.initial))


def begin_in(directory: RunDirectory, training: Training, config_sha256: str | None, checking: Progress = silent) -> Begun:
    """Begin a run in `directory`, or continue the one that is there; `checking` shows the pass over the data."""
    data, average = training.data, training.average.values
    resumed = load_checkpoint(directory, training.model, training.optimizer, average)
    key = directory.load_key()
    if resumed is None:
        _refuse_to_begin_again(directory)
        _warn_of_warm_start(training.initial)
        key = _new_key(training.settings)
        identity = data_identity(key, data.x_train, data.y_train, checking)
        origin = Origin(identity, config_sha256, canonical_json(training.initial))
        directory.store_key(key)
        # save the initial weights, so that step 0 can be replayed
        save_checkpoint(directory, 0, training.model, training.optimizer, "", origin, average=average)
        first, head, points = 0, "", []
    else:
        if key is None:
            raise RunError(f"{directory.key} is missing; the run cannot be resumed without it: use another --out")
        identity = data_identity(key, data.x_train, data.y_train, checking, like=resumed.origin.data_identity)
        origin = Origin(identity, config_sha256, resumed.origin.initial_weights)
        _refuse_other_origin(directory, resumed.origin, origin)
        _refuse_other_public_inputs(directory, json.loads(resumed.origin.initial_weights), training.initial)
        first, head, points = resumed.step, resumed.ledger_head, resumed.curve
        training.engine = resumed.engine
    ledger = _continue_ledger(directory.ledger, key, training, head, json.loads(origin.initial_weights))
    watch = watcher(training.model, data, training.plan, training.released)
    return Begun(key, ledger, first, Keeper(directory, origin, training, ledger, watch, points))


def follow(key: bytes, ledger: bytes, first: int, finished: bool, versions: dict[str, str], world: World) -> Begun:
    """Return on another rank what rank 0 has begun: with a copy of its ledger in memory, and without files."""
    origin = "the ledger of rank 0"
    if finished:
        mirror = Ledger.parse(ledger, origin)
        return Begun(key, mirror, first, finished=state(mirror, versions or None), world=world)
    return Begun(key, Ledger.parse(ledger, origin, _mac_key(key)), first, world=world)


def finish(training: Training, begun: Begun, labels: Callable[[], dict[str, str]]) -> Statement:
    """Close the ledger; with a directory, write the released weights with their statement, and destroy the key."""
    ledger, plan = begun.ledger, training.plan
    if not ledger.is_closed:
        ledger.close()
    statement = state(ledger, installed_versions())
    if begun.keeper is None:
        return statement
    directory, averaging = begun.keeper.directory, training.phases[-1].keys.averaging_in_words
    config_sha256 = begun.keeper.origin.config_sha256
    public = {**labels(), **({} if config_sha256 is None else {"config_sha256": config_sha256})}
    facts = {"epsilon": repr(statement.epsilon), "delta": repr(statement.delta), "privacy": statement.short}
    facts["statement"] = canonical_json(statement.as_metrics())
    facts |= {"ledger_head": ledger.head, "ledger_sha256": ledger.sha256, "format": FORMAT}
    facts |= {"input_shape": canonical_json(list(training.data.input_shape)), "classes": str(plan.classes)}
    facts |= {} if averaging is None else {"averaging": averaging}
    facts |= {"engine": training.engine} if was_measured(training.engine) else {}
    write_atomically(directory.curve, curve_file(begun.keeper.points, plan, statement))
    write_atomically(directory.model, model_bytes(training.model, {**public, **facts}))
    directory.forget_secrets()
    return statement


def is_finished(directory: RunDirectory) -> bool:
    """Return whether training is finished."""
    return directory.model.exists() and directory.ledger.exists() and Ledger.load(directory.ledger).is_closed


def reload(directory: RunDirectory, training: Training, config_sha256: str | None) -> tuple[Ledger, Statement]:
    """Load the weights of a finished run into the model."""
    ledger = Ledger.load(directory.ledger)
    _refuse_other_plan(ledger, training)
    weights, header = read_model(directory.model)
    require_made_with(directory, header, ledger, config_sha256)
    with remembering(training, ledger):
        load_weights(training.model, weights, directory.model)
    directory.forget_secrets()  # a crash may have prevented this after the last write
    return ledger, state(ledger, recorded_versions(header))


@contextlib.contextmanager
def remembering(training: Training, ledger: Ledger) -> Iterator[None]:
    """Record on the module, even after an exception, that it was trained on the records as the ledger says."""
    before = tensor_digests(training.model)
    try:
        yield
    finally:
        remember(training.model, before, training.data.x_train, ledger)


def _refuse_to_begin_again(directory: RunDirectory) -> None:
    """Refuse to start where steps were already taken but the checkpoint or the ledger is missing."""
    for file in (directory.ledger, directory.model):
        if file.exists():
            missing = "checkpoint" if file == directory.ledger else "ledger"
            raise LedgerError(
                f"{directory.path} has a {file.name} but no {missing}; restore the {missing}, or use another --out"
            )


def _refuse_other_origin(directory: RunDirectory, before: Origin, now: Origin) -> None:
    if now.data_identity != before.data_identity:
        raise RunError(
            f"{directory.path} was started with other training data, or its key is damaged; use the original data, "
            "or another --out"
        )
    if before.config_sha256 is not None and now.config_sha256 != before.config_sha256:
        raise RunError(f"{directory.config} was changed since this run began; restore it from a copy, or use another --out")


def _refuse_other_public_inputs(directory: RunDirectory, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before.get("public_inputs") != now.get("public_inputs"):
        raise RunError(f"{directory.path} was started with other public weights; restore that file, or use another --out")


def _new_key(settings: Settings) -> bytes:
    seed = settings.privacy.noise_seed
    return secret_key() if seed is None else key_from_seed(seed, "noise")


def _mac_key(key: bytes) -> bytes:
    return stream_bytes(key, Purpose.LEDGER_MAC, KEY_BYTES)


def _first_line(training: Training) -> dict[str, Any]:
    return opening_facts(training.plan, noise_is_secret=training.settings.privacy.noise_seed is None)


def _open_ledger(path: Path | None, key: bytes, training: Training, initial: dict[str, Any]) -> Ledger:
    ledger = Ledger(path, _mac_key(key))
    ledger.open({**_first_line(training), **initial})
    return ledger


def _continue_ledger(path: Path, key: bytes, training: Training, head: str, initial: dict[str, Any]) -> Ledger:
    """Return the ledger of a run to resume; the checkpoint's head must be one of its lines."""
    if not path.exists():
        if head:
            raise LedgerError(f"ledger {path} is missing, but steps were taken; restore it from a copy")
        return _open_ledger(path, key, training, initial)
    ledger = Ledger.load(path, _mac_key(key))
    if head and not ledger.contains(head):
        raise LedgerError(f"ledger {path} is truncated: it lacks the entry the checkpoint refers to; restore it from a copy")
    _refuse_other_plan(ledger, training)
    return ledger


def _refuse_other_plan(ledger: Ledger, training: Training) -> None:
    for name, value in _first_line(training).items():
        if name in RECORDED_LATER and name not in ledger.opening:
            continue  # a run that an older version started
        if ledger.opening.get(name) != value:
            raise RunError(
                f"this run was started with {name} = {ledger.opening.get(name)}, the request has {value}; "
                "a run cannot change its plan: use another --out"
            )


def _warn_of_warm_start(initial: dict[str, Any]) -> None:
    if initial.get("initial_weights") != ASSUMED_INDEPENDENT:
        warnings.warn(
            "this model has already been trained on these records, so the privacy statement covers both training runs; "
            "for a separate budget start from a new model",
            DpcertWarning,
            stacklevel=4,
        )
