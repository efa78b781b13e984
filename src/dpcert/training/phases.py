"""The phases of a training run as the settings ask for them: an optional head phase, then the main one.

A pretrained model is fine-tuned in two phases. The first trains the head on fixed features, with all records in each step. The
second trains what ``model.train`` selects. If that is the head itself, the first phase is enough and gets the whole budget,
unless views are adversarial: those change with the head.

With ``model.noise_weights = "charged"`` one more phase comes before all others: a single release over all records, from which
the noise scales of the channels follow (`noise_weights`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..methods import Method
from ..models.parts import HEAD
from ..models.systems import CHARGED
from ..privacy.ledger import NOISE_WEIGHTS
from ..privacy.unbounded import UNBOUNDED
from .settings import HeadConfig, Settings, TrainConfig

USUAL_SHARE, USUAL_CLIP = 0.03, 0.005  # of the release of noise weights


@dataclass(frozen=True)
class PhaseSettings:
    """Settings of one phase. `budget` is its share of the privacy budget; None: what the others leave."""

    trains: str
    keys: TrainConfig | HeadConfig
    batch_size: int
    steps: int
    clip_norm: float
    budget: float | None = None

    @property
    def trains_the_head_first(self) -> bool:
        """Whether this is the phase that `HeadConfig` describes."""
        return isinstance(self.keys, HeadConfig)

    @property
    def releases_noise_weights(self) -> bool:
        """Whether this phase trains nothing, and releases the noise scales of the channels."""
        return self.trains == NOISE_WEIGHTS


def phases_of(
    settings: Settings, dataset_size: int, trains: str, *, adversarial: bool, noise_weights: str | Sequence[float] | None = None
) -> tuple[PhaseSettings, ...]:
    """Return the phases of a run, at least one. A function of public numbers only.

    `trains` and `noise_weights` are those of the model.
    """
    trained = _phases_that_train(settings, dataset_size, trains, adversarial=adversarial)
    if noise_weights != CHARGED:
        return trained
    clip_norm, budget = settings.privacy.noise_weights_clip, settings.privacy.noise_weights_budget
    release = PhaseSettings(
        NOISE_WEIGHTS,
        TrainConfig(),
        batch_size=dataset_size,
        steps=1,
        clip_norm=USUAL_CLIP if clip_norm is None else clip_norm,
        budget=USUAL_SHARE if budget is None else budget,
    )
    return (release, *trained)


def _phases_that_train(settings: Settings, dataset_size: int, trains: str, *, adversarial: bool) -> tuple[PhaseSettings, ...]:
    head, train = settings.head, settings.train
    steps = int(train.epochs * dataset_size / train.batch_size)
    main = PhaseSettings(trains, train, train.batch_size, steps, settings.privacy.clip_norm)
    if not head.steps:
        return (main,)
    alone = trains == HEAD and not adversarial
    batch_size = min(head.batch_size or dataset_size, dataset_size)
    first = PhaseSettings(HEAD, head, batch_size, head.steps, head.clip_norm, None if alone else head.budget)
    return (first,) if alone else (first, main)


def refuse_unusable(settings: Settings, method: Method, noise_weights: str | Sequence[float] | None) -> None:
    """Raise if noise weights cannot be charged for this method, or if keys are set that nothing uses."""
    if noise_weights != CHARGED:
        for key in ("noise_weights_budget", "noise_weights_clip"):
            if getattr(settings.privacy, key) is not None:
                raise ConfigError(f"privacy.{key} is set, but model.noise_weights is not {CHARGED}; remove it")
    elif method.clip_rule.name in UNBOUNDED:
        raise ConfigError(
            f"model.noise_weights is {CHARGED!r}, but method {method.name} (clip rule {method.clip_rule.name}) is not private, "
            "so there is no budget to charge; use initialization or uniform"
        )
