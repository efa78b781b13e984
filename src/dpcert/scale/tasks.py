"""A task is one ``dpcert`` command with the resources it needs; its outcome is an exit code and a structured reason.

The process of a task writes the reason of its failure, as one JSON object, to the file that an environment variable
names. Nobody reads its printed output, so the words of a message can change without changing what a caller does.
"""

import json
import os
import signal
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ..store.durable import parse_json

OUTCOME_FILE = "DPCERT_OUTCOME_FILE"
INTERRUPTED = 130
SECONDS_TO_SAVE = 120.0  # for a task that was asked to stop; then it is killed
WORKER_LOST = "WorkerLost"  # the error of a task whose worker died too often
_LONGEST_RECORD = 65_536
_LONGEST_REASON = 2_000


@dataclass(frozen=True)
class Resources:
    """What one task occupies while it runs."""

    cpus: int = 1
    gpus: int = 0

    def __str__(self) -> str:
        words = [f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"]
        return " and ".join(words + ([f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []))


@dataclass(frozen=True)
class Task:
    """One ``dpcert`` command. Its paths are absolute: a task does not depend on a working directory."""

    name: str
    words: tuple[str, ...]  # the arguments of ``dpcert``
    log: Path
    resources: Resources = Resources()

    def as_json(self) -> dict[str, Any]:
        """The task as JSON values."""
        return {**asdict(self), "words": list(self.words), "log": str(self.log)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Task":
        """The inverse of `as_json`."""
        return cls(value["name"], tuple(value["words"]), Path(value["log"]), Resources(**value["resources"]))


@dataclass(frozen=True)
class Outcome:
    """How a task ended: its exit code (negative: the signal that killed it) and the recorded reason of a failure."""

    code: int
    error: str | None = None  # the name of the error's class, e.g. BusyError
    reason: str | None = None
    seconds: float = 0.0  # run time, without waiting for resources

    @property
    def failure(self) -> str | None:
        """Why the task failed, in words; None if it succeeded."""
        if self.code == 0:
            return None
        if self.reason:
            return self.reason
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return "interrupted" if self.code == INTERRUPTED else f"exit code {self.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class Pending(Protocol):
    """A submitted task."""

    def outcome(self) -> Outcome | None:
        """How it ended; None while it waits or runs."""


class Executor(Protocol):
    """Runs tasks somewhere. What a task does is durable in the folders it writes; an executor keeps no state of its own."""

    def slots(self, resources: Resources) -> int:
        """How many tasks with these resources can run at once at the moment, at least 1."""

    def submit(self, task: Task) -> Pending:
        """Start a task, or queue it until its resources are free."""

    def stop(self) -> None:
        """Ask every running task to save its state and exit, and wait for them."""


class OutcomeFile:
    """The file in which this process records why it failed; without one, `record` does nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    @classmethod
    def claim(cls, environment: MutableMapping[str, str] = os.environ) -> "OutcomeFile":
        """The file that the parent process named. The variable is removed: child processes record nothing."""
        return cls(environment.pop(OUTCOME_FILE, None))

    def record(self, error: str, reason: str) -> None:
        """Write the record; a disk error is ignored, because the exit code still says that the task failed."""
        if self._path is None:
            return
        text = json.dumps({"error": error, "reason": reason[:_LONGEST_REASON]})
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)  # the parent created it
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            return


def read_record(path: Path) -> tuple[str | None, str | None]:
    """The error's class name and its reason from an outcome file; (None, None) if nothing usable is recorded."""
    try:
        with path.open("rb") as file:
            value = parse_json(file.read(_LONGEST_RECORD + 1)[:_LONGEST_RECORD])
    except (OSError, ValueError, RecursionError):
        return None, None
    if not isinstance(value, dict):
        return None, None
    error, reason = value.get("error"), value.get("reason")
    if not isinstance(error, str) or not isinstance(reason, str) or not error.isidentifier():
        return None, None
    return error, " ".join(reason.split())[:_LONGEST_REASON] or None
