"""Audits of the step that is really taken: does one record move the release by more than the ledger charges for it?

One step, white box: q = 1, noise rho, a model so small that the noise has nowhere to hide. The adversary knows the model, the
other records, the canary and the method; it does not know the noise of the views nor that of the release. It projects each
release on the direction in which the canary moves the clipped sum, and guesses by a threshold half way.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._validate import finite_in, integer_in
from ..errors import ConfigError
from ..gradients.choose import choose
from ..gradients.engine import Clip, trainable
from ..methods import Method
from ..models.registry import build_model
from ..privacy.audit import LowerBound, gaussian_epsilon, lower_bound
from ..privacy.ledger import Ledger
from ..privacy.mechanism import Mechanism, Plan, opening_facts
from ..progress import Progress, silent
from ..rng import KEY_BYTES, Purpose, key_from_seed, secret_key, stream_bytes
from .step import Problem, clipped_sum, private_step

SIDE, CLASSES, OTHERS = 4, 5, 3  # images of 4 x 4 pixels, 85 parameters, three records beside the canary
LEARNING_DRAWS = 200  # noiseless sums from which the adversary learns its direction, drawn apart from the scores


@dataclass(frozen=True)
class OneStepAudit:
    """The verdict on one method."""

    method: str
    bound: LowerBound
    exact_epsilon: float

    @property
    def share(self) -> float:
        """Lower bound over exact epsilon: above 1 the promise is broken, near 0 the audit sees nothing."""
        return self.bound.gaussian_epsilon / self.exact_epsilon

    @property
    def holds(self) -> bool:
        """Whether the release is consistent with the promise."""
        return self.share <= 1.0


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
    progress: Progress = silent,
) -> OneStepAudit:
    """Take `draws` real steps without the canary and `draws` with it, and bound epsilon from below.

    `seed` makes the audit reproducible; the step itself draws its noise as it always does, from a key.
    False alarms: `1 - confidence` for a step that keeps its promise exactly.
    """
    integer_in("draws", draws, 100, 10**8, remedy="10000 are usual")
    finite_in("noise multiplier", noise_multiplier, 0.0, 1e3, open_low=True)
    finite_in("clip norm", clip_norm, 0.0, 1e6, open_low=True)
    if method.clip_rule.name == "none":
        raise ConfigError(f"method {method.name} does not clip: it promises nothing that could be audited")
    key = secret_key() if seed is None else key_from_seed(seed, "audit")
    with_canary = _Game(method, clip_norm, noise_multiplier, engine, _child(key, 0), draws, canary=True)
    without = _Game(method, clip_norm, noise_multiplier, engine, _child(key, 1), draws, canary=False)
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


class _Game:
    """The real step on a tiny data set, with or without the canary; every step starts from the same weights."""

    def __init__(
        self, method: Method, clip_norm: float, noise: float, engine: str, key: bytes, draws: int, *, canary: bool
    ) -> None:
        images, labels = records(canary)
        model = build_model("linear", input_shape=(1, SIDE, SIDE), classes=CLASSES, seed=0)
        plan = Plan(
            dataset_size=OTHERS + 1,
            size_given=True,
            classes=CLASSES,
            classes_given=True,
            held_out=0,
            batch_size=OTHERS + 1,  # q = 1, for both neighbours: a public constant
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
        # A learning rate of B undoes the division by B: the change of the weights is the noised sum itself.
        optimizer = torch.optim.SGD(trainable(model).values(), lr=float(plan.batch_size))
        engines = choose(engine, model, method.loss, (1, SIDE, SIDE))
        clip = Clip(method.clip_rule, clip_norm)
        self.problem = Problem(
            model, images, labels, method, clip, engines, Mechanism(plan, key, ledger), optimizer, physical_batch=480
        )
        self._parameters = list(trainable(model).values())
        self._start = [parameter.detach().clone() for parameter in self._parameters]

    def release(self, step: int) -> Tensor:
        """What one real step shows: the noised sum, read off the weights."""
        self.problem.mechanism.charge(step)
        private_step(self.problem, step)
        with torch.no_grad():
            moved = [start - now for start, now in zip(self._start, self._parameters, strict=True)]
            for start, now in zip(self._start, self._parameters, strict=True):
                now.copy_(start)
        return torch.cat([part.flatten() for part in moved]).double()

    def noiseless(self, step: int) -> Tensor:
        """The clipped sum of one step: what the adversary can compute for itself, with noises of its own for the views."""
        batch = torch.arange(len(self.problem.images))
        return clipped_sum(self.problem, batch, step, self.problem.physical_batch).value


def records(canary: bool) -> tuple[Tensor, Tensor]:
    """Three dim images, and a bright one with a label the model finds unlikely: its gradient is far longer than C."""
    generator = torch.Generator().manual_seed(1)
    images = 0.3 * torch.rand((OTHERS, 1, SIDE, SIDE), generator=generator)
    labels = torch.arange(OTHERS) % CLASSES
    if canary:
        images = torch.cat([images, torch.ones(1, 1, SIDE, SIDE)])
        labels = torch.cat([labels, torch.tensor([CLASSES - 1])])
    return images, labels


def _adversary(without: _Game, with_canary: _Game, draws: int) -> tuple[Tensor, float]:
    """The direction and threshold, learnt from sums of other steps than those that are scored."""
    steps = range(draws, draws + LEARNING_DRAWS)
    low = torch.stack([without.noiseless(step) for step in steps]).mean(dim=0)
    high = torch.stack([with_canary.noiseless(step) for step in steps]).mean(dim=0)
    direction = (high - low) / torch.linalg.vector_norm(high - low).clamp(min=1e-300)
    return direction, float((high + low) @ direction / 2)


def _child(key: bytes, number: int) -> bytes:
    return stream_bytes(key, Purpose.AUDIT, KEY_BYTES, number)
