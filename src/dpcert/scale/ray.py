"""Runs tasks on a Ray cluster whose nodes share the results folder. Ray itself is imported by another process only.

Guarantee: a task whose worker or node dies is started again, at most `RETRIES` times, and resumes from its run directory.
If the cluster is lost, one error says so; what was durable stays, and a rerun resumes.
"""

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from ..errors import ConfigError, RunError
from ..store.durable import cannot_write, open_without_links
from .session import code_identity, shared_session
from .tasks import SECONDS_TO_SAVE, Outcome, Resources, Task

LOG = "ray.log"
BRIDGE = "dpcert.scale.ray_bridge"
_SECONDS_TO_CONNECT = 120.0
_SECONDS_TO_END = 15.0
_SECONDS_BEFORE_RETRY = 1.0  # doubled each time, so that Ray has noticed the loss of the node
_SECONDS_WITHOUT_NODE = 60.0  # a node that died may come back
# Ray started here listens on 127.0.0.1 only; by default it listens on all network devices.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_RESUME = "what is done is saved: rerun the same command to resume"
_FOLDER_OF_DATA = "DPCERT_DATA"


class RayTask:
    """A task that was submitted to the cluster."""

    def __init__(self, executor: "RayExecutor", number: int) -> None:
        self._executor, self._number = executor, number

    def outcome(self) -> Outcome | None:
        """How it ended; None while it waits or runs."""
        return self._executor.outcome_of(self._number)


