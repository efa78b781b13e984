"""What runs in the processes that are killed."""

import contextlib
import mmap
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dpcert.errors import RunError
from dpcert.runs.certify import certify, request_of
from dpcert.runs.open import open_run
from dpcert.runs.training import train
from dpcert.store import growing
from dpcert.store.runs import RunDirectory
from dpcert.training import loop
from tests.faults import scene


def processes() -> Any:
    """Processes forked from a server that has the imports done, and no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.warm"])
    return context


def settle(counter: Path | None = None) -> None:
    """Small blocks, one thread, and steps counted where they are asked for."""
    torch.set_num_threads(1)
    scene.make_blocks_small()
    growing._SECONDS_BETWEEN_SYNCS = -1.0
    if counter is not None:
        _count_steps(counter)


def _count_steps(counter: Path) -> None:
    """Note the steps that have begun where a kill cannot take them back: in memory shared with a file."""
    with counter.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    real = loop.private_step

    def counted(problem, step):
        shared[:8] = max(step + 1, int.from_bytes(shared[:8], "little")).to_bytes(8, "little")
        return real(problem, step)

    loop.private_step = counted


def whole_run(data: Path, out: Path, counter: Path, ready: Any) -> None:
    """Train and certify."""
    settle(counter)
    ready.set()
    scene.train(data, out)
    scene.certify(data, out)


def held(stage: str, data: Path, out: Path, ready: Any, lock: str) -> None:
    """Come to the middle of `stage` and stay there until killed."""
    settle()
    if lock == "file":
        RunDirectory.locked = locked_by_a_file

    def stay(done: int, total: int, **facts: str) -> None:
        if done == 4:
            ready.set()
            time.sleep(3600)

    if stage == "train":
        train(scene.config(data), out, stay)
    else:
        certify(open_run(out), request_of(scene.config(data)), progress=stay)


@contextlib.contextmanager
def locked_by_a_file(directory: RunDirectory) -> Iterator[None]:
    """Broken twin: a lock that outlives its process."""
    path = directory.path / "lock"
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise RunError(f"{directory.path} is in use by another process") from error
    yield
    path.unlink()


@contextlib.contextmanager
def not_locked(directory: RunDirectory) -> Iterator[None]:
    """Broken twin: no lock."""
    yield
