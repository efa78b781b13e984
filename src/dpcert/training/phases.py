"""The phases of a training run as the settings ask for them: an optional head phase, then the main one.

A pretrained model is fine-tuned in two phases. The first trains the head on fixed features, with all records in each step. The
second trains what ``model.train`` selects. If that is the head itself, the first phase is enough and gets the whole budget,
unless views are adversarial: those change with the head.
"""

from dataclasses import dataclass

from ..models.parts import HEAD
from .settings import HeadConfig, Settings, TrainConfig


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


def phases_of(settings: Settings, dataset_size: int, trains: str, *, adversarial: bool) -> tuple[PhaseSettings, ...]:
    """Return the phases of a run, at least one. A function of public numbers only."""
    head, train = settings.head, settings.train
    steps = int(train.epochs * dataset_size / train.batch_size)
    main = PhaseSettings(trains, train, train.batch_size, steps, settings.privacy.clip_norm)
    if not head.steps:
        return (main,)
    alone = trains == HEAD and not adversarial
    batch_size = min(head.batch_size or dataset_size, dataset_size)
    first = PhaseSettings(HEAD, head, batch_size, head.steps, head.clip_norm, None if alone else head.budget)
    return (first,) if alone else (first, main)
