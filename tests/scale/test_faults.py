"""Ranks that die or differ: the others stop, no step is charged twice or lost, and any number of ranks resumes."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import dpcert
from dpcert.errors import DpcertError
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import Mechanism
from dpcert.rng import key_from_seed
from dpcert.runs.training import train as train_in_directory
from dpcert.scale.world import World, join
from dpcert.store.runs import RunDirectory
from dpcert.training import loop, ranks, state, step
from tests.faults import scene
from tests.scale import trainings
from tests.scale.group import Failure, Group, run_ranks

TOLERANCE = 1e-6
EXCHANGES = ("sum", "from_first", "total", "broadcast", "first", "agree")


def train(data: Path, out: Path) -> None:
    """Eight steps in blocks of three, on all ranks."""
    scene.make_blocks_small()
    train_in_directory(scene.config(data), out, world=join())


def die_at(rank: int, exchange: int, after: bool) -> Any:
    """Make `rank` kill itself at its n-th exchange with the others, before or after it took effect."""
    count = [0]

    def counted(real: Any) -> Any:
        def call(self: World, *arguments: Any, **options: Any) -> Any:
            count[0] += 1
            now = self.rank == rank and count[0] == exchange
            if now and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(self, *arguments, **options)
            if now:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    return mock.patch.multiple(World, **{name: counted(getattr(World, name)) for name in EXCHANGES})


def killed_training(data: Path, out: Path, rank: int, exchange: int, after: bool) -> str:
    with die_at(rank, exchange, after):
        train(data, out)
    return "finished"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted training by one process."""
    folder = tmp_path_factory.mktemp("whole")
    data = scene.write_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("dpcert.privacy.mechanism", "dpcert.training.loop", "dpcert.training.lifecycle"):
            patch.setattr(f"{module}.STEPS_PER_BLOCK", 3)
        train_in_directory(scene.config(data), folder / "out")
    return data, folder / "out"


def assert_alike(expected: Path, found: Path) -> None:
    assert (expected / "ledger.jsonl").read_bytes() == (found / "ledger.jsonl").read_bytes()
    assert (expected / "config.toml").read_bytes() == (found / "config.toml").read_bytes()
    one, other = (state.read_model(path / "model.safetensors")[0] for path in (expected, found))
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=TOLERANCE)
    assert not list((found / "private").iterdir())


def kill_and_resume(whole: Any, out: Path, rank: int, exchange: int, after: bool, sizes: tuple[int, int]) -> bool:
    """Return whether the rank was killed (it may have finished before)."""
    data, expected = whole
    answers = Group(out.parent, sizes[0], killed_training, data, out, rank, exchange, after).results()
    killed = answers[rank] is None
    if killed and (out / "ledger.jsonl").exists():
        charged = Ledger.load(out / "ledger.jsonl").steps_authorised
        done = json.loads(RunDirectory(out).state.read_text())["step"] if RunDirectory(out).state.exists() else scene.STEPS
        assert done <= charged <= min(scene.STEPS, done + 2 * scene.STEPS_PER_BLOCK), "charged ahead, by a block at most"
    for place, answer in enumerate(answers):
        if place != rank:  # it ended: with an error that says so, or because everything was done
            assert answer == "finished" or (isinstance(answer, Failure) and answer.kind == "RankError"), answer.trace
    run_ranks(out.parent, sizes[1], train, data, out)
    assert_alike(expected, out)
    return killed


def test_a_killed_rank_ends_the_others_and_another_number_resumes(whole, tmp_path):
    """Rank 1 of two dies in the second block; three ranks go on."""
    assert kill_and_resume(whole, tmp_path / "out", 1, 34, False, (2, 3))


def test_a_killed_first_rank_leaves_a_run_that_one_process_resumes(whole, tmp_path):
    """Rank 0, the owner of the files, dies between the sum and the release."""
    assert kill_and_resume(whole, tmp_path / "out", 0, 29, True, (2, 1))


