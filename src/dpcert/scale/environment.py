"""What torchrun (or Slurm, Kubernetes, `dpcert --processes`) tells a process about its group. Does not import torch."""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import RankError

RENDEZVOUS = "DPCERT_RENDEZVOUS"  # the file where the ranks of `--processes` meet: no port, so no port can be taken
LAUNCHER_PIPE = "DPCERT_LAUNCHER_PIPE"  # closed when the launcher ends, however it ends


@dataclass(frozen=True)
class Place:
    """The place of a process in its group: `local_rank` of `local_size` on this machine (None: not known)."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which owns files and output."""
        return self.rank == 0

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks are known to run on this machine."""
        return self.local_size == self.size


ALONE = Place(0, 1, 0, 1)


def place(environment: Mapping[str, str] | None = None) -> Place:
    """Return the place that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE give; without them a process is alone.

    torchrun sets all of them. With the first two alone (srun, mpirun) the ranks may be on several machines.
    """
    given = os.environ if environment is None else environment
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return ALONE
    rank, size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    local_rank = _number(given, "LOCAL_RANK", _number(given, "SLURM_LOCALID", rank))
    local_size = _number(given, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in given else None
    _require_below("RANK", rank, "WORLD_SIZE", size)
    if local_size is not None:
        _require_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    return Place(rank, size, local_rank, local_size)


def _require_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise RankError(f"{name} is {value}, must be below {limit_name} = {limit}; start all ranks with one torchrun command")


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal()):
        shown = "not set" if text is None else repr(text[:40])
        raise RankError(f"{name} is {shown}, must be a whole number; start with torchrun or --processes, or unset RANK")
    return int(text)


def is_one_of_several() -> bool:
    """Whether this process is one of several ranks; a wrong environment is reported when they meet."""
    with contextlib.suppress(RankError):
        return place().size > 1
    return False


def writes_output() -> bool:
    """Whether this process writes to the terminal: rank 0, or a process alone."""
    with contextlib.suppress(RankError):
        return place().is_first
    return True


def report_through_file(meeting: Path) -> bool:
    """Return True for the first process that calls this, and False for all others."""
    try:
        os.close(os.open(_report_of(meeting), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def has_reported(meeting: Path) -> bool:
    """Whether a rank has reported an error."""
    return _report_of(meeting).exists()


def _report_of(meeting: Path) -> Path:
    return meeting.with_name("reported")


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if it has an unusual one."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
