"""Run different items on different cores, instead of splitting each layer across cores."""

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

MOST_WORKERS = 8
Tool = TypeVar("Tool")
Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_count(device: torch.device) -> int:
    """Return the number of workers: one per thread on a CPU (at most 8), one on other devices."""
    return min(torch.get_num_threads(), MOST_WORKERS) if device.type == "cpu" else 1


def parallel_map(tools: Sequence[Tool], work: Callable[[Tool, Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield ``work(tool, item)`` for every item, in order. Each tool runs one item at a time; all tools run in parallel."""
    if len(tools) == 1:
        yield from (work(tools[0], item) for item in items)
        return
    submit = in_background(tools, work)
    futures = [submit(item) for item in items]
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def in_background(tools: Sequence[Tool], work: Callable[[Tool, Item], Result]) -> Callable[[Item], Future[Result]]:
    """Return a function that starts ``work(tool, item)`` in a worker thread as soon as one of the tools is free."""
    free: queue.SimpleQueue[Tool] = queue.SimpleQueue()
    for tool in tools:
        free.put(tool)
    inference = torch.is_inference_mode_enabled()
    pool = _pool(len(tools), max(1, torch.get_num_threads() // len(tools)))

    def job(item: Item) -> Result:
        tool = free.get()
        try:
            with torch.inference_mode(inference):
                return work(tool, item)
        finally:
            free.put(tool)

    return lambda item: pool.submit(job, item)


@cache
def _pool(workers: int, threads_each: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, "dpcert", initializer=torch.set_num_threads, initargs=(threads_each,))