@pytest.mark.slow
def test_kills_at_random_moments(whole, tmp_path, evidence):
    choose, kills = random.Random(1), 0
    for number in range(60):
        sizes = choose.choice((2, 3, 4)), choose.choice((1, 2, 3, 4))
        rank, exchange, after = choose.randrange(sizes[0]), choose.randrange(1, 60), choose.random() < 0.5
        folder = tmp_path / str(number)
        folder.mkdir()
        kills += kill_and_resume(whole, folder / "out", rank, exchange, after, sizes)
    assert kills > 40
    evidence("D18", figure=f"{kills} kills of a rank: same ledger bytes, weights within 1e-6", trials=60)


def charged_ahead(data: Path, out: Path, twin: bool) -> list[int]:
    """Return the steps that this rank computed before they were in the ledger's file.

    Twin: the ranks do not wait for each other, and rank 0 charges when rank 1 has begun to compute.
    """
    early: list[int] = []
    compute, charge = step.clipped_sum, Mechanism.charge

    def noted(context: Any, batch: Any, number: int, rows: int) -> Any:
        if not context.world.is_first:
            (out.parent / f"computes-{number}").touch()
            early.extend([number] if Ledger.load(out / "ledger.jsonl").steps_authorised <= number else [])
        return compute(context, batch, number, rows)

    def late(self: Mechanism, number: int) -> bool:
        if join().is_first and number >= self.ledger.steps_authorised:
            wait_until = (out.parent / f"computes-{number}").exists if twin else lambda: True
            time.sleep(0.5)
            while not wait_until():
                time.sleep(0.01)
            if twin:
                time.sleep(0.2)  # until rank 1 has read the file
        return charge(self, number) and not twin

    with mock.patch.object(step, "clipped_sum", noted), mock.patch.object(Mechanism, "charge", late):
        train(data, out)
    return early


def both_charges(data: Path, folder: Path) -> tuple[list[int], list[int]]:
    return charged_ahead(data, folder / "real" / "out", False), charged_ahead(data, folder / "twin" / "out", True)


def memory_runs_out(fail: bool) -> np.ndarray:
    """Train; if `fail`, the parts of rank 1 do not fit in memory until they are halved a few times."""
    real, sizes = step._clipped_sum_of, []

    def small_only(context: Any, engine: Any, indices: Any, part: Any, number: int) -> Any:
        sizes.append(part.size)
        if fail and context.world.rank == 1 and part.size > 8:
            raise RuntimeError("out of memory")
        return real(context, engine, indices, part, number)

    with mock.patch.object(step, "_clipped_sum_of", small_only):
        trained = trainings.train("dp-gaussian", batch_size=120, epochs=4)[1]
    assert max(sizes) > 8
    return trained


def machines_differ() -> list[np.ndarray]:
    """Train where small parts change no bit on any machine, and where they do on rank 1's."""
    trained = []
    for same_on_rank_1 in (True, False):
        with mock.patch.object(loop, "small_parts_change_no_bit", lambda _, yes=same_on_rank_1: yes or join().is_first):
            trained.append(trainings.train("dp-gaussian", batch_size=120, epochs=4)[1])
    return trained


def releases() -> int:
    """Train and return how often this rank drew noise."""
    count, real = [0], Mechanism.release

    def counted(self: Mechanism, clipped: Any, number: int) -> Any:
        count[0] += 1
        return real(self, clipped, number)

    with mock.patch.object(Mechanism, "release", counted):
        trainings.train("dp-gaussian", epochs=1)
    return count[0]


DIFFERENCES = {
    "package": ("package versions", "dpcert = 9.9"),
    "data": ("training data", ""),
    "labels": ("training data", ""),
    "settings": ("settings", "train.epochs = 3.0"),
    "method": ("settings", ""),
    "model": ("settings", "parameter 1.weight"),
    "devices": ("devices", "2 cpu"),
}