class RayExecutor:
    """Submits tasks to Ray; a context manager that connects on entry and lets the tasks save on exit."""

    def __init__(
        self, address: str | None, folder: Path, jobs: int | None, on_event: Callable[[str], None], cores: int
    ) -> None:
        self._address = address
        self._folder, self._jobs, self._on_event = folder.absolute(), jobs, on_event
        self._cores = cores  # of this machine, used if Ray is started here
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._outcomes: dict[int, Outcome] = {}
        self._open: set[int] = set()
        self._nodes: list[tuple[float, float]] | None = None
        self._enough_since = time.monotonic()
        self._submitted = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for package in ("ray", "grpc"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"--on ray needs the package {package}; install it with: pip install 'dpcert[ray]'")
        with contextlib.ExitStack() as stack:
            self._session = stack.enter_context(shared_session(self._folder))
            self._identity = code_identity()
            self._start_bridge()
            stack.callback(self._end_bridge)
            self._wait_for_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def slots(self, resources: Resources) -> int:
        """As many tasks as the nodes can hold; with `jobs`, that many: Ray queues them, and an autoscaler sees the demand."""
        self._receive()
        if self._jobs is not None:
            return self._jobs
        fitting = sum(_count_that_fit(node, resources) for node in self._nodes or [])
        now = time.monotonic()
        if fitting:
            self._enough_since = now
        elif self._nodes is not None and (not self._submitted or now - self._enough_since > _SECONDS_WITHOUT_NODE):
            sizes = ", ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in self._nodes) or "no node"
            raise RunError(
                f"no node of Ray at {self._place} has {resources} for a task (nodes: {sizes}); "
                "ask for less with --cpus-per-task and --gpus-per-task, add a node, or pass --jobs to wait for an autoscaler"
            )
        return max(1, fitting)

    def submit(self, task: Task) -> RayTask:
        """Queue a task on the cluster."""
        if not task.log.is_absolute():
            raise ConfigError(f"the log {task.log} of {task.name} is relative, must be an absolute path that all nodes see")
        self._submitted += 1
        self._open.add(self._submitted)
        request = {
            "task": task.as_json(),
            "environment": _environment_of_tasks(),
            "identity": self._identity,
            "folder": str(self._folder),
            "session": self._session,
        }
        self._send({"number": self._submitted, "request": request})
        return RayTask(self, self._submitted)

    def outcome_of(self, number: int) -> Outcome | None:
        """The outcome of a submitted task; None while it waits or runs."""
        self._receive()
        return self._outcomes.get(number)

    def stop(self) -> None:
        """Ask every task to save and exit, and wait for them, two minutes at most."""
        until = time.monotonic() + SECONDS_TO_SAVE + _SECONDS_TO_END
        with contextlib.suppress(RunError):  # the cluster is lost: nothing can be asked
            self._send({"stop": True})
            while self._open and time.monotonic() < until:
                self._receive(refuse=False)
                time.sleep(0.1)

    @property
    def _place(self) -> str:
        return self._address or "this machine"

    def _start_bridge(self) -> None:
        path = self._folder / LOG
        offline = {"RAY_USAGE_STATS_ENABLED": "0", **(_LOOPBACK if self._address is None else {})}
        try:
            with os.fdopen(open_without_links(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
                self._bridge = subprocess.Popen(
                    [sys.executable, "-P", "-m", BRIDGE],  # no file of the working directory is mistaken for Ray
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **offline},
                    cwd=self._folder,  # Ray lets workers import from here: nothing to import
                    start_new_session=True,
                    text=True,
                    encoding="utf-8",
                )
        except OSError as error:
            raise cannot_write(path, error) from error
        assert self._bridge.stdout is not None
        threading.Thread(target=_read, args=(self._bridge.stdout, self._messages), daemon=True).start()
        self._send({"address": self._address, "cpus": self._cores, "retry_seconds": _SECONDS_BEFORE_RETRY})

    def _wait_for_ready(self) -> None:
        try:
            message = self._messages.get(timeout=_SECONDS_TO_CONNECT)
        except queue.Empty:
            message = {"failed": f"Ray at {self._place} did not answer within {_SECONDS_TO_CONNECT:.0f} seconds"}
        if message is None:
            message = {"failed": f"the connection to Ray at {self._place} could not be made"}
        if "failed" in message:
            raise RunError(f"{message['failed']}; check --on and that the cluster runs; see {self._folder / LOG}")

    def _receive(self, *, refuse: bool = True) -> None:
        """Take in what the bridge said."""
        while True:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return
            if message is None:
                self._messages.put(None)  # the next call finds it again
                raise RunError(f"the connection to Ray at {self._place} is lost; {_RESUME}; see {self._folder / LOG}")
            if "event" in message:
                self._on_event(message["event"])
            elif "nodes" in message:
                self._nodes = [(cpus, gpus) for cpus, gpus in message["nodes"]]
            elif "outcome" in message:
                self._open.discard(message["number"])
                self._outcomes[message["number"]] = Outcome(**message["outcome"])
            elif "refused" in message and refuse:
                raise RunError(message["refused"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._bridge.stdin is not None
        try:
            self._bridge.stdin.write(json.dumps(message) + "\n")
            self._bridge.stdin.flush()
        except OSError as error:
            raise RunError(f"the connection to Ray at {self._place} is lost; {_RESUME}; see {self._folder / LOG}") from error

    def _end_bridge(self) -> None:
        """Close the connection. Tasks that still run are asked to save; a bridge that does not end is killed."""
        assert self._bridge.stdin is not None
        with contextlib.suppress(OSError):
            self._bridge.stdin.close()
        try:
            self._bridge.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._bridge.kill()
            self._bridge.wait()


def _count_that_fit(node: tuple[float, float], resources: Resources) -> int:
    cpus, gpus = node
    by_gpu = int(gpus // resources.gpus) if resources.gpus else None
    by_cpu = int(cpus // resources.cpus)
    return by_cpu if by_gpu is None else min(by_cpu, by_gpu)


def _environment_of_tasks() -> dict[str, str]:
    """What tasks take over from the driver: where the data sets are. Without it, each node uses its own folder."""
    given = os.environ.get(_FOLDER_OF_DATA)
    return {} if not given else {_FOLDER_OF_DATA: str(Path(given).absolute())}


def _read(lines: IO[str], messages: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    for line in lines:
        try:
            messages.put(json.loads(line))
        except ValueError:  # the last words of a process that was killed
            continue
    messages.put(None)
