"""Which executor runs the tasks, how many at once, and what each may use: the options of the commands that submit tasks."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .._validate import integer_in
from ..errors import ConfigError
from .environment import core_count
from .executors import MOST_JOBS, LocalProcesses
from .tasks import Executor, Resources

PROCESSES, RAY = "processes", "ray"
_ADDRESS = "RAY_ADDRESS"
_PREFIX = f"{RAY}://"
_MOST_CPUS, _MOST_GPUS = 4096, 64


@dataclass(frozen=True)
class Placement:
    """Where to run, how many tasks at once, and what each may use; None: the default of the place."""

    engine: str = PROCESSES
    address: str | None = None  # HOST:PORT of a Ray cluster
    jobs: int | None = None
    cpus: int | None = None
    gpus: int = 0

    @classmethod
    def parse(cls, on: str, jobs: int | None, cpus: int | None, gpus: int) -> Self:
        """The place that the options ``--on --jobs --cpus-per-task --gpus-per-task`` name."""
        if jobs is not None:
            integer_in("--jobs", jobs, 1, MOST_JOBS)
        if cpus is not None:
            integer_in("--cpus-per-task", cpus, 1, _MOST_CPUS)
        integer_in("--gpus-per-task", gpus, 0, _MOST_GPUS)
        if on in (PROCESSES, RAY):
            return cls(on, None, jobs, cpus, gpus)
        if not on.startswith(_PREFIX):
            raise ConfigError(f"--on is {on!r}, must be {PROCESSES}, {RAY} or {_PREFIX}HOST:PORT")
        return cls(RAY, _host_and_port(on.removeprefix(_PREFIX), f"--on is {on!r}"), jobs, cpus, gpus)

    @property
    def resources(self) -> Resources:
        """What one task uses. Processes of this machine share its cores; a task of a cluster gets one CPU."""
        cpus = max(1, core_count() // (self.jobs or 1)) if self.engine == PROCESSES else 1
        return Resources(self.cpus or cpus, self.gpus)

    @contextlib.contextmanager
    def open(self, folder: Path, on_event: Callable[[str], None]) -> Iterator[Executor]:
        """The executor. `folder` is seen by all tasks; `on_event` is called with lines for the user."""
        if self.engine == PROCESSES:
            yield LocalProcesses(self.jobs or 1, self.resources)
            return
        from .ray import RayExecutor

        with RayExecutor(self.address or _address_of_environment(), folder, self.jobs, on_event, core_count()) as executor:
            yield executor


def _host_and_port(text: str, given: str) -> str:
    """Check ``HOST:PORT``; `given` names the value in the error."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 1 <= int(port[:6]) <= 65535:
        raise ConfigError(f"{given}, its address must be HOST:PORT with a port from 1 to 65535, e.g. 10.0.0.1:6379")
    if any(character.isspace() or character in "/@?#" for character in host):
        raise ConfigError(f"{given}, its address must be HOST:PORT without a path, e.g. 10.0.0.1:6379")
    return text


def _address_of_environment() -> str | None:
    """The cluster that RAY_ADDRESS names, as for other programs that use Ray; None: start Ray on this machine."""
    given = os.environ.get(_ADDRESS, "")
    address = given.removeprefix(_PREFIX)
    return None if address in ("", "auto", "local") else _host_and_port(address, f"{_ADDRESS} is {given!r}")
