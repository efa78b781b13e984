"""Audits of the real training step: does one record move the release by more than the ledger charges for it?

One step, white box: q = 1, noise rho, and a tiny model. The adversary knows the model, the other records, the canary and the
method. It does not know the noise of the views or of the release. It projects each release onto the direction in which the
canary moves the clipped sum, and guesses with a threshold at the midpoint.

Whole training runs use the real loop from the plan to the last step, and only the final weights are released: `many_runs`
trains many times with and without one canary, `one_run` trains once with a random half of many canaries. Softmax regression
from zero weights without momentum ends at minus the (scaled) sum of all releases, so its final weights hide nothing from the
adversary. A canary with one bright pixel and one label has a gradient direction that hardly overlaps with others.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in
from ..data.dataset import Dataset
from ..errors import ConfigError, DpcertWarning
from ..gradients.choose import choose
from ..gradients.engine import Clip, trainable
from ..methods import ALL_METHODS, Method, view_shape
from ..models.check import check_model
from ..models.denoiser import Denoised
from ..models.factory import Factory, build_custom
from ..models.registry import build_model
from ..models.systems import DENOISER, as_system
from ..privacy.accounting import compose, gaussian_epsilon
from ..privacy.audit import LowerBound, guess_lower_bound, lower_bound
from ..privacy.ledger import Ledger
from ..privacy.mechanism import Mechanism, Plan, opening_facts
from ..privacy.unbounded import UNBOUNDED
from ..progress import Progress, silent
from ..rng import KEY_BYTES, Purpose, key_from_seed, secret_key, stream_bytes
from .loop import Run, fit
from .settings import Settings
from .step import StepContext, clipped_sum, private_step

SIDE, CLASSES, OTHERS = 4, 5, 3  # images of 4 x 4 pixels, 85 parameters, three records and the canary
PUBLIC_SIZE = 1000  # N of the audited training runs, whatever the number of records: only q = B / N matters
LEARNING_DRAWS = 200  # noiseless sums from which the adversary learns its direction; they are not scored


@dataclass(frozen=True)
class OneStepAudit:
    """The verdict on one method."""

    method: str
    bound: LowerBound
    exact_epsilon: float

    @property
    def share(self) -> float:
        """Lower bound over exact epsilon: above 1 the guarantee is broken, near 0 the audit detects nothing."""
        return self.bound.gaussian_epsilon / self.exact_epsilon

    @property
    def holds(self) -> bool:
        """Whether the release is consistent with the guarantee."""
        return self.share <= 1.0

    @property
    def verdict(self) -> str:
        """The result in one word."""
        return "holds" if self.holds else "BROKEN"


def one_step(
    method: Method,
    *,
    draws: int = 10_000,
    noise_multiplier: float = 1.0,
    clip_norm: float = 0.1,
    confidence: float = 0.999,
    delta: float = 1e-5,
    seed: int | None = None,
    engine: str = "auto",
    factory: Factory | None = None,
    progress: Progress = silent,
) -> OneStepAudit:
    """Take `draws` real steps without the canary and `draws` with it, and bound epsilon from below.

    `seed` makes the audit reproducible; the step itself draws its noise from a key, as always.
    False alarms: `1 - confidence` for a step that meets its guarantee exactly. The model is a linear one, or what `factory`
    makes for images of 1 x 4 x 4 and five classes.
    """
    integer_in("draws", draws, 100, 10**8, remedy="10000 is typical")
    finite_in("noise multiplier", noise_multiplier, 1e-3, 1e3, remedy="about 1 is typical")
    finite_in("clip norm", clip_norm, 0.0, 1e6, open_low=True)
    require_a_promise(method)
    key = secret_key() if seed is None else key_from_seed(seed, "audit")
    with_canary = _Game(method, clip_norm, noise_multiplier, engine, _child(key, 0), draws, canary=True, factory=factory)
    without = _Game(method, clip_norm, noise_multiplier, engine, _child(key, 1), draws, canary=False, factory=factory)
    direction, threshold = _adversary(without, with_canary, draws)
    scores: list[np.ndarray] = []
    for place, game in enumerate((without, with_canary)):
        values = np.empty(draws)
        for step in range(draws):
            values[step] = float(game.release(step) @ direction)
            progress(place * draws + step + 1, 2 * draws)
        scores.append(values)
    bound = lower_bound(scores[0], scores[1], threshold, confidence=confidence, delta=delta)
    return OneStepAudit(method.name, bound, gaussian_epsilon(1.0 / noise_multiplier, delta))


def require_a_promise(method: Method) -> None:
    """Refuse to audit a method without a privacy guarantee."""
    if method.clip_rule.name in UNBOUNDED:
        raise ConfigError(
            f"method {method.name} does not clip and noise each gradient: it has no privacy guarantee to audit; choose another"
        )


def audited_model(method: Method) -> nn.Module:
    """Return the tiny model whose step is audited: a linear one, or that of the system that the method needs."""
    row, shape = ALL_METHODS.get(method.name), (1, SIDE, SIDE)
    if row is None or row.system is None:
        return build_model("linear", input_shape=shape, classes=CLASSES, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if row.system == DENOISER:
            network: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))
            return Denoised(network, 1, depth=3, width=8)
        hidden = nn.Conv2d(1, 4, 3)
        hidden.weight.data.abs_()  # so that the bright canary stays far above the noise behind this layer
        network = nn.Sequential(hidden, nn.Tanh(), nn.Flatten(), nn.Linear(4 * (SIDE - 2) ** 2, CLASSES))
        return as_system(row.system, network, shape, method.views.sigma or 0.5)


class _Game:
    """The real step on a tiny data set, with or without the canary; every step starts from the same weights."""

    def __init__(
        self,
        method: Method,
        clip_norm: float,
        noise: float,
        engine: str,
        key: bytes,
        draws: int,
        *,
        canary: bool,
        factory: Factory | None = None,
    ) -> None:
        images, labels = records(canary)
        shape = (1, SIDE, SIDE)
        model = audited_model(method) if factory is None else build_custom(factory, shape, CLASSES, seed=0)
        if factory is not None:
            check_model(model, shape, CLASSES)
        plan = Plan(
            dataset_size=OTHERS + 1,
            size_given=True,
            classes=CLASSES,
            classes_given=True,
            held_out=0,
            batch_size=OTHERS + 1,  # q = 1, for both neighbors: a public constant
            steps=draws + LEARNING_DRAWS,
            clip_rule=method.clip_rule.name,
            clip_parameters={},
            clip_norm=clip_norm,
            noise_multiplier=noise,
            target_epsilon=None,
            delta=1e-5,
        )
        ledger = Ledger(None, stream_bytes(key, Purpose.LEDGER_MAC, KEY_BYTES))
        ledger.open(opening_facts(plan, noise_is_secret=True))
        # A learning rate of B cancels the division by B: the weight update is the noised sum itself.
        optimizer = torch.optim.SGD(trainable(model).values(), lr=float(plan.batch_size))
        network = method.network(model)
        engines = choose(engine, network, method.loss, view_shape(method.views, model, shape))
        clip = Clip(method.clip_rule, clip_norm)
        self.context = StepContext(
            model, images, labels, method, clip, engines, Mechanism(plan, key, ledger), optimizer, 480, network=network
        )
        self._parameters = list(trainable(model).values())
        self._start = [parameter.detach().clone() for parameter in self._parameters]

    def release(self, step: int) -> Tensor:
        """Take one real step and return the noised sum, read from the weights."""
        self.context.mechanism.charge(step)
        private_step(self.context, step)
        with torch.no_grad():
            moved = [start - now for start, now in zip(self._start, self._parameters, strict=True)]
            for start, now in zip(self._start, self._parameters, strict=True):
                now.copy_(start)
        return torch.cat([part.flatten() for part in moved]).double()

    def noiseless(self, step: int) -> Tensor:
        """Return the clipped sum of one step: the adversary can compute it, with its own view noise."""
        batch = torch.arange(len(self.context.images))
        return clipped_sum(self.context, batch, step, self.context.physical_batch).value


def records(canary: bool) -> tuple[Tensor, Tensor]:
    """Return three dim images, and a bright one with a label the model finds unlikely: its gradient norm is far above C."""
    generator = torch.Generator().manual_seed(1)
    images = 0.3 * torch.rand((OTHERS, 1, SIDE, SIDE), generator=generator)
    labels = torch.arange(OTHERS) % CLASSES
    if canary:
        images = torch.cat([images, torch.ones(1, 1, SIDE, SIDE)])
        labels = torch.cat([labels, torch.tensor([CLASSES - 1])])
    return images, labels


def _adversary(without: _Game, with_canary: _Game, draws: int) -> tuple[Tensor, float]:
    """Return the direction and threshold, learned from the sums of steps that are not scored."""
    steps = range(draws, draws + LEARNING_DRAWS)
    low = torch.stack([without.noiseless(step) for step in steps]).mean(dim=0)
    high = torch.stack([with_canary.noiseless(step) for step in steps]).mean(dim=0)
    direction = (high - low) / torch.linalg.vector_norm(high - low).clamp(min=1e-300)
    return direction, float((high + low) @ direction / 2)


def _child(key: bytes, number: int) -> bytes:
    return stream_bytes(key, Purpose.AUDIT, KEY_BYTES, number)


@dataclass(frozen=True)
class Trainings:
    """The training runs that are audited: a budget and how it is spent. q = 1 shows the adversary most."""

    method: Method
    epsilon: float = 4.0
    delta: float = 1e-5
    steps: int = 4
    sampling_probability: float = 1.0
    clip_norm: float = 0.1

    def __post_init__(self) -> None:
        require_a_promise(self.method)
        if getattr(ALL_METHODS.get(self.method.name), "system", None) is not None:
            raise ConfigError(
                f"method {self.method.name} needs a model of its own, and whole trainings are audited with a linear one; "
                "audit its step: leave out --runs and --one-run"
            )
        integer_in("steps", self.steps, 1, 10_000)
        finite_in("sampling probability", self.sampling_probability, 1.0 / PUBLIC_SIZE, 1.0)

    def run(self, images: Tensor, labels: Tensor, *, classes: int, noise_seed: int | None) -> Run:
        """Train softmax regression from zero weights once, with the real loop, in memory."""
        batch_size = round(self.sampling_probability * PUBLIC_SIZE)
        settings = Settings.of(
            epsilon=self.epsilon,
            delta=self.delta,
            epochs=(self.steps + 0.5) * batch_size / PUBLIC_SIZE,  # T is rounded down to `steps`
            batch_size=batch_size,
            learning_rate=0.01 * batch_size,  # so small that gradient norms stay above C: the canary contributes its full C
            momentum=0.0,
            optimizer="sgd",
            clip_norm=self.clip_norm,
            noise_seed=noise_seed,
        )
        model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, classes, bias=False))
        nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
        data = Dataset(images, labels, images[:1], labels[:1], size=PUBLIC_SIZE, classes=classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DpcertWarning)  # remarks about how well the method learns do not matter here
            return fit(model, data, self.method, settings)


@dataclass(frozen=True)
class TrainingAudit:
    """The verdict on whole training runs: the bound shown, the promised epsilon, and the largest bound the audit could show."""

    method: str
    at_least: float
    promised: float
    ceiling: float
    confidence: float

    @property
    def holds(self) -> bool:
        """Whether the bound is consistent with the promised epsilon."""
        return self.at_least <= self.promised

    @property
    def verdict(self) -> str:
        """The result in words; it says so if the audit could not have detected a violation."""
        if self.ceiling <= self.promised:
            return "not refutable by this audit (the ceiling is below the promise)"
        return "holds" if self.holds else "BROKEN"


def many_runs(
    trainings: Trainings, *, runs: int = 500, confidence: float = 0.999, seed: int | None = None, progress: Progress = silent
) -> TrainingAudit:
    """Train `runs` times without the canary and `runs` times with it, and bound epsilon from below.

    Without subsampling the releases are one Gaussian mechanism, so the Gaussian bound is used; otherwise the bound for any
    mechanism. `seed` makes the audit reproducible; without it every training run draws a secret key, as always. False
    alarms: 1 - confidence.
    """
    integer_in("runs", runs, 10, 10**7, remedy="500 is typical")
    scores = np.empty((2, runs))
    for canary in (0, 1):
        images, labels = _single_canary(bool(canary))
        for number in range(runs):
            seed_of_run = None if seed is None else _noise_seed(seed, 2 * number + canary)
            run = trainings.run(images, labels, classes=CLASSES, noise_seed=seed_of_run)
            scores[canary, number] = _scores(run, trainings, *_canaries(1, CLASSES))[0]
            progress(canary * runs + number + 1, 2 * runs)
    half_way = trainings.steps * trainings.sampling_probability / 2  # the canary's pixel is dark in all other records
    bound = lower_bound(scores[0], scores[1], half_way, confidence=confidence, delta=trainings.delta)
    gaussian = run.plan.sampling_probability == 1.0
    at_least, ceiling = (b.gaussian_epsilon if gaussian else b.any_epsilon for b in (bound, bound.best))
    return TrainingAudit(trainings.method.name, at_least, _promised(run), ceiling, confidence)


def one_run(
    trainings: Trainings, *, canaries: int = 2000, guesses: int | None = None, confidence: float = 0.99, seed: int | None = None
) -> TrainingAudit:
    """Train ONCE, include each canary by a fair coin, guess `guesses` coins (default: half) by score, count right guesses.

    The highest scores are guessed "in" and equally many of the lowest "out"; the rest abstain. False alarms: 1 - confidence.
    """
    integer_in("canaries", canaries, 10, 10**6, remedy="2000 is typical")
    each = (canaries // 2 if guesses is None else integer_in("guesses", guesses, 2, canaries)) // 2
    key = secret_key() if seed is None else key_from_seed(seed, "audit")
    coins = np.frombuffer(stream_bytes(key, Purpose.AUDIT, canaries), dtype=np.uint8) % 2 == 1
    classes = max(CLASSES, -(-canaries // SIDE**2))
    images, labels = _canaries(canaries, classes)
    inside = torch.from_numpy(coins)
    if not bool(inside.any()):
        raise ConfigError(f"none of the {canaries} canaries was drawn; use more canaries")
    seed_of_run = None if seed is None else _noise_seed(seed, 0)
    run = trainings.run(images[inside], labels[inside], classes=classes, noise_seed=seed_of_run)
    order = np.argsort(_scores(run, trainings, images, labels), kind="stable")
    correct = int(coins[order[-each:]].sum() + (~coins[order[:each]]).sum())
    bound = guess_lower_bound(correct, 2 * each, canaries, confidence=confidence, delta=trainings.delta)
    return TrainingAudit(trainings.method.name, bound.epsilon, _promised(run), bound.ceiling, confidence)


def _canaries(count: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return canaries, each with a unique pair of bright pixel and label (the first one is the canary of `_single_canary`)."""
    number = torch.arange(count)
    images = torch.zeros(count, SIDE * SIDE)
    images[number, number // classes % SIDE**2] = 1.0
    return images.reshape(count, 1, SIDE, SIDE), (classes - 1 - number) % classes


def _single_canary(inside: bool) -> tuple[Tensor, Tensor]:
    """Return dim records whose first pixel is 0, with or without the canary, whose only bright pixel is the first."""
    images, labels = records(canary=False)
    images[:, 0, 0, 0] = 0.0
    image, label = _canaries(1, CLASSES)
    return (torch.cat([images, image]), torch.cat([labels, label])) if inside else (images, labels)


def _scores(run: Run, trainings: Trainings, images: Tensor, labels: Tensor) -> np.ndarray:
    """Return how far the weights moved along each canary's first gradient (1/k - [y]) x, in units of one clipped gradient."""
    moved = next(iter(trainable(run.model).values())).detach().double()
    classes = len(moved)
    gradient = torch.full((len(labels), classes), 1.0 / classes, dtype=torch.float64)
    gradient[torch.arange(len(labels)), labels] -= 1.0
    along = -((images.flatten(1).double() @ moved.T) * gradient).sum(dim=1)
    length = torch.linalg.vector_norm(gradient, dim=1) * torch.linalg.vector_norm(images.flatten(1), dim=1)
    scores: np.ndarray = (along / (length * 0.01 * trainings.clip_norm)).numpy()
    return scores


def _promised(run: Run) -> float:
    """Return the epsilon that the ledger charges, as if the noise were secret (the audit may have seeded it)."""
    return compose(run.ledger.releases(), run.plan.delta)


def _noise_seed(seed: int, number: int) -> int:
    return int.from_bytes(stream_bytes(key_from_seed(seed, "audit"), Purpose.AUDIT, 8, number, part=1), "big") >> 1
