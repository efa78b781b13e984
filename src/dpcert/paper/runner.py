"""Does what a grid lacks, in child processes.

Each piece leaves its state in its run directory, so all of it can be stopped, killed and started again at any moment: what is
missing is always found by looking at the directories.
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


class Tell(Protocol):
    """Called with what happened; `passing` for a line that the next one replaces."""

    def __call__(self, text: str, *, passing: bool = False) -> None:
        """Show it."""


@dataclass(frozen=True)
class Failure:
    """A piece that ended without doing its work."""

    piece: Piece
    reason: str


@dataclass
class _Child:
    need: Need
    piece: Piece
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    whole: bool  # not the rest of a piece: its time says how long others like it take


class Runner:
    """Runs pieces in the order of their needs, `jobs` child processes at once; those of one cell follow each other."""

    def __init__(self, results: Path, examples: int, jobs: int, estimator: Estimator, tell: Tell) -> None:
        self._results, self._examples = results, examples
        self._jobs = integer_in("--jobs", jobs, 1, 1024)
        self._estimator, self._tell = estimator, tell
        self._running: list[_Child] = []
        self._pieces: dict[Need, list[Piece]] = {}
        self._failures: list[Failure] = []
        self._poll_seconds = 0.2

    def run(self, needs: Sequence[Need]) -> list[Failure]:
        """Do all that is missing of `needs`; a piece that fails ends its cell, the others go on."""
        waiting = list(needs)
        self._pieces = {need: self._missing(need) for need in waiting}
        try:
            while waiting or self._running:
                self._start_what_fits(waiting)
                waiting = self._in_order([*waiting, *self._collect()])
                self._tell(self._status(), passing=True)
                time.sleep(self._poll_seconds)
        except BaseException:
            self._stop()
            raise
        return self._failures

    def _in_order(self, waiting: list[Need]) -> list[Need]:
        """A cell that was trained is certified before the next one is trained; one that failed is left alone."""
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
            if need.cell in taken or self._is_busy(need.cell):  # busy: perhaps with a child of a killed session
                taken.add(need.cell)  # a later part of it must not come first
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
                    start_new_session=True,  # a Ctrl-C on the terminal reaches it once, through us
                )
        except OSError as error:
            raise cannot_write(log, error) from error
        self._running.append(_Child(need, piece, process, log, time.monotonic(), whole))
        self._tell(f"started: {piece} (about {as_words(self._estimator.seconds(piece))})")

    def _set_aside(self, cell: Cell) -> None:
        """Rows without weights cannot be added to, and a second training must not mix with them."""
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
        self._tell(f"moved: {directory.path} holds rows without weights and is now {place}")

    def _collect(self) -> list[Need]:
        """Take the children that ended; returns the cells that have more to do."""
        go_on = []
        for child in [child for child in self._running if child.process.poll() is not None]:
            self._running.remove(child)
            seconds = time.monotonic() - child.began
            reason = self._what_went_wrong(child)
            if reason is None:
                if child.whole:
                    self._estimator.note(child.piece, seconds)
                self._tell(f"done: {child.piece} in {as_words(seconds)}")
                go_on.append(child.need)
            elif IN_USE in reason or self._is_busy(child.piece.cell):  # another session was there first: wait for it
                go_on.append(child.need)
            else:
                self._failures.append(Failure(child.piece, reason))
                self._pieces |= {need: [] for need in self._pieces if need.cell == child.piece.cell}
                self._tell(f"FAILED: {child.piece}: {reason}; see {child.log}")
        return go_on

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
        chains: dict[Cell, dict[Piece, None]] = {}  # until a cell is trained, each of its parts lacks the training
        for need, pieces in self._pieces.items():
            chains.setdefault(need.cell, {}).update(dict.fromkeys(pieces))
        left = self._estimator.left([list(chain) for chain in chains.values() if chain], self._jobs)
        under_way = sum(min(now - child.began, self._estimator.seconds(child.piece)) for child in self._running)
        names = ", ".join(str(child.piece) for child in self._running) or "waiting for other processes"
        count = sum(map(len, chains.values()))
        return f"{count} pieces left, about {as_words(max(0.0, left - under_way / self._jobs))}: {names}"

    def _stop(self) -> None:
        """Ask every child to save and end; the run directories survive a kill too, this only spares the last steps."""
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
