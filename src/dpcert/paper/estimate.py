"""Estimates of how long pieces of work will take, from the times measured so far."""

import functools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import DpcertError
from ..store.metrics import PAPERS_N, PAPERS_N0, read_metrics
from ..store.runs import RunDirectory
from .grid import Cell
from .pieces import Piece

# Seconds per unit, used until this machine has measured its own: two cores of an AMD EPYC (results/mnist-dpsgd).
_FIRST_GUESS = {"train": 268.8 / 2_400_000, "certify": 30.2 / (500 * 10_100), "analyze": 0.1, "attack": 0.01}
# The same for runs that are fine-tuned from the packaged backbone, at about 2,000 forward passes a second.
_FINE_TUNED_GUESS = {"train": 1 / 2000, "certify": 1 / 2000, "analyze": 2.0, "attack": 0.02}
_GUESSES = {False: _FIRST_GUESS, True: _FINE_TUNED_GUESS}
_Kind = tuple[str, bool]  # the kind of a piece, and whether its run is fine-tuned: their units differ


@functools.cache  # computing a cost resolves a config, and the status line needs it five times a second
def units(piece: Piece) -> float:
    """The size of a piece: the cost of the cell for training, votes for certification, examples for the rest."""
    if piece.kind == "train":
        return piece.cell.cost()
    return piece.examples * (PAPERS_N0 + PAPERS_N) if piece.kind == "certify" else piece.examples


class Estimator:
    """Estimates the seconds of pieces: from timings in run directories at first, from this session's pieces as they finish."""

    def __init__(self, results: Path, cells: Iterable[Cell]) -> None:
        self._stored: dict[_Kind, list[float]] = {(kind, tuned): [] for tuned in _GUESSES for kind in _FIRST_GUESS}
        self._measured: dict[_Kind, list[float]] = {kind: [] for kind in self._stored}
        for cell in cells:
            self._read(RunDirectory(results / cell.name), cell)

    def _read(self, directory: RunDirectory, cell: Cell) -> None:
        if not directory.metrics.exists():
            return
        try:
            metrics = read_metrics(directory.metrics)
        except DpcertError:  # the command that reads the run reports it
            return
        timing, entries = metrics["timing"], metrics["certification"]
        if "train_seconds" in timing:
            self._stored["train", cell.is_fine_tuned].append(timing["train_seconds"] / cell.cost())
        if "certify_seconds" in timing and len(entries) == 1:  # with several, it is unknown which one the time belongs to
            votes = entries[0]["examples"] * (entries[0]["n0"] + entries[0]["n"])
            self._stored["certify", cell.is_fine_tuned].append(timing["certify_seconds"] / votes)

    def note(self, piece: Piece, seconds: float) -> None:
        """Record how long a piece of this session took."""
        self._measured[piece.kind, piece.cell.is_fine_tuned].append(seconds / units(piece))

    def seconds(self, piece: Piece) -> float:
        """The estimated time of a piece. Uses the median, since an interrupted run records the time of its last part only."""
        kind = (piece.kind, piece.cell.is_fine_tuned)
        known = self._measured[kind] or self._stored[kind]
        return (statistics.median(known) if known else _GUESSES[kind[1]][kind[0]]) * units(piece)

    def left(self, chains: Sequence[Sequence[Piece]], jobs: int) -> float:
        """The time for chains of pieces, `jobs` in parallel: never less than the longest chain."""
        each = [sum(self.seconds(piece) for piece in chain) for chain in chains]
        return max(sum(each) / jobs, max(each, default=0.0))


def as_words(seconds: float) -> str:
    """``3 h 20 min``, ``4 min``; at least a minute."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
