"""The process that talks to Ray, started by `RayExecutor`: JSON lines in, JSON lines out.

Ray ends the process that uses it when the cluster is lost, replaces its signal handlers and prints to its terminal. In a
process of its own it can do so without harm. This is the only file that imports Ray.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

from .ray_worker import run_task
from .tasks import INTERRUPTED, WORKER_LOST

RETRIES = 3  # of a task whose worker or node died
_POLL_SECONDS = 0.2
_SECONDS_BETWEEN_NODES = 1.0
_SECONDS_TO_ANSWER = 10.0
_BYTES_OF_OBJECTS = 80 * 2**20  # the least that Ray accepts: tasks exchange a few hundred bytes


class ConnectError(Exception):
    """Ray cannot be reached or used; the text says why."""


def connect(address: str | None, cpus: int) -> None:
    """Join the cluster at `address`, or start Ray on this machine (`RayExecutor` keeps it on the loopback device)."""
    import ray

    quiet = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": True}
    if address is None:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=_BYTES_OF_OBJECTS, **quiet)
        return
    kind = _kind_of(address)
    try:
        ray.init(address=f"ray://{address}" if kind == "client" else address, **quiet)
    except (Exception, SystemExit) as error:
        raise ConnectError(f"Ray at {address} does not accept this process: {_first_line(error)}") from error


def _kind_of(address: str) -> str:
    """Whether a cluster or its Ray Client server listens at an address: only the first answers health checks."""
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            check(b"", timeout=_SECONDS_TO_ANSWER, wait_for_ready=False)
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNIMPLEMENTED:
                return "client"
            raise ConnectError(f"no Ray answers at {address} ({code.name.lower().replace('_', ' ')})") from error
    return "cluster"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


@dataclass
class _Submitted:
    number: int
    request: dict[str, Any]
    reference: Any = None  # None while it waits for its retry
    losses: int = 0
    due: float = 0.0


class Bridge:
    """Submits the tasks that arrive, retries those whose worker died, and reports outcomes and nodes."""

    def __init__(self, commands: "queue.SimpleQueue[dict[str, Any] | None]", out: IO[str], retry_seconds: float) -> None:
        self._commands, self._out, self._retry_seconds = commands, out, retry_seconds
        self._tasks: list[_Submitted] = []
        self._stopping = False
        self._nodes_due = 0.0

    def run(self) -> None:
        """Work until the parent closes its end, and then let every task save its state."""
        closed = False
        while not (closed and not self._tasks):
            for command in self._arrived():
                if command is None:
                    closed = True
                if command is None or "stop" in command:
                    self._cancel_all()
                else:
                    self._tasks.append(_Submitted(command["number"], command["request"]))
            self._submit_due()
            self._collect()
            self._report_nodes()

    def _arrived(self) -> Iterable[dict[str, Any] | None]:
        while True:
            try:
                yield self._commands.get_nowait()
            except queue.Empty:
                return

    def _submit_due(self) -> None:
        import ray

        for task in [task for task in self._tasks if task.reference is None and time.monotonic() >= task.due]:
            if self._stopping:
                self._finish(task, {"code": INTERRUPTED})
                continue
            needs = task.request["task"]["resources"]
            options = {
                "num_cpus": needs["cpus"],
                "num_gpus": needs["gpus"],
                "max_retries": 0,
                "name": task.request["task"]["name"],
            }
            task.reference = ray.remote(run_task).options(**options).remote(task.request)

    def _collect(self) -> None:
        import ray

        running = {task.reference: task for task in self._tasks if task.reference is not None}
        if not running:
            time.sleep(_POLL_SECONDS)
            return
        ready, _ = ray.wait(list(running), num_returns=len(running), timeout=_POLL_SECONDS)
        for reference in ready:
            self._take(running[reference], reference)

    def _take(self, task: _Submitted, reference: Any) -> None:
        import ray
        from ray import exceptions as lost

        try:
            answer = ray.get(reference)
        except lost.TaskCancelledError:
            self._finish(task, {"code": INTERRUPTED})
        except (
            lost.WorkerCrashedError,
            lost.NodeDiedError,
            lost.OutOfMemoryError,
            lost.LocalRayletDiedError,
            lost.ObjectLostError,
        ) as error:
            self._lost(task, error)
        except lost.RayError as error:  # e.g. a node without dpcert
            name, remedy = task.request["task"]["name"], "install the same dpcert on every node"
            self._say({"refused": f"a node cannot run {name}: {_cause(error)}; {remedy}, and see its Ray logs"})
            self._finish(task, {"code": 1, "error": type(error).__name__, "reason": _cause(error)})
        else:
            if "refused" in answer:
                self._say(answer)
                answer = {"code": 1, "error": "Refused", "reason": answer["refused"]}
            self._finish(task, answer)

    def _lost(self, task: _Submitted, error: Exception) -> None:
        what = {"NodeDiedError": "its node died", "OutOfMemoryError": "its node ran out of memory"}
        reason = what.get(type(error).__name__, "its worker died")
        task.losses += 1
        name = task.request["task"]["name"]
        if self._stopping:
            self._finish(task, {"code": INTERRUPTED})
        elif task.losses > RETRIES:
            self._finish(task, {"code": 1, "error": WORKER_LOST, "reason": f"{reason}, and so did {RETRIES} retries"})
        else:
            self._say({"event": f"lost: {name}: {reason}; retry {task.losses} of {RETRIES} resumes it"})
            task.reference, task.due = None, time.monotonic() + self._retry_seconds * 2 ** (task.losses - 1)

    def _finish(self, task: _Submitted, answer: dict[str, Any]) -> None:
        self._tasks.remove(task)
        self._say({"number": task.number, "outcome": answer})

    def _cancel_all(self) -> None:
        import ray

        self._stopping = True
        for task in self._tasks:
            if task.reference is not None:
                ray.cancel(task.reference, force=False)

    def _report_nodes(self) -> None:
        import ray

        if time.monotonic() < self._nodes_due:
            return
        self._nodes_due = time.monotonic() + _SECONDS_BETWEEN_NODES
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._say({"nodes": [[node.get("CPU", 0.0), node.get("GPU", 0.0)] for node in alive]})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
        except OSError:  # the parent is gone; its tasks are still asked to save
            self._out = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def _cause(error: BaseException) -> str:
    """The error on the node, without Ray's traceback."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _read_commands(commands: "queue.SimpleQueue[dict[str, Any] | None]", lines: Iterable[str]) -> None:
    for line in lines:
        commands.put(json.loads(line))
    commands.put(None)


def main() -> None:
    """Connect, say so, and work until stdin is closed."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")  # Ray prints to stdout: that goes to the log from here on
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    try:
        connect(first["address"], first["cpus"])
    except ConnectError as error:
        out.write(json.dumps({"failed": str(error)}) + "\n")
        out.flush()
        sys.exit(2)
    commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands, sys.stdin), daemon=True).start()
    bridge = Bridge(commands, out, first["retry_seconds"])
    out.write(json.dumps({"ready": True}) + "\n")
    out.flush()
    bridge.run()


if __name__ == "__main__":
    main()
