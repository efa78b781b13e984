"""Share the cores between requests: a bounded number of requests, which take turns of a few votes each.

Every request that is admitted has its own thread. A thread computes only while it holds one of the tools (a counter of votes),
and tools are handed out in the order of asking. So with k requests each gets 1/k of the cores, however many votes it wants.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Tool = TypeVar("Tool")
Result = TypeVar("Result")


class FullError(Exception):
    """As many requests as allowed are in progress."""


class TimeLimitError(Exception):
    """A request took longer than allowed."""


class CancelledError(Exception):
    """Nobody waits for the result any more."""


class Turns(Generic[Tool]):
    """Tools that threads borrow, one thread a tool, in the order of asking."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._lock = threading.Lock()
        self._free, self._waiting = deque(tools), deque[Future[Tool]]()  # one of them is empty

    @contextlib.contextmanager
    def turn(self) -> Iterator[Tool]:
        """Wait for a tool, and give it to the thread that waited longest afterwards."""
        tool = self.take()
        try:
            yield tool
        finally:
            self.give(tool)

    def take(self) -> Tool:
        """Wait for a tool. Whoever takes it gives it back."""
        with self._lock:
            if self._free:
                return self._free.popleft()
            mine: Future[Tool] = Future()
            self._waiting.append(mine)
        return mine.result()

    def give(self, tool: Tool) -> None:
        """Give a tool to the thread that has waited longest."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set_result(tool)
            else:
                self._free.append(tool)


class Ticket(Generic[Tool]):
    """What a request needs to compute: turns, until its time is over or it is cancelled."""

    def __init__(self, turns: Turns[Tool], seconds: float) -> None:
        self._turns, self._deadline, self._cancelled = turns, time.monotonic() + seconds, threading.Event()

    @contextlib.contextmanager
    def turn(self) -> Iterator[Tool]:
        """Wait for a tool; raises if the request should stop."""
        self._check()
        with self._turns.turn() as tool:
            self._check()
            yield tool

    @contextlib.contextmanager
    def long_turn(self) -> Iterator[Callable[[], None]]:
        """Hold a tool for work of many steps. The function that is yielded lets others go first, or raises to stop the work."""
        self._check()
        held = [self._turns.take()]

        def pass_on() -> None:
            self._turns.give(held.pop())
            held.append(self._turns.take())
            self._check()

        try:
            yield pass_on
        finally:
            self._turns.give(held.pop())

    def cancel(self) -> None:
        """Make the next turn raise."""
        self._cancelled.set()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError
        if time.monotonic() > self._deadline:
            raise TimeLimitError


class Desk(Generic[Tool]):
    """Admits at most `limit` requests at a time and runs each in a thread; use it from one event loop."""

    def __init__(self, tools: Sequence[Tool], limit: int, seconds: float) -> None:
        self.limit, self.in_progress = limit, 0
        self._seconds, self._turns = seconds, Turns(tools)
        self._pool = ThreadPoolExecutor(limit, "dpcert-serve", initializer=torch.set_num_threads, initargs=(1,))

    def start(self, work: Callable[[Ticket[Tool]], Result]) -> tuple[Ticket[Tool], "asyncio.Future[Result]"]:
        """Start ``work(ticket)`` in a thread; raises `FullError` if too many requests are in progress."""
        if self.in_progress >= self.limit:
            raise FullError
        ticket = Ticket(self._turns, self._seconds)
        self.in_progress += 1
        done = asyncio.get_running_loop().run_in_executor(self._pool, work, ticket)
        done.add_done_callback(self._leave)
        return ticket, done

    def _leave(self, done: "asyncio.Future[Result]") -> None:
        self.in_progress -= 1
        if not done.cancelled():
            done.exception()  # seen, also if the client has gone

    async def run(self, work: Callable[[Ticket[Tool]], Result]) -> Result:
        """Start ``work(ticket)`` and wait for it. If the waiting task is cancelled, the work stops at its next turn."""
        ticket, done = self.start(work)
        try:
            return await asyncio.shield(done)  # the request is in progress until its thread has ended
        finally:
            ticket.cancel()
