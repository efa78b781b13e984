"""PREDICT and CERTIFY of Cohen et al. (2019), and the test "is it robust at r?"."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr
from torch import Tensor

from ..rng import Purpose
from .bounds import certified_radius, lower_confidence_bound, top_two_differ
from .sequence import log_evidence_above, log_evidence_below, looks

ABSTAIN = -1


class Counter(Protocol):
    """Counts the votes of a classifier on noisy copies of one input."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on the image, or of the noise on the image that would give the same radii."""

    def count(self, x: Tensor, start: int, stop: int, purpose: Purpose, index: int) -> np.ndarray:
        """Return votes start .. stop - 1 for input `index`, by class; a tie or a NaN counts for no class.

        Noise N(0, sigma^2 I) is added to `x` (or, under another law, inside the model) and never clamped. Noise of different
        purposes is independent.
        """


@dataclass(frozen=True)
class Certificate:
    """The result for one input. `count` of the `n` estimation votes are for the selected class (None: not cast)."""

    predict: int
    radius: float
    count: int | None
    n: int
    p_lower: float
    votes: tuple[int, ...] = ()  # of the estimation, for each class


def certify(
    counter: Counter, x: Tensor, n0: int, n: int, alpha: float, index: int = 0, only_if: int | None = None
) -> Certificate:
    """CERTIFY: return a class and an L2 radius, or abstain.

    Guarantee: with probability at least 1 - alpha over the noise, either it abstains or the smoothed classifier predicts
    `predict` for every input closer than `radius` to x. Selection and estimation use disjoint noise, so choosing the class
    does not bias the bound. With `only_if` the estimation votes are not cast unless that class is selected (evaluation
    needs no radius for a wrong class); the certificate then has radius 0 and no count.
    """
    selection = counter.count(x, 0, n0, Purpose.CERTIFY_SELECTION, index)
    selected = int(selection.argmax())
    if only_if is not None and selected != only_if:
        return Certificate(selected, 0.0, None, n, 0.0)
    votes = counter.count(x, 0, n, Purpose.CERTIFY_ESTIMATION, index)
    count = int(votes[selected])
    p_lower = lower_confidence_bound(count, n, alpha)
    radius = certified_radius(p_lower, counter.sigma)
    return Certificate(selected if radius > 0.0 else ABSTAIN, radius, count, n, p_lower, tuple(map(int, votes)))


def predict(counter: Counter, x: Tensor, n: int, alpha: float, index: int = 0) -> int:
    """PREDICT: return the class of the smoothed classifier, or abstain.

    Guarantee: it returns a class other than the smoothed classifier's with probability at most alpha.
    """
    votes = counter.count(x, 0, n, Purpose.PREDICT, index)
    second, first = (int(c) for c in np.argsort(votes, kind="stable")[-2:])
    return first if top_two_differ(int(votes[first]), int(votes[second]), alpha) else ABSTAIN


@dataclass(frozen=True)
class Decision:
    """Whether an input is robust at the given radius (None: `n` votes were not enough), and the votes it took."""

    predict: int
    robust: bool | None
    votes: int


def robust_at(counter: Counter, x: Tensor, radius: float, n0: int, n: int, alpha: float, index: int = 0) -> Decision:
    """Decide whether the smoothed classifier is constant within `radius`; cast votes until this is clear, at most n0 + n.

    It is if p_A > Phi(radius / sigma) (Cohen et al. 2019). Guarantee: the probability of answering True although p_A is
    not above that threshold is at most alpha, with optional stopping: the evidence is an e-process (see `sequence`).
    False has the same guarantee.
    """
    selected = int(counter.count(x, 0, n0, Purpose.CERTIFY_SELECTION, index).argmax())
    threshold, enough = float(ndtr(radius / counter.sigma)), -math.log(alpha)
    wins = cast = 0
    for look in looks(n):
        wins += int(counter.count(x, cast, look, Purpose.CERTIFY_ESTIMATION, index)[selected])
        cast = look
        if log_evidence_above(wins, cast, threshold) >= enough:
            return Decision(selected, True, n0 + cast)
        if log_evidence_below(wins, cast, threshold) >= enough:
            return Decision(selected, False, n0 + cast)
    return Decision(selected, None, n0 + cast)
