"""The training loop: charge, step, average, settle. Saving and resuming are in `lifecycle`."""

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.ahead import as_in_steps, reading_ahead
from ..data.dataset import Dataset
from ..data.fingerprint import digests as image_digests
from ..data.images import chunks, is_read_by_index
from ..errors import ConfigError, DpcertWarning
from ..gradients.engine import Clip
from ..gradients.memory import default_physical_batch, keep_freed_memory
from ..interrupts import stop_requests
from ..methods import Method, view_shape
from ..models.check import check_model
from ..models.noisy import NoisyModel
from ..models.parts import ALL, head_name
from ..models.spec import public_weights_of, spec_of
from ..models.systems import floored, set_weights
from ..models.weights import refuse_same_images
from ..privacy.accounting import compose
from ..privacy.clipping import Flat
from ..privacy.ledger import NOISE_WEIGHTS, Ledger
from ..privacy.mechanism import STEPS_PER_BLOCK, EarlierPhase, Mechanism, Plan, as_trial, make_plan
from ..privacy.statement import Statement, state
from ..progress import Progress, silent
from ..rounding import ceil_text
from ..scale.world import ALONE, World
from ..store.runs import RunDirectory
from ..views import ADVERSARIAL
from ..workers import worker_count
from . import noise_weights
from .curve import COARSER
from .engines import engines_for
from .features import PRECISIONS, ROWS_OF_FEATURES, method_of_head_phase, records_of_rank, stored_features, trunk_of
from .lifecycle import Begun, Training, begin_in, begin_in_memory, finish, is_finished, reload, remembering
from .optimizers import set_learning_rate
from .phases import phases_of, refuse_unusable
from .provenance import initial_facts
from .ranks import agree_on_request, begin_together, device_name
from .settings import HeadConfig, Settings
from .state import steps_in_checkpoint
from .step import StepContext, StopAskedError, check_views, private_step, records_of_step, small_parts_change_no_bit

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


def plan_for(
    data: Dataset, method: Method, settings: Settings, trains: str = ALL, weights: str | Sequence[float] | None = None
) -> Plan:
    """Return the plan: a function of public numbers only. A trial of a charged search has its own budget."""
    assert data.size is not None and data.classes is not None
    refuse_unusable(settings, method, weights)
    selection, target = settings.search.selection, settings.privacy.epsilon
    *earlier, last = phases_of(settings, data.size, trains, adversarial=is_adversarial(method), noise_weights=weights)
    plan = make_plan(
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
        epsilon=target if selection is None else settings.search.trial_epsilon,
        delta=settings.privacy.delta,
        input_shape=data.input_shape,
        trains=last.trains,
        earlier=[
            EarlierPhase(phase.trains, phase.batch_size, phase.steps, phase.clip_norm, phase.budget or 0.0) for phase in earlier
        ],
    )
    return plan if selection is None else as_trial(plan, selection, target)


def is_adversarial(method: Method) -> bool:
    """Return whether the views depend on the model that is trained."""
    return method.views.name in ADVERSARIAL


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
    world: World = ALONE,
) -> Run:
    """Train `model` in place, or resume the run in `directory`; a finished run is only loaded.

    With averaging, the model has the averaged weights at the end: those are released.
    A model that was already trained on some of the records in this process is charged for both runs (`provenance`).

    All inputs are checked before the ledger opens. `labels` are public facts for the model's header. `claim` is called once
    the directory is locked; it writes the config there and returns its SHA-256. `identify` returns more public facts, about
    the trained model.

    All ranks of `world` call this with the same arguments and return the same run. Only rank 0 uses `directory`, `claim` and
    `progress`.
    """
    device = choose_device(device_name(world, settings.train.device))
    check_model(model, data.input_shape, data.classes or 0)
    trains, weights = spec_of(model).train, spec_of(model).noise_weights
    plan = plan_for(data, method, settings, trains, weights)
    keep_freed_memory()
    if settings.train.threads:
        torch.set_num_threads(settings.train.threads)
    model.to(device)
    check_views(method.views, model, data.input_shape)
    progress = progress if world.is_first else silent
    for remark in method.remarks if world.is_first else ():
        warnings.warn(remark, DpcertWarning, stacklevel=2)
    phases = phases_of(settings, plan.dataset_size, trains, adversarial=is_adversarial(method), noise_weights=weights)
    checking = _named(progress, "data", 0, plan.steps) if is_read_by_index(data.x_train) else silent
    training = Training(model, data, method, settings, plan, phases, _facts_about_initial_weights(model, data, checking))
    agree_on_request(world, training, device)
    with ExitStack() as held:
        begun = begin_together(world, training, lambda: _begin(training, directory, claim, held, checking))
        path = None if directory is None else directory.path
        if begun.finished is not None:
            return Run(model, begun.ledger, begun.finished, plan, path)
        statement = _train(training, begun, lambda: {**(labels or {}), **(identify(model) if identify else {})}, progress)
        return Run(model, begun.ledger, statement, plan, path)


