"""Settings of a pretraining: everything that determines its weights."""

import dataclasses
from dataclasses import dataclass

from .._validate import finite_in, integer_in, one_of
from ..models.feature_cnn import BACKBONES

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """Settings of `dpcert pretrain`. SGD with Nesterov momentum; the learning rate rises linearly, then falls to 0."""

    model: str = "resnet-32"
    epochs: int = 24
    batch_size: int = 256
    learning_rate: float = 0.4
    warmup: float = 0.15  # share of the steps
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    ema: float = 0.999  # of the weights, per step
    held_out: int = 3000
    precision: str = "float32"  # of the products in the forward and backward pass; weights and statistics stay float32
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("--model", self.model, BACKBONES)
        integer_in("--epochs", self.epochs, 1, 100_000)
        integer_in("--batch-size", self.batch_size, 2, 1 << 20)
        finite_in("--learning-rate", self.learning_rate, 0, 1e3, open_low=True)
        one_of("--precision", self.precision, PRECISIONS)
        integer_in("--seed", self.seed, 0, 2**63 - 1)

    def steps(self, images: int) -> int:
        """The total number of steps; the last, incomplete batch of an epoch is dropped."""
        return self.epochs * (images // self.batch_size)

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of step 0, 1 ... steps - 1."""
        peak = max(1, round(self.warmup * steps))
        share = (step + 1) / peak if step < peak else (steps - step) / max(1, steps - peak + 1)
        return self.learning_rate * share

    def as_dict(self) -> dict[str, int | float | str]:
        """Plain values, for the card."""
        return dataclasses.asdict(self)
