"""Turns: fair, bounded, and ended by a deadline or a cancellation."""

import asyncio
import threading
import time

import pytest

from dpcert.serve.turns import CancelledError, Desk, FullError, Ticket, TimeLimitError, Turns


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def order_of_turns(turns: Turns, threads: int = 3, each: int = 12) -> list[int]:
    """Whose turn it was, one after the other, while all threads want more."""
    order: list[int] = []
    begin = turns.take()

    def work(name: int) -> None:
        for _ in range(each):
            with turns.turn():
                order.append(name)
                others = sum(order.count(other) < each for other in range(threads) if other != name)
                until(lambda others=others: len(turns._waiting) == others)  # all others have asked again

    running = []
    for name in range(threads):
        running.append(threading.Thread(target=work, args=(name,)))
        running[-1].start()
        until(lambda: len(turns._waiting) == len(running))
    turns.give(begin)
    for thread in running:
        thread.join()
    return order


def test_requests_take_turns_in_the_order_of_asking():
    assert order_of_turns(Turns(["tool"]))[:30] == [0, 1, 2] * 10


def test_twin_a_stack_would_starve_the_first():
    class Stack(Turns):
        def give(self, tool):
            with self._lock:
                if self._waiting:
                    self._waiting.pop().set_result(tool)
                else:
                    self._free.append(tool)

    assert order_of_turns(Stack(["tool"]))[:30] != [0, 1, 2] * 10


def test_a_tool_is_never_lent_twice_and_never_lost():
    turns, held, most = Turns(list(range(3))), [0] * 3, []

    def work() -> None:
        for _ in range(200):
            with turns.turn() as tool:
                held[tool] += 1
                most.append(held[tool])
                held[tool] -= 1

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and sorted(turns._free) == [0, 1, 2] and not turns._waiting


def test_a_ticket_stops_at_its_deadline_and_gives_its_tool_back():
    turns = Turns(["tool"])
    late = Ticket(turns, -1.0)
    with pytest.raises(TimeLimitError), late.turn():
        raise AssertionError("not reached")
    ticket = Ticket(turns, 60.0)
    ticket.cancel()
    with pytest.raises(CancelledError), ticket.turn():
        raise AssertionError("not reached")
    assert list(turns._free) == ["tool"]


def test_a_long_turn_lets_others_go_first_and_can_be_cancelled():
    turns = Turns(["tool"])
    ticket, others = Ticket(turns, 60.0), []

    def other() -> None:
        with turns.turn():
            others.append("other")

    with pytest.raises(CancelledError), ticket.long_turn() as pass_on:
        thread = threading.Thread(target=other)
        thread.start()
        until(lambda: turns._waiting)
        assert others == []
        pass_on()
        assert others == ["other"]
        thread.join()
        ticket.cancel()
        pass_on()
    assert list(turns._free) == ["tool"]


def test_a_desk_admits_no_more_than_its_limit_and_counts_threads_not_clients():
    async def scenario() -> None:
        desk, go = Desk(["tool"], 2, 60.0), threading.Event()

        def work(ticket):
            go.wait(30)
            with ticket.turn():
                return "answer"

        first, second = asyncio.ensure_future(desk.run(work)), asyncio.ensure_future(desk.run(work))
        await asyncio.sleep(0)
        with pytest.raises(FullError):
            await desk.run(work)
        second.cancel()  # its client has gone, but its thread still runs
        await asyncio.sleep(0)
        assert desk.in_progress == 2
        go.set()
        assert await first == "answer"
        while desk.in_progress:
            await asyncio.sleep(0.001)
        assert await desk.run(work) == "answer"

    asyncio.run(scenario())


def test_cancelled_work_stops_at_its_next_turn():
    async def scenario() -> None:
        desk, turns, stopped = Desk(["tool"], 1, 60.0), [], threading.Event()

        def work(ticket):
            try:
                while True:
                    with ticket.turn():
                        turns.append(1)
                        time.sleep(0.001)
            finally:
                stopped.set()

        waiting = asyncio.ensure_future(desk.run(work))
        while not turns:
            await asyncio.sleep(0.001)
        waiting.cancel()
        assert await asyncio.to_thread(stopped.wait, 30)

    asyncio.run(scenario())