def _begin(
    training: Training, directory: RunDirectory | None, claim: Callable[[], str] | None, held: ExitStack, checking: Progress
) -> Begun:
    """Begin or resume the run, or load it if it is finished. The lock of its directory is released with `held`."""
    if directory is None:
        training.enter(0)
        return begin_in_memory(training)
    directory.create()
    held.enter_context(directory.locked())
    config_sha256 = None if claim is None else claim()
    if is_finished(directory):
        ledger, statement = reload(directory, training, config_sha256)
        return Begun(b"", ledger, training.plan.steps, finished=statement)
    done = steps_in_checkpoint(directory)
    training.enter(training.plan.phase_of(min(max(done - 1, 0), training.plan.steps - 1)))
    return begin_in(directory, training, config_sha256, checking)


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


def _train(training: Training, begun: Begun, labels: Callable[[], dict[str, str]], progress: Progress) -> Statement:
    with remembering(training, begun.ledger):
        for index in range(training.phase, len(training.phases)):
            if index != training.phase:
                training.enter(index)
            if training.phases[index].releases_noise_weights:
                _release_noise_weights(training, begun, progress)
            else:
                _run_phase(training, begun, progress)
            training.average.release()
    statement = finish(training, begun, labels)
    begun.world.agree("the ledger", begun.ledger.sha256)  # no rank returns before rank 0 has written the run
    return statement


def _release_noise_weights(training: Training, begun: Begun, progress: Progress) -> None:
    """Take the one step of the phase: charge it, release the mean, and give the model its noise scales.

    Does nothing in a resumed run whose checkpoint has them.
    """
    model, world, step, total = training.model, begun.world, training.first_step, training.plan.steps
    assert isinstance(model, NoisyModel), "`ModelSpec` builds no other model with charged weights"
    if begun.first > step:
        return
    mechanism = Mechanism(training.plan, begun.key, begun.ledger)
    if mechanism.charge(step):
        world.wait()  # as before every other step
    tell = _named(progress, NOISE_WEIGHTS, step, total)
    clip = Clip(Flat(), training.phases[training.phase].clip_norm)
    with stop_requests(alone=world.size == 1) as asked_to_stop:
        share, done = None, step
        with contextlib.suppress(StopAskedError):
            share = noise_weights.clipped_sum(model, training.data, clip, world, tell, lambda: bool(asked_to_stop))
        stopped = world.any(share is None)
        if share is not None and not stopped:
            clipped = world.sum(share)
            mean = world.from_first(lambda: mechanism.release(clipped, step), like=clipped.value)
            set_weights(model, floored(mean.clamp(min=0.0)))
            done = step + 1
            if begun.keeper is not None:
                begun.keeper.save(done)
            progress(done, total)
        begun.settle(done, total, stop=world.any(bool(asked_to_stop)))


