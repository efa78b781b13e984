"""Verdicts: is our figure better than, worse than, or in agreement with the paper's?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..certification.metrics import standard_error
from .published import OTHER_FORMULA
from .result_index import Seeds

NOT_RUN = "not run"
NOT_COMPARABLE = " (not comparable)"
OTHER_BACKBONE = "other backbone: "  # of a model that is not the paper's, so that no figure can agree with it
_ACR_SHARE = 0.05
_CLEAN_POINTS = 1.0
_CERTIFIED_POINTS = 3.0
_ROUNDING = 1e-9  # a difference of exactly one point counts as within a point, despite float rounding
RULES = (
    f"agrees: clean accuracy within {_CLEAN_POINTS:g} point; ACR within {100 * _ACR_SHARE:g} % or two standard errors; "
    f"certified accuracy at 0.25 within {_CERTIFIED_POINTS:g} points or two standard errors. Else better or worse.",
    "agrees (spread): agrees only if the standard deviation over our seeds is added to the standard error; this says "
    "little if the seeds differ a lot.",
)


@dataclass(frozen=True)
class Figure:
    """The mean over seeds, its standard error from the spread over images, and the figure of each seed."""

    value: float
    error: float
    each: tuple[float, ...] = ()

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None with one."""
        return float(np.std(self.each, ddof=1)) if len(self.each) > 1 else None


def verdict(ours: float, paper: float, tolerance: float) -> str:
    """``agrees`` within the tolerance, else ``better`` or ``worse`` (more is better for all figures here)."""
    if abs(ours - paper) <= tolerance:
        return "agrees"
    return "better" if ours > paper else "worse"


def _with_errors(ours: Figure, paper: float, tolerance: float) -> str:
    """The verdict within the tolerance or two standard errors, with a separate word for agreement due to the spread alone.

    The paper's figure comes from one training, so the spread of single trainings counts, not that of their mean. Agreement
    that needs it is marked, because seeds that are far apart agree with any figure.
    """
    word = verdict(ours.value, paper, max(tolerance, 2.0 * ours.error))
    joined = 2.0 * math.hypot(ours.error, ours.spread or 0.0)
    return "agrees (spread)" if word != "agrees" and verdict(ours.value, paper, joined) == "agrees" else word


def acr_verdict(ours: Figure, paper: float) -> str:
    """Within 5 % of the paper's figure or two standard errors."""
    return _with_errors(ours, paper, _ACR_SHARE * paper)


def certified_verdict(ours: Figure, paper: float) -> str:
    """Certified accuracy, in percent: within three points or two standard errors."""
    return _with_errors(ours, paper, _CERTIFIED_POINTS + _ROUNDING)


def accuracy_verdict(ours: float, paper: float) -> str:
    """Clean accuracy, in percent: within one point."""
    return verdict(ours, paper, _CLEAN_POINTS + _ROUNDING)


def marked(method: str, word: str) -> str:
    """The verdict, marked if the paper's figure was computed with a formula other than the published one."""
    return f"{word}{NOT_COMPARABLE}" if method in OTHER_FORMULA and word != NOT_RUN else word


def beside(ours: float, paper: float) -> str:
    """Where the figure of another model is, next to the paper's. Never ``agrees``, however close the two are."""
    place = "equal to" if ours == paper else "above" if ours > paper else "below"
    return f"{OTHER_BACKBONE}{place} the paper"


def acr_of(seeds: Seeds) -> Figure:
    """ACR. All seeds use the same images, so averaging over seeds does not reduce the error over images."""
    return _figure([run.acr for run in seeds.runs], [run.acr_error for run in seeds.runs])


def certified_of(seeds: Seeds, radius: float) -> Figure:
    """Certified accuracy (%) at a radius."""
    hits = [100.0 * run.certified_at(radius) for run in seeds.runs]
    return _figure([float(hit.mean()) for hit in hits], [standard_error(hit) for hit in hits])


def clean_of(seeds: Seeds) -> Figure | None:
    """Clean accuracy (%); the whole test set is measured, so there is no error over images."""
    values = [run.clean for run in seeds.runs if run.clean is not None]
    return _figure(values, [0.0]) if values else None


def _figure(values: Sequence[float], errors: Sequence[float]) -> Figure:
    return Figure(float(np.mean(values)), float(np.mean(errors)), tuple(values))
