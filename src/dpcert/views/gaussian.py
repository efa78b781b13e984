"""Gaussian views: the example and K noisy copies (augmentation multiplicity, De et al. 2022; Cohen et al. 2019)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in
from ..errors import ConfigError


@dataclass(frozen=True)
class Gaussian:
    """x^0 = x and x^j = x + eta_j with eta_j ~ N(0, sigma^2 I), j = 1..K, in pixel units of inputs in [0, 1].

    Noisy inputs are never clamped, as in the smoothed classifier.
    ``keep_original=False`` drops x^0 (with K = 1: the line marked 0 in the paper's augmentation ablation).
    """

    sigma: float = 0.5
    copies: int = 2
    keep_original: bool = True
    name: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        finite_in("method.sigma", self.sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
        integer_in("method.copies", self.copies, 0, 1024)
        if self.copies == 0:
            raise ConfigError("method.copies is 0, Gaussian views need at least one noisy copy; use views none (dpsgd)")

    @property
    def count(self) -> int:
        """R, the number of views of an example."""
        return self.copies + int(self.keep_original)

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``x [b, ...]``, standard normal ``noise [b, K, ...]`` -> ``[b, R, ...]``."""
        noisy = torch.add(x.unsqueeze(1), noise, alpha=self.sigma)
        return torch.cat([x.unsqueeze(1), noisy], dim=1) if self.keep_original else noisy
