"""Items of work on several ranks: each is done once, and the results come in order, whatever the ranks' speeds."""

import json
import math
import time
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpcert.errors import ModelError, RankError
from dpcert.scale import shards
from dpcert.scale.shards import SharedPass, Wire, leading, serve, spread, tell, told
from dpcert.scale.world import ALONE
from tests.scale.threads import on_threads

SQUARES: Wire[int, tuple[int, float]] = Wire(item=int, pack=list, unpack=tuple)


def square(tool: str, item: int) -> tuple[int, float]:
    return item, math.sqrt(item) / 3.0


def results_of(size, items, tools=("a",), work=square):
    """The results on rank 0 of `size` ranks."""

    def rank(world):
        if world.is_first:
            return list(spread(world, tools, work, items, SQUARES))
        return serve(world, tools, work, SQUARES)

    return on_threads(size, rank)[0]


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(1, 5),
    items=st.lists(st.integers(0, 10**6), max_size=60),
    tools=st.integers(1, 3),
    slow=st.sets(st.integers(0, 59)),
)
@example(size=4, items=[], tools=1, slow=set())
@example(size=5, items=[3], tools=2, slow={0})  # most ranks get nothing
def test_results_are_those_of_one_process_in_order(size, items, tools, slow):
    done = Counter()

    def work(tool, item):
        done[item] += 1
        time.sleep(0.003 if item % 60 in slow else 0.0)
        return square(tool, item)

    assert results_of(size, items, "abc"[:tools], work) == [square("", item) for item in items]
    assert done == Counter(items)


def test_twin_results_in_the_order_of_arrival_are_seen(monkeypatch):
    def as_they_come(self, reports):
        self._reports = reports
        for report in reports[::-1]:
            for _, packed in report["done"]:
                self.waited_for += 1
                yield packed

    monkeypatch.setattr(shards._Offered, "take", as_they_come)
    with pytest.raises(AssertionError):
        assert results_of(2, list(range(20))) == [square("", item) for item in range(20)]


def test_a_faster_rank_gets_more():
    def rank(world):
        done = []

        def work(tool, item):
            time.sleep(0.002 if world.rank == 2 else 0.03)
            done.append(item)
            return square(tool, item)

        if world.is_first:
            list(spread(world, "a", work, range(120), SQUARES))
        else:
            serve(world, "a", work, SQUARES)
        return len(done)

    slow, slower, fast = on_threads(3, rank)
    assert slow + slower + fast == 120
    assert fast > 2 * max(slow, slower)


def test_numbers_keep_every_bit():
    values = [0.1, 1e-300, math.pi, 5e-324, -0.0, float("inf"), 2.0**53 + 2]
    assert [json.loads(json.dumps(value)).hex() for value in values] == [value.hex() for value in values]
    assert results_of(3, [2, 3, 5, 7]) == [square("", item) for item in (2, 3, 5, 7)]


@pytest.mark.parametrize("at_fault", [0, 2])
def test_an_error_of_one_rank_stops_all_with_its_words(at_fault):
    def rank(world):
        def work(tool, item):
            time.sleep(0.002)
            if world.rank == at_fault and item > 10:
                raise ModelError("the model is broken; mend it")
            return square(tool, item)

        if not world.is_first:
            return serve(world, "a", work, SQUARES)
        with leading(world):
            return list(spread(world, "a", work, range(200), SQUARES))

    began = time.monotonic()
    answers = on_threads(3, rank)
    assert [str(answer) for answer in answers] == 3 * ["the model is broken; mend it"]
    assert all(isinstance(answer, RankError) for answer in answers) and time.monotonic() - began < 10


def test_what_rank_0_cannot_do_with_a_result_stops_all():
    """A full disk, for example: the consumer raises between two results."""

    def rank(world):
        if not world.is_first:
            return serve(world, "a", square, SQUARES)
        with leading(world):
            for number, _ in enumerate(spread(world, "a", square, range(50), SQUARES)):
                if number == 7:
                    raise OSError(28, "No space left on device")

    first, second = on_threads(2, rank)
    assert isinstance(first, OSError) and isinstance(second, RankError) and "No space left" in str(second)


def test_a_pass_without_work_prepares_nothing():
    prepared = []

    def rank(world):
        shared = SharedPass(world, lambda: prepared.append(1), square, SQUARES)
        if not world.is_first:
            shared.serve()
            return told(world)
        shared.end()
        tell(world, "after")
        return "after"

    assert on_threads(3, rank) == ["after"] * 3 and not prepared
    assert rank(ALONE) == "after"


def test_the_last_items_are_divided_between_the_ranks():
    """Work for half a second must not wait at one rank while the others have nothing left."""
    offered = shards._Offered(list(range(12)), 3)
    offered._reports = [{"done": [0] * 50, "left": 0, "workers": 1} for _ in range(3)]
    assert [len(share) for share in offered.shares()] == [4, 4, 4]
