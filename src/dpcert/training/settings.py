"""Training settings, shared by config files, ``--set``, `dpcert.train` and the loop.

To add a key, add one field here, or in the module that uses it (`optimizers`, `schedules`, `averaging`).
"""

from typing import Annotated, Any

from pydantic import Field

from .._validate import one_of
from ..gradients.choose import ENGINES
from ..privacy.selection import LARGEST_MEAN, MOST_CURVES, Selection, merged
from ..sections import LARGEST, OPTIONAL, SPEED_ONLY, Section, name_in, validated
from .averaging import AVERAGES, AveragingKeys
from .features import PRECISIONS
from .optimizers import OptimizerKeys
from .schedules import ScheduleKeys, learning_rate_factor


class _LengthKeys(Section):
    epochs: float = Field(40, gt=0, le=1e6)
    batch_size: int = Field(512, ge=1, le=LARGEST)


class TrainConfig(AveragingKeys, ScheduleKeys, OptimizerKeys, _LengthKeys):  # fields are listed from the last base to the first
    """Length and speed. `physical_batch` (the most rows = examples x views in memory), `device`, `threads` affect speed only.

    A model whose gradients or activations need more memory runs with fewer rows.
    """

    seed: int | None = Field(None, ge=0, lt=2**63)
    physical_batch: Annotated[int, Field(ge=1, le=LARGEST), SPEED_ONLY] = 480
    device: Annotated[str, SPEED_ONLY] = "cpu"
    threads: Annotated[int | None, Field(ge=1, le=1024), SPEED_ONLY] = None

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step 0, 1 ... steps - 1."""
        return self.learning_rate * learning_rate_factor(self, step, steps)


class HeadConfig(AveragingKeys, ScheduleKeys, OptimizerKeys):
    """An optional first phase that trains the head of a pretrained model only; `steps` 0 leaves it out.

    Each step uses `batch_size` records (by default all of them) and `copies` noisy views that are drawn once per record, so
    that the features of the frozen layers are computed once. `budget` is the share of the privacy budget that the phase gets
    if another one follows. With `precision` bfloat16 the features are computed with 8 bits, in half the time on processors that
    have instructions for it. The defaults suit standardized features: a mean gradient of norm C moves the weights by 60.
    """

    learning_rate: float = Field(300.0, gt=0, le=1e6)
    averaging: Annotated[str, name_in(AVERAGES)] = "tail"
    steps: int = Field(0, ge=0, le=10**6)
    batch_size: int | None = Field(None, ge=1, le=LARGEST)
    clip_norm: float = Field(0.2, gt=0, le=1e6)
    copies: int = Field(8, ge=1, le=1024)
    precision: Annotated[str, name_in(PRECISIONS), OPTIONAL] = "float32"
    budget: float = Field(0.5, gt=0, lt=1)

    def stated(self) -> dict[str, Any]:
        """Return nothing without such a phase: configs of other runs have no section for it."""
        return super().stated() if self.steps else {}

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step 0, 1 ... steps - 1 of the phase."""
        return self.learning_rate * learning_rate_factor(self, step, steps)


class PrivacyConfig(Section):
    """The budget. `noise_seed` makes a run reproducible and NOT private.

    With ``model.noise_weights = "charged"``, `noise_weights_budget` is the share of the budget that their release gets (0.03
    unless given), and `noise_weights_clip` bounds what one record adds to it (0.005 unless given, a typical norm).
    """

    epsilon: float = Field(3.0, gt=0, le=100)
    delta: float = Field(1e-5, gt=0, lt=1)
    clip_norm: float = Field(0.1, gt=0, le=1e6)
    noise_seed: int | None = Field(None, ge=0, lt=2**63)
    noise_weights_budget: float | None = Field(None, gt=0, lt=1)
    noise_weights_clip: float | None = Field(None, ge=1e-12, le=1e6)


class SearchConfig(Section):
    """The charged search that a run is a trial of. `dpcert tune --charge` writes this section; nothing else may.

    `law` and `mean` describe the number of trials, `trial_epsilon` is the budget that calibrates the noise of one trial, and
    `curves` lists the releases [noise multiplier, sampling probability, steps] of a trial under each setting that it may draw.
    """

    law: Annotated[str | None, OPTIONAL] = None
    mean: float = Field(1.0, ge=1, le=LARGEST_MEAN)
    trial_epsilon: float = Field(1.0, gt=0, le=100)
    curves: list[list[list[float]]] | None = Field(None, min_length=1, max_length=MOST_CURVES)

    def stated(self) -> dict[str, Any]:
        """Return nothing without such a search: configs of other runs have no section for it."""
        return {} if self.law is None else super().stated()

    @property
    def selection(self) -> Selection | None:
        """The event that the ledger records; None without a search."""
        return None if self.law is None else Selection(self.law, self.mean, tuple(map(merged, self.curves or ())))


class GradientsConfig(Section):
    """How per-example gradients are computed. Both keys affect speed, memory and rounding errors only.

    `engine` is auto, compiled (machine code for chains of known layers; needs a C++ compiler), layerwise or vmap (any model).
    Auto measures at the start of a long run, and a resumed run repeats its choice.
    `checkpointing` keeps few activations and computes the others again: less memory for large models, about twice the time,
    and the same bits.
    """

    engine: Annotated[str, name_in(ENGINES), SPEED_ONLY] = "auto"
    checkpointing: Annotated[bool, SPEED_ONLY, OPTIONAL] = False


class Settings(Section):
    """Everything training needs besides model, data and method."""

    train: TrainConfig = TrainConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    gradients: GradientsConfig = GradientsConfig()
    head: HeadConfig = HeadConfig()
    search: SearchConfig = SearchConfig()

    @classmethod
    def of(cls, **values: Any) -> "Settings":
        """Build settings from key names without sections (``epochs=1, epsilon=3.0``): each name belongs to one section.

        ``head`` is a table of its own, ``{"steps": 100}``: its keys have the names of those in ``[train]``.
        """
        tables: dict[str, Any] = {"head": values.pop("head", {})}
        for key, value in values.items():
            section = SECTION_OF[one_of("train() setting", key, SECTION_OF)]
            tables.setdefault(section, {})[key] = value
        return validated(cls, tables, "train()")


SECTION_OF = {
    key: section
    for section, kind in (("train", TrainConfig), ("privacy", PrivacyConfig), ("gradients", GradientsConfig))
    for key in kind.model_fields
}