def other_request(kind: str) -> str:
    """Train with a difference on rank 1; return the error."""
    odd = join().rank == 1
    data, settings = trainings.DATA, trainings.BASE | {"epochs": 0.5}
    x, y = data.x_train.clone(), data.y_train.clone()
    if odd and kind == "data":
        x[7, 0, 0, 0] += 0.001
    if odd and kind == "labels":
        y[7] = (y[7] + 1) % 3
    if odd and kind == "settings":
        settings["epochs"] = 3.0
    method = dpcert.method("dp-gaussian", sigma=0.5 if odd and kind == "method" else 0.25, copies=2)
    model = (
        trainings.network()
        if not (odd and kind == "model")
        else torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3))
    )
    data = dpcert.Dataset(x, y, data.x_test, data.y_test, classes=3, size=240)
    versions = {"dpcert": "9.9"} if odd and kind == "package" else {"dpcert": "1.0"}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("dpcert.privacy.accounting.calibrate", return_value=1.1))
        patches.enter_context(mock.patch.object(ranks, "installed_versions", return_value=versions))
        if odd and kind == "devices":
            patches.enter_context(mock.patch.object(ranks, "_devices", return_value="2 cpu"))
        try:
            dpcert.train(model, data, method, **settings)
        except DpcertError as error:
            return str(error)
    return ""


def finished_again(data: Path, out: Path) -> tuple[bytes, str]:
    """Rerun a finished run: all ranks load it."""
    scene.make_blocks_small()
    run = train_in_directory(scene.config(data), out, world=join())
    return trainings.weights(run.model).numpy().tobytes(), str(run.statement)


def the_key_is_nowhere(out: Path) -> list[str]:
    """Return where the run key was found, other than in memory and in `private`."""
    key = key_from_seed(3, "noise")
    store = Path(os.environ["DPCERT_RENDEZVOUS"])
    places = {"store": store.read_bytes() if store.exists() else b"", "environment": Path("/proc/self/environ").read_bytes()}
    places["arguments"] = Path("/proc/self/cmdline").read_bytes()
    places |= {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file() and file.parent.name != "private"}
    return [name for name, content in places.items() if key in content or key.hex().encode() in content]


def many_checks(data: Path, folder: Path) -> dict[str, Any]:
    """What needs a group, in one group."""
    found: dict[str, Any] = {"differences": {kind: other_request(kind) for kind in ("none", *DIFFERENCES)}}
    found["charges"] = both_charges(data, folder)
    found["again"] = finished_again(data, folder / "real" / "out")
    found["key"] = the_key_is_nowhere(folder)
    found["halved"] = [memory_runs_out(fail) for fail in (False, True)]
    found["machines"], found["releases"] = machines_differ(), releases()
    return found


@pytest.fixture(scope="module")
def checked(whole, tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("checks"), 2, many_checks, whole[0], tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_rank_that_differs_is_one_clear_line_on_every_rank(checked, kind):
    what, shown = DIFFERENCES[kind]
    for found in checked:
        message = found["differences"][kind]
        assert message.startswith(f"rank 1 and rank 0 differ in {what}") and shown in message and "\n" not in message
        assert message == checked[0]["differences"][kind] and found["differences"]["none"] == ""


def test_no_private_data_and_no_digest_is_shown(checked):
    message = checked[0]["differences"]["data"]
    assert message == (
        "rank 1 and rank 0 differ in training data; start every rank with the same command, package, data and devices"
    )


def test_no_rank_computes_before_rank_0_has_charged(checked):
    """Twin: without waiting for rank 0, another rank begins each block before it is charged."""
    real, twin = checked[1]["charges"]
    assert real == [] and twin == [0, 3, 6]


def test_all_ranks_load_a_finished_run(checked, whole):
    assert checked[0]["again"] == checked[1]["again"] and "noise seed is known" in checked[0]["again"][1]


def test_the_key_stays_in_memory(checked):
    assert [found["key"] for found in checked] == [[], []]


def test_a_rank_with_less_memory_keeps_its_share(checked):
    for found in checked:
        plain, halved = found["halved"]
        np.testing.assert_allclose(halved, plain, rtol=0, atol=TOLERANCE)


def test_machines_that_round_differently_split_a_batch_alike(checked):
    for found in checked:
        np.testing.assert_allclose(*found["machines"], rtol=0, atol=TOLERANCE)


def test_noise_is_drawn_on_rank_0_only(checked):
    assert [found["releases"] for found in checked] == [10, 0]
