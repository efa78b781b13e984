"""Votes while they are counted: from the thread of a request to its stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from .answers import Prediction


class Live:
    """The latest counts of an answer in progress. Counts only: a class or radius exists after the last vote."""

    def __init__(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._latest: dict[str, Any] | None = None

    def tell(self, cast: int, votes: np.ndarray) -> None:
        """Called in the thread of the request. Counts that nobody has read yet are replaced, so a slow client costs nothing."""
        self._latest = {"votes": votes.tolist(), "cast": cast}
        self._loop.call_soon_threadsafe(self._news.set)

    async def begun(self, done: "asyncio.Future[Prediction]") -> None:
        """Wait for the first counts; raises what the request raised before them."""
        done.add_done_callback(lambda _: self._news.set())
        await self._news.wait()
        if done.done():
            done.result()

    async def lines(self, done: "asyncio.Future[Prediction]") -> AsyncIterator[bytes]:
        """Yield the counts as they arrive, then the answer, each as a line of JSON."""
        while not done.done():
            self._news.clear()
            if self._latest is not None:
                yield line(self._latest)
            if not done.done():
                await self._news.wait()
        yield line(done.result().content())


def line(content: dict[str, Any]) -> bytes:
    """A JSON object in one line."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
