"""The Gaussian noise of DP-SGD: float64, from a secret key, scaled by the sensitivity of the value it protects."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..rng import Purpose, uniform_words


class BoundedValue(Protocol):
    """A float64 vector with a bound on how far one record can move it (L2)."""

    @property
    def value(self) -> Tensor:
        """The vector."""

    @property
    def sensitivity(self) -> float:
        """The largest L2 change when one record is added or removed."""


def standard_normal(count: int, key: bytes, step: int) -> np.ndarray:
    """Return `count` independent N(0, 1) samples in float64, by the Box-Muller transform of AES-CTR words.

    Guarantee: the largest magnitude is sqrt(2 * 64 * ln 2) = 9.42; PyTorch's float32 normal on a CPU stops at 5.77,
    which alone breaks delta = 1e-5.
    """
    pairs = (count + 1) // 2
    words = uniform_words(key, Purpose.DP_NOISE, 2 * pairs, step).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log((words[:pairs] + 1.0) * 2.0**-64))  # the argument is in (0, 1]
    angle = words[pairs:] * (2.0 * np.pi * 2.0**-64)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def add(bounded: BoundedValue, noise_multiplier: float, key: bytes, step: int) -> Tensor:
    """Return value + N(0, (noise_multiplier * sensitivity)^2 I), in float64.

    The scale comes from the value, not from a separate clip norm, so noise and clipping cannot disagree.
    Edge cases: noise_multiplier = 0 adds nothing (non-private training; the ledger says so).
    """
    if noise_multiplier == 0.0:
        return bounded.value
    if not np.isfinite(bounded.sensitivity):
        raise ValueError("noise cannot protect a value with unbounded sensitivity; use a clip rule other than none")
    noise = torch.from_numpy(standard_normal(bounded.value.numel(), key, step))
    return bounded.value + (noise_multiplier * bounded.sensitivity) * noise.to(bounded.value.device)
