"""The original example as its only view."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn


@dataclass(frozen=True)
class Original:
    """One view: x (Regular, DPSGD, PSAC)."""

    name: ClassVar[str] = "none"
    sigma: ClassVar[None] = None
    copies: ClassVar[int] = 0
    count: ClassVar[int] = 1

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``[b, ...] -> [b, 1, ...]``."""
        return x.unsqueeze(1)
