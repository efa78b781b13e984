"""Groups of real processes on this machine, started from a server that has the imports done."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpcert.privacy.mechanism import STEPS_PER_BLOCK

LIMIT_SECONDS = 120.0  # for a hang, on a busy machine


def context() -> Any:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.faults.warm"])
    return made


def _rank(environment: Mapping[str, str], block: int, function: Callable[..., Any], arguments: Sequence[Any], end: Any) -> None:
    import torch

    from tests.faults import scene

    os.environ |= environment
    torch.set_num_threads(1)
    scene.make_blocks_small(block)  # the server that ranks are forked from made them smaller, for other tests
    try:
        answer = function(*arguments)
    except BaseException as error:
        answer = Failure(type(error).__name__, str(error), traceback.format_exc())
    end.send(answer)
    end.close()


class Failure(str):
    """What a rank raised."""

    def __new__(cls, kind: str, message: str = "", trace: str = "") -> "Failure":
        made = super().__new__(cls, message)
        made.kind, made.trace = kind, trace
        return made

    def __reduce__(self) -> Any:
        return (Failure, (self.kind, str(self), self.trace))


class Group:
    """Ranks that run the same function."""

    def __init__(self, folder: Path, size: int, function: Callable[..., Any], *arguments: Any, **per_rank: Mapping[str, str]):
        self.processes, self._ends = [], []
        meeting = Path(tempfile.mkdtemp(dir=folder)) / "store"
        for rank in range(size):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "DPCERT_RENDEZVOUS": str(meeting),
                "OMP_NUM_THREADS": "1",
                **per_rank.get(f"rank{rank}", {}),
            }
            mine, theirs = context().Pipe(duplex=False)
            process = context().Process(
                target=_rank, args=(environment, STEPS_PER_BLOCK, function, arguments, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(mine)

    def results(self) -> list[Any]:
        """What each rank returned; None for one that was killed."""
        answers = []
        deadline = time.monotonic() + LIMIT_SECONDS
        for rank, end in enumerate(self._ends):
            if not end.poll(max(0.0, deadline - time.monotonic())):
                self.kill()
                pytest.fail(f"rank {rank} did not end within {LIMIT_SECONDS:g} s")
            try:
                answers.append(end.recv())
            except EOFError:
                answers.append(None)
        for process in self.processes:
            process.join(LIMIT_SECONDS)
        return answers

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def run_ranks(
    folder: Path, size: int, function: Callable[..., Any], *arguments: Any, **per_rank: Mapping[str, str]
) -> list[Any]:
    """Run `function` on `size` ranks and return what each returned; fails if one raised."""
    answers = Group(folder, size, function, *arguments, **per_rank).results()
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Failure), f"rank {rank}: {answer.kind}: {answer}\n{answer.trace}"
    return answers
