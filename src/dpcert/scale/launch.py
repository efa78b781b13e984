"""``--processes N``: start N ranks of the same command on this machine, and end them together.

torchrun does this too, and on several machines. But it prints its own report of a failure, exits with 1 whatever the ranks
exit with, and stops a rank twice on Ctrl-C. Does not import torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import RankError
from ..interrupts import Interrupted
from .environment import LAUNCHER_PIPE, RENDEZVOUS, core_count, has_reported, loopback_interface
from .tasks import INTERRUPTED

SECONDS_TO_END = 10.0  # for the other ranks, after one has failed; they notice it at their next exchange
_SECONDS_BETWEEN_LOOKS = 0.05
INVALID_REQUEST = 2


def launch(command: Sequence[str], processes: int) -> int:
    """Run `command` on `processes` ranks and return the exit code: that of the rank that failed, 0 if none did.

    Ctrl-C, SIGTERM and SIGHUP are passed on once, as SIGTERM: the ranks save their state and exit with 130. If this process
    is killed, so that it cannot pass on anything, the ranks notice it and stop too.
    """
    with tempfile.TemporaryDirectory(prefix="dpcert-") as folder, _pipe() as end, _passing_on() as (ranks, asked):
        meeting = Path(folder) / "ranks"
        for rank in range(processes):
            ranks.append(_start(command, rank, processes, meeting, end))
        if asked:  # while they were started
            _stop(ranks, signal.SIGTERM)
        try:
            _wait(ranks)
        finally:
            _stop(ranks, signal.SIGKILL)
        codes = [process.wait() for process in ranks]
        return _verdict(codes, reported=has_reported(meeting), asked=bool(asked))


def _verdict(codes: list[int], *, reported: bool, asked: bool) -> int:
    """Return the exit code of all ranks together; raise if none of them has said what is wrong."""
    if not any(codes):
        return 0
    if INTERRUPTED in codes:
        return INTERRUPTED
    if asked:
        raise Interrupted
    if reported:
        return INVALID_REQUEST if INVALID_REQUEST in codes else 1
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    raise RankError(f"rank {rank} {how}; rerun the same command to resume")


def _start(command: Sequence[str], rank: int, size: int, meeting: Path, end: int) -> "subprocess.Popen[bytes]":
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, LAUNCHER_PIPE: end}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}, RENDEZVOUS: str(meeting)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, core_count() // size)))
    if (interface := loopback_interface()) is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface  # nothing leaves the machine
    # A session of its own: Ctrl-C in the terminal reaches this process only, which passes it on.
    return subprocess.Popen(list(command), env=environment, stdin=subprocess.DEVNULL, pass_fds=(end,), start_new_session=True)


def _wait(ranks: list["subprocess.Popen[bytes]"]) -> None:
    """Return when all ranks have ended, or some seconds after one has failed."""
    deadline: float | None = None
    while any(process.poll() is None for process in ranks):
        if deadline is None and any(process.poll() for process in ranks):
            deadline = time.monotonic() + SECONDS_TO_END
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _stop(ranks: list["subprocess.Popen[bytes]"], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


@contextlib.contextmanager
def _passing_on() -> Iterator[tuple[list["subprocess.Popen[bytes]"], list[int]]]:
    """Pass signals on to the processes in the first list; the second one lists the signals."""
    ranks: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        asked.append(number)
        _stop(ranks, signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield ranks, asked
        return
    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield ranks, asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _pipe() -> Iterator[int]:
    """Yield the end of a pipe whose other end closes with this process, however it ends."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def stop_with_launcher() -> None:
    """In a rank: receive SIGTERM when the launcher has ended, so that no rank outlives a launcher that was killed."""
    end = os.environ.pop(LAUNCHER_PIPE, None)  # not for processes that this one starts
    if end is None or not end.isdecimal():
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(int(end), 1)  # returns at the end of the file only: nobody writes
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def this_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs this program again with `arguments`."""
    program = Path(sys.argv[0])
    if program.name == "dpcert" and program.is_file():
        return [sys.executable, str(program), *arguments]
    return [sys.executable, "-m", "dpcert", *arguments]
