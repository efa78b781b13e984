"""Ours beside the paper's: a difference and a word for it."""

import math
from dataclasses import dataclass

import numpy as np

from .paper import OTHER_FORMULA
from .shelf import Measured

NOT_RUN = "not run"
_ACR_SHARE = 0.05
_POINTS = 1.0


@dataclass(frozen=True)
class Figure:
    """A figure of ours with its standard error; `spread` is that of several seeds (None with one)."""

    value: float
    error: float
    spread: float | None = None


def verdict(ours: float, paper: float, tolerance: float) -> str:
    """``agrees`` within the tolerance, else ``better`` or ``worse`` (more is better for all figures here)."""
    if abs(ours - paper) <= tolerance:
        return "agrees"
    return "better" if ours > paper else "worse"


def acr_verdict(ours: Figure, paper: float) -> str:
    """Within 5 % of the paper's figure or two standard errors."""
    return verdict(ours.value, paper, max(_ACR_SHARE * paper, 2.0 * ours.error))


def accuracy_verdict(ours: float, paper: float) -> str:
    """Clean accuracy, in per cent: within one point."""
    return verdict(ours, paper, _POINTS + 1e-9)  # one point exactly is within, whatever floats make of it


def marked(method: str, word: str) -> str:
    """The verdict, set apart where the published figure is of another formula than the published one."""
    return f"{word} (not comparable)" if method in OTHER_FORMULA and word != NOT_RUN else word


def acr_of(runs: list[Measured]) -> Figure:
    """ACR over seeds. The images are the same for each seed, so their error is not averaged away; the paper's figure is of one
    training too, so the spread of single trainings counts, not that of their mean."""
    values = np.array([run.acr for run in runs])
    within = float(np.mean([run.acr_error for run in runs]))
    spread = float(values.std(ddof=1)) if len(runs) > 1 else None
    return Figure(float(values.mean()), math.hypot(within, spread or 0.0), spread)


def clean_of(runs: list[Measured]) -> Figure | None:
    """Clean accuracy (%) over seeds; the whole test set is measured, so one run has no error of its own."""
    values = np.array([run.clean for run in runs if run.clean is not None])
    if not len(values):
        return None
    spread = float(values.std(ddof=1)) if len(values) > 1 else None
    return Figure(float(values.mean()), spread or 0.0, spread)
