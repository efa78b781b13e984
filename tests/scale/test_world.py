"""The group itself: what each rank receives, and what happens when ranks differ or die."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from dpcert.errors import RankError
from dpcert.gradients.engine import ClippedSum
from dpcert.scale import environment
from dpcert.scale.world import ALONE, World, join
from tests.scale.group import LIMIT_SECONDS, Failure, Group, run_ranks


def clipped(value: torch.Tensor) -> ClippedSum:
    return ClippedSum(value, 0.25, torch.ones(2, dtype=torch.float64))


def everything(odd: float) -> dict[str, object]:
    """Every message once, on each rank."""
    world = join()
    assert join() is world  # the second call meets nobody
    rank, size = world.rank, world.size
    summed = world.sum(clipped(torch.tensor([1.0 + rank, odd, float("nan") if rank else 0.0], dtype=torch.float64)))
    long = bytes(range(256)) * 4000
    failures = []
    for value in ("same", f"value of {min(rank, 1)}", "x" * 64 + str(min(rank, 1)), "a = 1\nb = 2" + "\nc = 3" * min(rank, 1)):
        try:
            world.agree("the test", value)
        except RankError as error:
            failures.append(str(error))
    try:
        world.first(lambda: (_ for _ in ()).throw(RankError("rank 0 says no; ask again")))
    except RankError as error:
        failures.append(str(error))
    return {
        "place": (rank, size, world.is_first),
        "sum": (summed.value[:2].tolist(), bool(summed.value[2].isnan()), summed.sensitivity, len(summed.norms)),
        "share": [list(world.share(count)) for count in (0, 1, 5, 8)],
        "broadcast": (world.broadcast(b"key" if rank == 0 else None), world.broadcast(long if rank == 0 else None) == long),
        "empty": world.broadcast(b"" if rank == 0 else None),
        "gather": world.gather(b"x" * rank),
        "gather_nothing": world.gather(b""),
        "any": (world.any(rank == size - 1), world.any(False), world.total(rank + 1)),
        "first": world.first(lambda: b"done"),
        "from_first": world.from_first(lambda: torch.tensor([0.1, odd]), torch.zeros(2)).tolist(),
        "failures": failures,
    }


def test_every_message_on_three_ranks(tmp_path):
    odd = 0.1 + 2.0**-40  # lost in float32
    answers = run_ranks(tmp_path, 3, everything, odd)
    assert [answer["place"] for answer in answers] == [(0, 3, True), (1, 3, False), (2, 3, False)]
    for answer in answers:
        assert answer["sum"] == ([6.0, pytest.approx(3 * odd, abs=1e-15)], True, 0.25, 2)
        assert answer["broadcast"] == (b"key", True) and answer["empty"] == b""
        assert answer["any"] == (True, False, 6) and answer["first"] == b"done"
        assert answer["from_first"] == torch.tensor([0.1, odd]).tolist()
    assert [answer["gather"] for answer in answers] == [[b"", b"x", b"xx"], None, None]
    assert [answer["gather_nothing"] for answer in answers] == [[b"", b"", b""], None, None]
    for place, count in enumerate((0, 1, 5, 8)):
        assert sorted(i for answer in answers for i in answer["share"][place]) == list(range(count))
    short, digest, lines, first = answers[0]["failures"]
    assert all(answer["failures"] == answers[0]["failures"] for answer in answers)  # the same words on every rank
    assert "rank 1 and rank 0 differ in the test (value of 1, rank 0: value of 0)" in short
    assert "x" * 10 not in digest and "(c = 3, rank 0: )" in lines and first == "rank 0 says no; ask again"


def test_alone_needs_no_group():
    value = clipped(torch.ones(3, dtype=torch.float64))
    assert ALONE.sum(value) is value and ALONE.broadcast(b"a") == b"a" and ALONE.gather(b"a") == [b"a"]
    assert ALONE.share(5) == range(5) and ALONE.any(True) and not ALONE.any(False) and ALONE.is_first
    assert ALONE.first(lambda: b"x") == b"x" and join() is ALONE
    ALONE.agree("anything", "at all")
    ALONE.wait()
    made = torch.ones(2)
    assert ALONE.from_first(lambda: made, made) is made


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 100])
def test_shares_are_disjoint_and_cover_everything(size, count):
    shares = [World(rank, size).share(count) for rank in range(size)]
    assert [index for share in shares for index in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, must be below WORLD_SIZE = 2"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1', must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "must be below"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1, must be below"),
        ({"RANK": "²", "WORLD_SIZE": "2"}, "must be a whole number"),
    ],
)
def test_a_wrong_environment_is_one_clear_line(given, words):
    with pytest.raises(RankError, match="; ") as raised:
        environment.place(given)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_without_an_environment_a_process_is_alone():
    assert environment.place({}) == environment.ALONE
    assert environment.place({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).local_rank == 1


def test_only_ranks_that_are_known_to_share_a_machine_use_its_loopback():
    """srun sets no LOCAL_WORLD_SIZE: ranks on other machines could not reach a loopback interface."""
    given = {"RANK": "3", "WORLD_SIZE": "4"}
    assert not environment.place(given).on_one_machine and environment.place(given | {"SLURM_LOCALID": "1"}).local_rank == 1
    assert environment.place(given | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}).on_one_machine
    assert not environment.place(given | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).on_one_machine


def _sizes_differ() -> None:
    join()


def test_ranks_started_for_different_sizes_say_so(tmp_path):
    answers = Group(tmp_path, 2, _sizes_differ, rank1={"WORLD_SIZE": "3"}).results()
    assert [answer.kind for answer in answers] == ["RankError", "RankError"]
    assert "rank 0 was started for 2 ranks, rank 1 for 3" in answers[0] and "rank 0 for 2" in answers[1]


def _loses_a_rank() -> float:
    import time

    world = join()
    world.wait()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        world.wait()
    except RankError as error:
        assert "lost another rank" in str(error) and "rerun the same command" in str(error)
        return time.monotonic() - began
    return -1.0


def test_the_others_notice_a_killed_rank_within_seconds(tmp_path):
    first, killed, third = Group(tmp_path, 3, _loses_a_rank).results()
    assert killed is None and not isinstance(first, Failure), getattr(first, "trace", "")
    assert 0 <= first < 10 and 0 <= third < 10


LEAVING = """
import importlib, pathlib, sys
if sys.argv[1] == "twin":
    importlib.import_module = lambda name: None  # nothing is imported before the ranks meet
from dpcert.scale import world
world.join().total(1)
import torch.distributed.nn.functional  # as optimizers do
world._leave()
names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
print(sum("gloo" in name for name in names), flush=True)
__import__("os")._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads thread names from /proc")
@pytest.mark.parametrize(("version", "threads_stay"), [("real", False), ("twin", True)])
def test_no_thread_of_the_group_outlives_it(tmp_path, version, threads_stay):
    """Such a thread can abort a rank at its very end, after all work is done."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "DPCERT_RENDEZVOUS": str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVING, version],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [int(rank.communicate(timeout=LIMIT_SECONDS)[0]) > 0 for rank in ranks] == [threads_stay] * 2
