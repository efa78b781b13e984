"""Items of work spread over the processes of a group. Rank 0 hands them out and gets the results, in order.

Items go out a few at a time: a faster rank gets more of them, and no rank waits for another. Worker threads compute while the
main thread of each rank exchanges results and new items a few times a second, so a rank that dies is noticed soon, whatever
an item takes.

Guarantee: the results are those of `parallel_map` on one process, in the same order, if ``work`` is a function of the item.
"""

import concurrent.futures
import contextlib
import json
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic

from ..errors import DpcertError, RankError
from ..workers import Item, Result, Tool, in_background, parallel_map
from .world import World

_FIRST_EXCHANGE, _GROWTH, _SECONDS_BETWEEN_EXCHANGES = 0.02, 1.5, 0.25
_STOP, _ITEMS, _END = "stop", "items", "end"


def tell(world: World, value: Any) -> None:
    """Send a JSON value from rank 0 to the ranks that wait in `told`."""
    if world.size > 1:
        world.broadcast(json.dumps(value).encode())


def told(world: World) -> Any:
    """Return what rank 0 tells; raise its error if it stopped."""
    value = json.loads(world.broadcast(None))
    if isinstance(value, dict) and _STOP in value:
        raise RankError(value[_STOP])
    return value


@contextlib.contextmanager
def leading(world: World) -> Iterator[None]:
    """Run what rank 0 does while the others wait for orders: if it fails, they stop too instead of waiting."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # the others may be gone already
            tell(world, {_STOP: str(error) or f"rank 0 stopped ({type(error).__name__})"})
        raise


@dataclass(frozen=True)
class Wire(Generic[Item, Result]):
    """How items and results travel: as JSON values. Numbers keep every bit."""

    item: Callable[[Any], Item]
    pack: Callable[[Result], Any]
    unpack: Callable[[Any], Result]


def spread(
    world: World, tools: Sequence[Tool], work: Callable[[Tool, Item], Result], items: Sequence[Item], wire: Wire[Item, Result]
) -> Iterator[Result]:
    """Yield ``work(tool, item)`` for every item of rank 0, in order. Each tool of each rank runs one item at a time.

    For rank 0. All other ranks call `serve` with equal tools and the same work.
    """
    if world.size == 1:
        yield from parallel_map(tools, work, items)
        return
    bench, offered = _Bench(tools, work, wire), _Offered(items, world.size)
    with contextlib.closing(bench):
        while offered.waited_for < len(items):
            shares = offered.shares()
            tell(world, {_ITEMS: shares})
            bench.begin(shares[0])
            reports = world.gather(bench.report()) or []
            for packed in offered.take([json.loads(report) for report in reports]):
                yield wire.unpack(packed)
        tell(world, {_END: True})


def serve(world: World, tools: Sequence[Tool], work: Callable[[Tool, Item], Result], wire: Wire[Item, Result]) -> None:
    """Work for rank 0, which runs `spread`, until it needs nothing more."""
    bench = _Bench(tools, work, wire)
    with contextlib.closing(bench):
        while _END not in (order := told(world)):
            bench.begin(order[_ITEMS][world.rank])
            world.gather(bench.report())


class SharedPass(Generic[Tool, Item, Result]):
    """A pass over items whose tools are prepared when rank 0 finds that a result is missing. All ranks make one.

    Rank 0 asks for `results` if it needs some, then calls `end`. The others call `serve`.
    """

    def __init__(
        self,
        world: World,
        tools: Callable[[], AbstractContextManager[Sequence[Tool]]],
        work: Callable[[Tool, Item], Result],
        wire: Wire[Item, Result],
    ) -> None:
        self._world, self._tools, self._work, self._wire, self._begun = world, tools, work, wire, False

    def results(self, items: Sequence[Item]) -> Generator[Result]:
        """Yield the results for `items`, in order."""
        self._begun = True
        tell(self._world, True)
        with self._tools() as tools:
            yield from spread(self._world, tools, self._work, items, self._wire)

    def end(self) -> None:
        """Let the other ranks go if there was nothing to do."""
        if not self._begun:
            tell(self._world, False)

    def serve(self) -> None:
        """Work for rank 0, if there is something to do."""
        if told(self._world):
            with self._tools() as tools:
                serve(self._world, tools, self._work, self._wire)


class _Bench(Generic[Tool, Item, Result]):
    """The items that one rank is working on."""

    def __init__(self, tools: Sequence[Tool], work: Callable[[Tool, Item], Result], wire: Wire[Item, Result]) -> None:
        self._submit, self._workers, self._wire = in_background(tools, work), len(tools), wire
        self._running: dict[int, Future[Result]] = {}
        self._seconds = _FIRST_EXCHANGE

    def begin(self, share: list[tuple[int, Any]]) -> None:
        """Start work on new items; each comes with its place."""
        self._running |= {place: self._submit(self._wire.item(packed)) for place, packed in share}

    def report(self) -> bytes:
        """Wait for a while, or until all items are done, and return what is done."""
        concurrent.futures.wait(self._running.values(), self._seconds)
        self._seconds = min(self._seconds * _GROWTH, _SECONDS_BETWEEN_EXCHANGES)
        finished = [place for place, future in self._running.items() if future.done()]
        try:
            done = [(place, self._wire.pack(self._running.pop(place).result())) for place in finished]
        except DpcertError as error:
            return json.dumps({"error": str(error)}).encode()
        return json.dumps({"done": done, "left": len(self._running), "workers": self._workers}).encode()

    def close(self) -> None:
        """Forget the items that have not begun."""
        for future in self._running.values():
            future.cancel()


class _Offered:
    """The items of rank 0: which are to be handed out, and the results that came before their turn."""

    def __init__(self, items: Sequence[Any], ranks: int) -> None:
        self._todo = deque(enumerate(items))
        self._reports: list[dict[str, Any]] = [{"done": [], "left": 0, "workers": 1} for _ in range(ranks)]
        self._early: dict[int, Any] = {}
        self.waited_for = 0  # the place of the next result to give

    def shares(self) -> list[list[tuple[int, Any]]]:
        """Choose new items for each rank: work for two exchanges at its speed, less where little is left for all."""
        unfinished = len(self._todo) + sum(report["left"] for report in self._reports)
        fair = math.ceil(unfinished / len(self._reports))
        shares = []
        for report in self._reports:
            wanted = min(fair, 2 * len(report["done"]) + report["workers"] + 1) - report["left"]
            shares.append([self._todo.popleft() for _ in range(min(max(0, wanted), len(self._todo)))])
        return shares

    def take(self, reports: list[dict[str, Any]]) -> Generator[Any]:
        """Yield the results whose turn it is."""
        for report in reports:
            if "error" in report:
                raise RankError(report["error"])
        self._reports = reports
        self._early.update((place, packed) for report in reports for place, packed in report["done"])
        while self.waited_for in self._early:
            packed = self._early.pop(self.waited_for)
            self.waited_for += 1
            yield packed
