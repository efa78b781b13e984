"""The process of one task: starts it, collects its outcome, stops it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ..store.durable import cannot_write, open_without_links
from .tasks import OUTCOME_FILE, Outcome, Task, read_record

PARENT = "DPCERT_PARENT"
_SECONDS_BETWEEN_LOOKS = 0.5


class Child:
    """A running ``dpcert`` process. Its output is appended to the log of its task."""

    def __init__(self, task: Task, environment: Mapping[str, str], *, dies_with_parent: bool = False) -> None:
        self._began = time.monotonic()
        self._ended: Outcome | None = None
        descriptor, record = tempfile.mkstemp(prefix="dpcert-outcome-")  # 0600
        os.close(descriptor)
        self._record = Path(record)
        threads = {"OMP_NUM_THREADS": str(task.resources.cpus)}
        parent = {PARENT: str(os.getpid())} if dies_with_parent else {}
        words = [sys.executable, "-m", "dpcert", *task.words]
        try:
            task.log.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_without_links(task.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
                log.write(f"$ dpcert {' '.join(task.words)}\n".encode())
                log.flush()
                self.process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**environment, **threads, **parent, OUTCOME_FILE: record},
                    start_new_session=True,  # Ctrl-C reaches the child once, through this process
                )
        except OSError as error:
            self._forget_record()
            raise cannot_write(task.log, error) from error
        except BaseException:
            self._forget_record()
            raise

    def outcome(self) -> Outcome | None:
        """How the process ended; None while it runs."""
        if self._ended is None and (code := self.process.poll()) is not None:
            error, reason = read_record(self._record) if code > 0 else (None, None)  # a killed process recorded nothing
            self._ended = Outcome(code, error, reason, time.monotonic() - self._began)
            self._forget_record()
        return self._ended

    def ask_to_stop(self) -> None:
        """Ask the process to save its state and exit."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait_or_kill(self, until: float) -> Outcome:
        """Wait for the end until a `time.monotonic` moment, then kill: a run directory survives it and repeats a few steps."""
        try:
            self.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        ended = self.outcome()
        assert ended is not None
        return ended

    def _forget_record(self) -> None:
        with contextlib.suppress(OSError):
            self._record.unlink()


def die_with_parent(environment: MutableMapping[str, str] = os.environ) -> None:
    """End this process when the process that started it has died, if that one asked for it.

    A worker of a cluster may be killed while its task runs. The task is then started elsewhere, so this one must stop.
    """
    parent = environment.pop(PARENT, "")
    if not parent.isdecimal():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="dpcert-parent", daemon=True).start()
