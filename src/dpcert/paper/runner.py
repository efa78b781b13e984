"""Runs the missing pieces of a grid in child processes.

Each piece keeps its state in its run directory. The work can therefore be stopped, killed and restarted at any time: what is
missing is always determined from the directories.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .._validate import integer_in
from ..errors import DpcertError, RunError
from ..store.durable import cannot_write, open_without_links
from ..store.runs import IN_USE, RunDirectory
from .estimate import Estimator, as_words
from .grid import Cell, Need
from .pieces import Piece, holds_rows_only, missing_of
from .targets import LOGS

_SECONDS_TO_SAVE = 120.0


class EventHandler(Protocol):
    """Called with each event; `passing` marks a status line that the next one replaces."""

    def __call__(self, text: str, *, passing: bool = False) -> None:
        """Show it."""


@dataclass(frozen=True)
class Failure:
    """A piece that failed, and why."""

    piece: Piece
    reason: str


@dataclass
class _Child:
    need: Need
    piece: Piece
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    whole: bool  # not resumed: its time can be used to estimate others


class Runner:
    """Runs pieces in the order of their needs, `jobs` child processes at once; the pieces of one cell run one after another."""

    def __init__(self, results: Path, examples: int | None, jobs: int, estimator: Estimator, on_event: EventHandler) -> None:
        self._results, self._examples = results, examples
        self._jobs = integer_in("--jobs", jobs, 1, 1024)
        self._estimator, self._on_event = estimator, on_event
        self._running: list[_Child] = []
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
            self._stop()
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
        taken = {child.piece.cell for child in self._running}
        for need in list(waiting):
            if len(self._running) >= self._jobs:
                return
            if need.cell in taken or self._is_busy(need.cell):  # in use, perhaps by a child of a killed session
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
        words = [sys.executable, "-m", "dpcert", *piece.command(self._results)]
        threads = str(max(1, _cores() // self._jobs))
        whole = not piece.has_begun(self._results)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_without_links(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
                file.write(f"$ dpcert {' '.join(words[3:])}\n".encode())
                file.flush()
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": threads},
                    start_new_session=True,  # Ctrl-C reaches the child once, through this process
                )
        except OSError as error:
            raise cannot_write(log, error) from error
        self._running.append(_Child(need, piece, process, log, time.monotonic(), whole))
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
        """Collect the finished children; return the needs that have more to do."""
        unfinished = []
        for child in [child for child in self._running if child.process.poll() is not None]:
            self._running.remove(child)
            seconds = time.monotonic() - child.began
            reason = self._what_went_wrong(child)
            if reason is None:
                if child.whole:
                    self._estimator.note(child.piece, seconds)
                self._on_event(f"done: {child.piece} in {as_words(seconds)}")
                unfinished.append(child.need)
            elif IN_USE in reason or self._is_busy(child.piece.cell):  # another session uses the cell: wait for it
                unfinished.append(child.need)
            else:
                self._failures.append(Failure(child.piece, reason))
                self._pieces |= {need: [] for need in self._pieces if need.cell == child.piece.cell}
                self._on_event(f"FAILED: {child.piece}: {reason}; see {child.log}")
        return unfinished

    def _what_went_wrong(self, child: _Child) -> str | None:
        code = child.process.returncode
        if code != 0:
            if code < 0:
                return f"killed by {signal.Signals(-code).name}"
            errors = [line for line in _tail(child.log) if line.startswith("error: ")]
            return errors[-1].removeprefix("error: ") if errors else f"exit code {code}"
        try:
            self._pieces[child.need] = self._missing(child.need)
        except DpcertError as error:
            return str(error)
        return "it ended without doing its work" if child.piece in self._pieces[child.need] else None

    def _is_busy(self, cell: Cell) -> bool:
        directory = RunDirectory(self._results / cell.name)
        if not directory.path.is_dir():
            return False
        try:
            with directory.locked():
                return False
        except RunError:
            return True

    def _status(self) -> str:
        now = time.monotonic()
        chains: dict[Cell, dict[Piece, None]] = {}  # several parts of an untrained cell list the same training
        for need, pieces in self._pieces.items():
            chains.setdefault(need.cell, {}).update(dict.fromkeys(pieces))
        left = self._estimator.left([list(chain) for chain in chains.values() if chain], self._jobs)
        under_way = sum(min(now - child.began, self._estimator.seconds(child.piece)) for child in self._running)
        names = ", ".join(str(child.piece) for child in self._running) or "waiting for other processes"
        count = sum(map(len, chains.values()))
        return f"{count} tasks left, about {as_words(max(0.0, left - under_way / self._jobs))}: {names}"

    def _stop(self) -> None:
        """Ask every child to save and exit. Run directories also survive a kill; this only avoids repeating the last steps."""
        for child in self._running:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _SECONDS_TO_SAVE
        for child in self._running:
            try:
                child.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tail(log: Path, size: int = 8192) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode("utf-8", errors="replace").splitlines()
