"""Worlds whose ranks are threads of one process: quick, and a test can look at every rank."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from dpcert.errors import RankError
from dpcert.scale.world import World

LIMIT_SECONDS = 60.0


class ThreadWorld(World):
    """A world in which messages go through queues. A rank waits for one that has ended no longer than for its last message."""

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], Any], ended: set[int]) -> None:
        super().__init__(rank, size)
        self._boxes, self._ended = boxes, ended

    def _receive(self, sender: int) -> bytes:
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            gone = sender in self._ended
            try:
                return self._boxes[sender, self.rank].get(timeout=0.0 if gone else 0.01)
            except queue.Empty:
                if gone:
                    break
        raise RankError(f"rank {self.rank} lost rank {sender}")

    def broadcast(self, value: bytes | None) -> bytes:
        if not self.is_first:
            return self._receive(0)
        for other in range(1, self.size):
            self._boxes[0, other].put(value)
        return value or b""

    def gather(self, value: bytes) -> list[bytes] | None:
        if self.is_first:
            return [value, *(self._receive(other) for other in range(1, self.size))]
        self._boxes[self.rank, 0].put(value)
        return None

    def total(self, number: int) -> int:
        found = self.gather(str(number).encode())
        return int(self.broadcast(None if found is None else str(sum(map(int, found))).encode()))

    def agree(self, what: str, value: str) -> None:
        found = self.gather(value.encode())
        alike = self.broadcast(None if found is None else str(len(set(found))).encode()) == b"1"
        if not alike:
            raise RankError(f"the ranks differ in {what}")


def on_threads(size: int, function: Callable[[World], Any]) -> list[Any]:
    """Run ``function(world)`` on every rank; return what each returned or raised."""
    boxes = {(sender, to): queue.SimpleQueue() for sender in range(size) for to in range(size)}
    answers, ended = [None] * size, set()

    def run(rank: int) -> None:
        try:
            answers[rank] = function(ThreadWorld(rank, size, boxes, ended))
        except BaseException as error:
            answers[rank] = error
        finally:
            ended.add(rank)

    def own_pool(workers: int, threads_each: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(workers)  # processes do not share theirs

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    with mock.patch("dpcert.workers._pool", own_pool):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), "a rank hangs"
    return answers
