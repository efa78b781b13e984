"""Counting votes: the classes a classifier gives to noisy copies of one input.

A vote is *wrong* (it counts for no class) if its logits hold a NaN or if the two largest are closer than rounding can tell
apart: another batch size or thread count could then have voted otherwise.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..rng import Purpose, normal_at_positions

TIE_TOLERANCE = 2.0**-16  # of the largest logit; float32 rounding through a small network stays below it
DEFAULT_BATCH = 500


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model for voting: evaluation mode, no gradients, channels innermost (pools are several times faster)."""
    voter = copy.deepcopy(model).eval()
    voter.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.inference_mode():
        yield voter


@dataclass(frozen=True)
class VoteCounter:
    """Counts votes of one classifier at one sigma, with noise that is a function of (key, purpose, index of the input)."""

    model: nn.Module
    sigma: float
    key: bytes
    batch: int = DEFAULT_BATCH

    def count(self, x: Tensor, votes: int, purpose: Purpose, index: int) -> np.ndarray:
        """Votes for each class (float noise N(0, sigma^2 I) added to `x`, never clamped); wrong votes are in none."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        x = x.to(device)
        total: np.ndarray | None = None
        for start in range(0, votes, self.batch):
            stop = min(start + self.batch, votes)
            noise = normal_at_positions(self.key, purpose, start, stop, tuple(x.shape), device, index)
            logits = self.model(torch.add(x, noise, alpha=self.sigma))
            counts = winners(logits)
            total = counts if total is None else total + counts
        assert total is not None
        return total


def winners(logits: Tensor) -> np.ndarray:
    """Votes for each class of ``logits [rows, classes]``; a tie or a NaN votes for nobody."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ModelError(f"the classifier gives outputs of shape {list(logits.shape)}, must be [rows, 2 or more classes]")
    classes = logits.shape[1]
    best, chosen = logits.float().topk(2, dim=1)
    clear = best[:, 0] - best[:, 1] > TIE_TOLERANCE * logits.abs().amax(dim=1)  # False wherever a NaN is
    votes = torch.where(clear, chosen[:, 0], classes)
    return torch.bincount(votes, minlength=classes + 1)[:classes].cpu().numpy()
