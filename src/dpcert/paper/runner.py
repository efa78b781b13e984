"""Runs the missing pieces of a grid as tasks of an executor: processes of this machine, or a cluster.

Each piece keeps its state in its run directory. The work can therefore be stopped, killed and restarted at any time: what is
missing is always determined from the directories.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BusyError, DpcertError, RunError
from ..progress import EventHandler
from ..scale.tasks import Executor, Outcome, Pending, Resources, Task
from ..store.runs import RunDirectory
from .estimate import Estimator, as_words
from .grid import Cell, Need
from .pieces import Piece, holds_rows_only, missing_of
from .targets import LOGS

_ON_A_GPU = "cuda"


@dataclass(frozen=True)
class Failure:
    """A piece that failed, and why."""

    piece: Piece
    reason: str


@dataclass
class _Running:
    need: Need
    piece: Piece
    pending: Pending
    log: Path
    began: float
    whole: bool  # not resumed: its time can be used to estimate others


class Runner:
    """Runs pieces in the order of their needs, as many at once as fit; the pieces of one cell run one after another."""

    def __init__(
        self,
        results: Path,
        examples: int | None,
        executor: Executor,
        resources: Resources,
        estimator: Estimator,
        on_event: EventHandler,
    ) -> None:
        self._results, self._examples = results.absolute(), examples
        self._executor, self._resources = executor, resources
        self._estimator, self._on_event = estimator, on_event
        self._running: list[_Running] = []
        self._pieces: dict[Need, list[Piece]] = {}
        self._failures: list[Failure] = []
        self._poll_seconds = 0.2

    def run(self, needs: Sequence[Need]) -> list[Failure]:
        """Run all missing pieces of `needs`; a failed piece stops its cell, the other cells continue."""
        waiting = list(needs)
        self._pieces = {need: self._missing(need) for need in waiting}
        try:
            while waiting or self._running:
                self._start_what_fits(waiting)
                waiting = self._in_order([*waiting, *self._collect()])
                self._on_event(self._status(), passing=True)
                time.sleep(self._poll_seconds)
        except BaseException:
            self._executor.stop()
            raise
        return self._failures

    def _in_order(self, waiting: list[Need]) -> list[Need]:
        """Certify a trained cell before training the next one; skip failed cells."""
        failed = {failure.piece.cell for failure in self._failures}
        kept = {need for need in waiting if need.cell not in failed}
        return [need for need in self._pieces if need in kept]

    def _missing(self, need: Need) -> list[Piece]:
        return missing_of(need, self._results, self._examples)

    def _start_what_fits(self, waiting: list[Need]) -> None:
        taken = {running.piece.cell for running in self._running}
        slots = self._executor.slots(self._resources) if waiting else 0
        for need in list(waiting):
            if len(self._running) >= slots:
                return
            if need.cell in taken or self._directory(need.cell).is_busy:  # in use, perhaps by a child of a killed session
                taken.add(need.cell)  # a later part of the cell must not run first
                continue
            waiting.remove(need)
            pieces = self._pieces[need] = self._missing(need)
            if pieces:
                self._start(need, pieces[0])
                taken.add(need.cell)

    def _start(self, need: Need, piece: Piece) -> None:
        if piece.kind == "train":
            self._set_aside(piece.cell)
        log = self._results / LOGS / f"{piece.cell.name}.log"
        words = piece.command(self._results, _ON_A_GPU if self._resources.gpus else None)
        whole = not piece.has_begun(self._results)
        pending = self._executor.submit(Task(str(piece), tuple(words), log, self._resources))
        self._running.append(_Running(need, piece, pending, log, time.monotonic(), whole))
        self._on_event(f"started: {piece} (about {as_words(self._estimator.seconds(piece))})")

    def _set_aside(self, cell: Cell) -> None:
        """Move away a run without weights: nothing can be added to its rows, and a new training must not mix with them."""
        directory = RunDirectory(self._results / cell.name)
        if not holds_rows_only(directory):
            return
        folder = self._results / LOGS
        names = (f"{cell.name}-without-weights{'' if k == 0 else f'-{k}'}" for k in range(10**6))
        place = next(folder / name for name in names if not (folder / name).exists())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            directory.path.rename(place)
        except OSError as error:
            raise RunError(f"cannot move {directory.path} to {place}: {error.strerror}; move or delete it yourself") from error
        self._on_event(f"moved: {directory.path} has rows without weights and is now {place}")

    def _collect(self) -> list[Need]:
        """Collect the finished tasks; return the needs that have more to do."""
        unfinished = []
        ended = [(running, outcome) for running in self._running if (outcome := running.pending.outcome()) is not None]
        for running, outcome in ended:
            self._running.remove(running)
            reason = self._what_went_wrong(running, outcome)
            if reason is None:
                if running.whole:
                    self._estimator.note(running.piece, outcome.seconds)
                self._on_event(f"done: {running.piece} in {as_words(outcome.seconds)}")
                unfinished.append(running.need)
            elif outcome.error == BusyError.__name__ or self._directory(running.piece.cell).is_busy:  # another session: wait
                unfinished.append(running.need)
            else:
                self._failures.append(Failure(running.piece, reason))
                self._pieces |= {need: [] for need in self._pieces if need.cell == running.piece.cell}
                self._on_event(f"FAILED: {running.piece}: {reason}; see {running.log}")
        return unfinished

    def _what_went_wrong(self, running: _Running, outcome: Outcome) -> str | None:
        if outcome.code != 0:
            return outcome.failure
        try:
            self._pieces[running.need] = self._missing(running.need)
        except DpcertError as error:
            return str(error)
        return "it ended without doing its work" if running.piece in self._pieces[running.need] else None

    def _directory(self, cell: Cell) -> RunDirectory:
        return RunDirectory(self._results / cell.name)

    def _status(self) -> str:
        now = time.monotonic()
        chains: dict[Cell, dict[Piece, None]] = {}  # several parts of an untrained cell list the same training
        for need, pieces in self._pieces.items():
            chains.setdefault(need.cell, {}).update(dict.fromkeys(pieces))
        slots = self._executor.slots(self._resources)
        left = self._estimator.left([list(chain) for chain in chains.values() if chain], slots)
        under_way = sum(min(now - running.began, self._estimator.seconds(running.piece)) for running in self._running)
        names = ", ".join(str(running.piece) for running in self._running) or "waiting for other processes"
        count = sum(map(len, chains.values()))
        return f"{count} tasks left, about {as_words(max(0.0, left - under_way / slots))}: {names}"