def _run_phase(training: Training, begun: Begun, progress: Progress) -> None:
    """Take the remaining steps of the current phase."""
    start, count, total = training.first_step, training.steps_of_phase, training.plan.steps
    remaining = range(max(begun.first, start), start + count)
    if not remaining:
        return
    keys = training.phases[training.phase].keys
    context = _step_context(training, begun, progress)
    world, spent = begun.world, None if progress is silent else _SpentSoFar(context.mechanism)
    with stop_requests(alone=world.size == 1) as asked_to_stop, reading_ahead(context.images) as ahead:
        context = replace(context, images=ahead.images, stop_asked=lambda: bool(asked_to_stop))
        ahead.announce(partial(records_of_step, context, remaining.start))
        for step in remaining:
            if context.mechanism.charge(step):
                world.wait()  # no rank computes before rank 0 has charged the step durably
            ahead.announce(partial(records_of_step, context, step + 1) if step + 1 in remaining else None)
            set_learning_rate(context.optimizer, keys.learning_rate_at(step - start, count))
            done = step
            with contextlib.suppress(StopAskedError):  # the step is abandoned; a resumed run takes exactly the same step
                gradient = private_step(context, step)
                done = step + 1
                training.average.include(done - start)
                if begun.keeper is not None:
                    begun.keeper.look(done, gradient)
                progress(done, total, **({} if spent is None else {"epsilon": spent.text()}))
            begun.settle(done, total, stop=world.any(bool(asked_to_stop)))


def _step_context(training: Training, begun: Begun, progress: Progress) -> StepContext:
    """Return what the steps of the current phase share: the model, or its head with stored features."""
    data, settings, asked = training.data, training.settings, training.phases[training.phase]
    stored = _head_on_features(training, begun, progress) if isinstance(asked.keys, HeadConfig) else None
    model, images, method, first = stored or (training.model, data.x_train, training.method, 0)
    rows = min(settings.train.physical_batch, default_physical_batch(model, data.input_shape))
    inputs = tuple(images.shape[2:]) if stored else view_shape(method.views, model, tuple(images.shape[1:]))
    network = method.network(model)
    keys, batch = settings.gradients, training.plan.every_phase[training.phase].batch_size
    planned = 0 if stored else training.steps_of_phase * batch * method.views.count
    checkpointing = keys.checkpointing and not stored
    engines, training.engine = engines_for(
        begun.world, keys.engine, training.engine, network, method.loss, inputs, planned, checkpointing
    )
    context = StepContext(
        model,
        images,
        data.y_train,
        method,
        Clip(method.clip_rule, asked.clip_norm),
        engines,
        Mechanism(training.plan, begun.key, begun.ledger),
        training.optimizer,
        ROWS_OF_FEATURES if stored else rows,
        stored_views=stored is not None,
        phase=training.phase,
        world=begun.world,
        workers=begun.world.total(len(engines)),
        first_stored=first,
        network=None if network is model else network,
    )
    differs_on_a_rank = begun.world.any(not small_parts_change_no_bit(context))  # all ranks must split a batch alike
    return replace(context, small_parts=not differs_on_a_rank)


def _head_on_features(training: Training, begun: Begun, progress: Progress) -> tuple[nn.Module, Tensor, Method, int] | None:
    """Return the head, features, method and first record of this rank in a head phase; None if features cannot be stored."""
    model, images, keys = training.model, as_in_steps(training.data.x_train), training.phases[training.phase].keys
    assert isinstance(keys, HeadConfig)
    method = method_of_head_phase(training.method, keys.copies)
    trunk = trunk_of(model, method, training.data.input_shape)
    if trunk is None:
        return None

    tell = _named(progress, "features", max(begun.first, training.first_step), training.plan.steps)
    device = next(model.parameters()).device
    records, workers = records_of_rank(begun.world, method, len(images)), worker_count(device)
    precision = PRECISIONS[keys.precision]
    features = stored_features(trunk, images, method, begun.key, training.first_step, device, workers, tell, records, precision)
    return model.get_submodule(head_name(model)), features, method, records.start


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
        if plan.selection is not None:  # the budget of the whole search: a trial has none of its own
            return ceil_text(plan.target_epsilon, 2)
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
