"""Executors without a cluster: child processes of this machine."""

import os
import time
from collections.abc import Callable, Sequence

from .._validate import integer_in
from ..errors import ConfigError
from .child import Child
from .tasks import SECONDS_TO_SAVE, Outcome, Resources, Task

MOST_JOBS = 1024


class LocalProcesses:
    """Child processes of this one, at most `jobs` at once; each gets its own GPUs."""

    def __init__(self, jobs: int, resources: Resources | None = None, gpus: Sequence[str] | None = None) -> None:
        self._jobs = integer_in("--jobs", jobs, 1, MOST_JOBS)
        wanted = 0 if resources is None else resources.gpus
        self._free_gpus = list(gpus if gpus is not None else _gpus_here() if wanted else ())
        self._gpus = len(self._free_gpus)
        if wanted > self._gpus:
            raise ConfigError(f"--gpus-per-task is {wanted}, this machine has {self._gpus} GPUs; use fewer, or another --on")
        self._running: list[LocalTask] = []

    def slots(self, resources: Resources) -> int:
        """At most `jobs`, and as many as the GPUs allow."""
        return min(self._jobs, self._gpus // resources.gpus) if resources.gpus else self._jobs

    def submit(self, task: Task) -> "LocalTask":
        """Start a process. The caller keeps to `slots`: without a free GPU this is an error."""
        taken, self._free_gpus = self._free_gpus[: task.resources.gpus], self._free_gpus[task.resources.gpus :]
        if len(taken) < task.resources.gpus:
            self._free_gpus = [*taken, *self._free_gpus]
            raise ConfigError(f"{task.name} needs {task.resources.gpus} GPUs, {len(taken)} are free; run fewer tasks at once")
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if taken else {}
        try:
            child = Child(task, {**os.environ, **visible})
        except BaseException:
            self._free_gpus += taken
            raise
        pending = LocalTask(child, lambda: self._finished(pending, taken))
        self._running.append(pending)
        return pending

    def _finished(self, pending: "LocalTask", gpus: list[str]) -> None:
        self._running.remove(pending)
        self._free_gpus += gpus

    def stop(self) -> None:
        """Ask every child to save and exit; kill what has not ended after two minutes."""
        children = [pending.child for pending in self._running]
        for child in children:
            child.ask_to_stop()
        until = time.monotonic() + SECONDS_TO_SAVE
        for child in children:
            child.wait_or_kill(until)


class LocalTask:
    """A task in a child process."""

    def __init__(self, child: Child, on_end: Callable[[], None]) -> None:
        self.child, self._on_end = child, on_end
        self._ended: Outcome | None = None

    def outcome(self) -> Outcome | None:
        """How it ended; None while it runs."""
        if self._ended is None and (ended := self.child.outcome()) is not None:
            self._ended = ended
            self._on_end()
        return self._ended


def _gpus_here() -> list[str]:
    """The names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] if named else [str(number) for number in range(count)]
