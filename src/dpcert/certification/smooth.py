"""PREDICT and CERTIFY of Cohen et al. (2019), on one screen."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ..rng import Purpose
from .bounds import certified_radius, lower_confidence_bound, top_two_differ

ABSTAIN = -1


class Counter(Protocol):
    """Counts the votes of a classifier on noisy copies of one input."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise."""

    def count(self, x: Tensor, votes: int, purpose: Purpose, index: int) -> np.ndarray:
        """Votes for each class; the noise of different purposes is independent."""


@dataclass(frozen=True)
class Certificate:
    """The outcome for one input. `count` of the `n` estimation votes fell on the selected class."""

    predict: int
    radius: float
    count: int
    n: int
    p_lower: float


def certify(counter: Counter, x: Tensor, n0: int, n: int, alpha: float, index: int = 0) -> Certificate:
    """CERTIFY: a class and an L2 radius, or abstain.

    Guarantee: with probability at least 1 - alpha over the noise, either it abstains or the smoothed classifier predicts
    `predict` for every input closer than `radius` to x. Selection and estimation use disjoint noise, so choosing the class
    does not bias the bound.
    """
    selection = counter.count(x, n0, Purpose.CERTIFY_SELECTION, index)
    selected = int(selection.argmax())
    count = int(counter.count(x, n, Purpose.CERTIFY_ESTIMATION, index)[selected])
    p_lower = lower_confidence_bound(count, n, alpha)
    radius = certified_radius(p_lower, counter.sigma)
    return Certificate(selected if radius > 0.0 else ABSTAIN, radius, count, n, p_lower)


def predict(counter: Counter, x: Tensor, n: int, alpha: float, index: int = 0) -> int:
    """PREDICT: the class of the smoothed classifier, or abstain.

    Guarantee: it returns a class other than the smoothed classifier's with probability at most alpha.
    """
    votes = counter.count(x, n, Purpose.PREDICT, index)
    second, first = (int(c) for c in np.argsort(votes, kind="stable")[-2:])
    return first if top_two_differ(int(votes[first]), int(votes[second]), alpha) else ABSTAIN
