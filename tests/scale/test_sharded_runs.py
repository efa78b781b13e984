"""Certification, decisions and analysis on several ranks: the files are those of one process, whatever the number of ranks."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dpcert.certification import compiled, sweep, votes
from dpcert.certification.votes import Voter
from dpcert.errors import ModelError, RankError, RunError
from dpcert.models.registry import build_model
from dpcert.rng import Purpose, key_from_seed
from dpcert.runs import certify as certifying
from dpcert.runs.analyze import AnalyzeRequest, analyze
from dpcert.runs.certify import CertifyRequest, certify_runs, decide
from dpcert.runs.open import open_run
from dpcert.runs.training import train
from dpcert.scale.world import ALONE, World, join
from dpcert.store.runs import IN_USE
from tests.e2e.test_kill import environment
from tests.faults import scene
from tests.runs import own_models
from tests.scale.group import Failure, Group
from tests.scale.threads import on_threads

IMAGES, SIGMA, N0, N, SLOW = 12, 0.5, 10, 100, 0.05
Request = sweep.Request


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with a linear model, and two heads on one frozen trunk."""
    folder = tmp_path_factory.mktemp("trained")
    data = scene.write_data(folder)
    scene.train(data, folder / "linear")
    for place, name in enumerate(("head0", "head1")):
        learning = {"model__name": "tests.runs.own_models:frozen", "privacy__epsilon": 100, "train__learning_rate": 2.0}
        train(scene.config(data, **learning, privacy__noise_seed=place), folder / name, factory=own_models.frozen)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained / "linear", tmp_path / "run")


def rows(path: Path) -> dict[str, object]:
    """Every file of a run, but for the times."""
    tables = {file.name: without_time(file) for file in path.glob("*.tsv")}
    return {**scene.results(path), **tables}


def without_time(file: Path) -> list[list[str]]:
    """The rows of a file without the time and the checksum that covers it; whole rows if they have no time."""
    whole, _, _ = file.read_text().rpartition("\n")  # a kill may leave half a line
    heading, *lines = (line.split("\t") for line in whole.split("\n"))
    dropped = ("time", "check") if "time" in heading else ()
    return [[cell for name, cell in zip(heading, line, strict=True) if name not in dropped] for line in lines]


def request(seed: int | None = 4, examples: int = IMAGES, **how: object) -> CertifyRequest:
    simultaneous = bool(how.pop("simultaneous", False))
    return CertifyRequest(Request(SIGMA, N0, N, **how), examples, seed, simultaneous=simultaneous)


def certified(world: World, *paths: Path, asked: CertifyRequest, factory=None):
    return certify_runs([(open_run(path, factory), asked) for path in paths], world=world)


@pytest.mark.parametrize(
    "how",
    [{}, {"fresh_noise": True}, {"skip_misclassified": True}, {"simultaneous": True}],
    ids=["bank", "fresh noise", "skip", "simultaneous"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_the_files_are_those_of_one_process(run, tmp_path, how, size):
    alone = shutil.copytree(run, tmp_path / "alone")
    (expected,) = certified(ALONE, alone, asked=request(**how))
    answers = on_threads(size, lambda world: certified(world, run, asked=request(**how)))
    assert answers == [[expected]] * size  # every rank knows the figures
    assert rows(run) == rows(alone)


def test_resumed_by_another_number_of_ranks(run, tmp_path):
    alone = shutil.copytree(run, tmp_path / "alone")
    certified(ALONE, alone, asked=request())
    for examples, size in ((3, 2), (6, 1), (6, 3), (IMAGES, 4), (IMAGES, 2)):
        answers = on_threads(size, lambda world, some=examples: certified(world, run, asked=request(examples=some)))
        assert answers == [answers[0]] * size and not isinstance(answers[0], BaseException)
    assert rows(run) == rows(alone)


def test_several_runs_in_one_pass(trained, tmp_path):
    folders = [tmp_path / kind for kind in ("alone", "together")]
    for folder in folders:
        for name in ("head0", "head1"):
            shutil.copytree(trained / name, folder / name)
    certified(ALONE, *(folders[0] / name for name in ("head0", "head1")), asked=request(), factory=own_models.frozen)
    paths = [folders[1] / name for name in ("head0", "head1")]
    answers = on_threads(3, lambda world: certified(world, *paths, asked=request(), factory=own_models.frozen))
    assert len(answers[0]) == 2 and answers[1] == answers[0]
    assert all(rows(path) == rows(folders[0] / path.name) for path in paths)


def test_decisions_are_those_of_one_process(run, tmp_path):
    alone = shutil.copytree(run, tmp_path / "alone")
    expected = decide(open_run(alone), request(), 0.1)
    assert on_threads(3, lambda world: decide(open_run(run), request(), 0.1, world=world)) == [expected] * 3
    assert rows(run) == rows(alone)


def test_the_analysis_is_that_of_one_process(run, tmp_path):
    certified(ALONE, run, asked=CertifyRequest(Request(SIGMA, N0, N), IMAGES, 4))
    alone = shutil.copytree(run, tmp_path / "alone")
    asked = AnalyzeRequest(batch=5)
    expected = analyze(open_run(alone), asked)
    for size in (2, 4):
        (run / "samples.tsv").unlink(missing_ok=True)
        answers = on_threads(size, lambda world: analyze(open_run(run), asked, world=world))
        assert [answer.rows for answer in answers] == [expected.rows] * size
        assert rows(run) == rows(alone)


def test_a_new_key_is_chosen_by_rank_0_and_recorded_before_it_is_used(run, tmp_path, monkeypatch):
    """One process with the recorded key gets the same rows: no rank used another."""
    seen, real = [], certifying.certify_to_files

    def watched(*args, key, world, **kwargs):
        recorded = json.loads((run / "certificates-sigma0.50.json").read_text())["noise_key"]
        seen.append(key.hex() == recorded)
        return real(*args, key=key, world=world, **kwargs)

    monkeypatch.setattr(certifying, "certify_to_files", watched)
    alone = shutil.copytree(run, tmp_path / "alone")
    on_threads(3, lambda world: certified(world, run, asked=request(seed=None)))
    assert seen == [True] * 3
    shutil.copy(run / "certificates-sigma0.50.json", alone)
    monkeypatch.undo()
    certified(ALONE, alone, asked=request(seed=None))
    assert rows(run) == rows(alone)


def test_twin_a_key_per_rank_is_seen(run, tmp_path, monkeypatch):
    alone, real = shutil.copytree(run, tmp_path / "alone"), certifying.certify_to_files

    def own_key(*args, key, world, **kwargs):
        return real(*args, key=key if world.is_first else key_from_seed(1, "other"), world=world, **kwargs)

    certified(ALONE, alone, asked=request(fresh_noise=True))
    monkeypatch.setattr(certifying, "certify_to_files", own_key)
    on_threads(2, lambda world: certified(world, run, asked=request(fresh_noise=True)))
    assert rows(run) != rows(alone)


def path_of(world: World, decides: World) -> tuple[str, bytes | None]:
    """How a rank votes: with a bank or fresh noise, by which graph."""
    x, votes_needed = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0)), {Purpose.PREDICT: 20}
    found = []
    for fresh in (False, True):
        voter = Voter(build_model("cnn", seed=0), SIGMA, None, decides)
        with voter.counters(x, key_from_seed(0, "t"), votes_needed, fresh_noise=fresh) as counters:
            run = counters[0]._forward if fresh else counters[0].rest
            found.append((type(counters[0]).__name__, getattr(run, "graph", None)))
    return found


@pytest.mark.parametrize("fast_on_rank_0", [True, False])
def test_rank_0_decides_which_path_votes(fast_on_rank_0, monkeypatch):
    """C6: a vote near a tie may depend on the path, so all ranks take the one that rank 0 measured to be fast."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(votes, "WORTH_COMPILING", 0.0)
    of_thread = {}
    monkeypatch.setattr(compiled, "_is_fast", lambda *_: (of_thread[_thread()] == 0) == fast_on_rank_0)

    def rank(world, decides=lambda world: world):
        of_thread[_thread()] = world.rank
        return path_of(world, decides(world))

    first, second = on_threads(2, rank)
    assert first == second and [name for name, _ in first] == ["BankVotes", "FreshVotes"]
    assert all((graph is not None) == fast_on_rank_0 for _, graph in first)
    first, second = on_threads(2, lambda world: rank(world, lambda world: ALONE))  # twin: each decides for itself
    assert first != second


def _thread() -> int:
    import threading

    return threading.get_ident()


def test_a_rank_that_cannot_run_the_graph_says_so(monkeypatch):
    def missing(graph):
        raise ImportError("No module named 'onnxruntime'")

    monkeypatch.setattr(compiled, "_session", missing)
    with pytest.raises(ModelError, match="cannot run the ONNX graph that rank 0 uses .*; install the same onnxruntime"):
        compiled.load_compiled(b"graph", compiled.WHOLE_INPUTS)


def test_what_rank_0_cannot_open_stops_all_with_one_line(run):
    def rank(world):
        return certified(world, run, asked=request())

    with open_run(run).directory.locked():
        answers = on_threads(3, rank)
    assert isinstance(answers[0], RunError) and {str(answer) for answer in answers} == {str(answers[0])}
    assert IN_USE in str(answers[0])


@pytest.mark.parametrize(
    ("what", "rank_1"),
    [
        ("request", {"asked": request(examples=5)}),
        ("request", {"asked": request(seed=5)}),
        ("model", {"model": True}),
        ("images", {"images": True}),
    ],
)
def test_ranks_that_differ_say_in_what(trained, run, tmp_path, monkeypatch, what, rank_1):
    if rank_1.get("images"):
        real = certifying.images_sha256
        monkeypatch.setattr(certifying, "images_sha256", lambda x, y: real(x, y) + str(of_thread[_thread()]))
    of_thread = {}
    other = tmp_path / "other" / "run"
    shutil.copytree(trained / "head0", other)

    def rank(world):
        of_thread[_thread()] = world.rank
        if world.is_first or "asked" in rank_1:
            return certified(world, run, asked=request() if world.is_first else rank_1["asked"])
        is_other = rank_1.get("model")
        return certified(world, other if is_other else run, asked=request(), factory=own_models.frozen if is_other else None)

    before = rows(run)
    answers = on_threads(2, rank)
    assert all(isinstance(answer, RankError) and what in str(answer) for answer in answers)
    assert rows(run) == before  # nothing was written


# Real processes


def _slowly(path: Path, examples: int) -> list[dict[str, object]]:
    real = Request.certify

    def slow(self, counter, x, label, index):
        time.sleep(SLOW)
        return real(self, counter, x, label, index)

    Request.certify = slow
    world = join()
    return certified(world, path, asked=request(examples=examples))


def lines_in(path: Path) -> int:
    file = path / scene.ROWS
    return len(file.read_text().splitlines()) - 1 if file.exists() else 0


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_in_the_middle_and_resumed_by_others(run, tmp_path, victim):
    """The others stop within seconds, the rows so far are a beginning of the rows of one process, and a resume completes it."""
    alone = shutil.copytree(run, tmp_path / "alone")
    certified(ALONE, alone, asked=request())
    group = Group(tmp_path, 2, _slowly, run, IMAGES)
    deadline = time.monotonic() + 60
    while lines_in(run) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(group.processes[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    answers = group.results()
    assert time.monotonic() - killed < 10
    assert answers[victim] is None and isinstance(answers[1 - victim], Failure)
    assert answers[1 - victim].kind == "RankError" and "lost another rank" in answers[1 - victim]
    written, whole = without_time(run / scene.ROWS), without_time(alone / scene.ROWS)
    assert 3 <= len(written) < IMAGES and written == whole[: len(written)]
    answers = Group(tmp_path, 3 - 2 * victim, _slowly, run, IMAGES).results()  # 3 ranks, or 1
    assert not any(isinstance(answer, Failure | None) for answer in answers)
    assert rows(run) == rows(alone)


def _with(path: Path, seed_of_rank: list[int]) -> object:
    world = join()
    return certified(world, path, asked=request(seed=seed_of_rank[world.rank]))


def test_real_processes_get_the_rows_of_one_and_notice_a_difference(run, tmp_path):
    alone = shutil.copytree(run, tmp_path / "alone")
    answers = Group(tmp_path, 2, _with, run, [4, 5]).results()
    assert [answer.kind for answer in answers] == ["RankError", "RankError"]
    assert answers[0] == answers[1] and "rank 1 and rank 0 differ in request for" in answers[0] and "\n" not in answers[0]
    expected = certified(ALONE, alone, asked=request())
    assert Group(tmp_path, 2, _with, run, [4, 4]).results() == [expected] * 2
    assert rows(run) == rows(alone)


def _group_held() -> object:
    return join()._group


def test_a_world_does_not_keep_the_group_alive(tmp_path):
    """Its threads must end before Python does: one that then releases a tensor aborts the process, after all is done."""
    assert Group(tmp_path, 2, _group_held).results() == [None, None]


def dpcert_command(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dpcert", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180, check=False)


def asked_for(run: Path, *more: object) -> tuple[object, ...]:
    return ("certify", run, "--n0", N0, "--n", N, "--seed", 4, "--examples", IMAGES, *more)


def test_the_command_prints_once_and_writes_the_rows_of_one_process(run, tmp_path):
    alone = shutil.copytree(run, tmp_path / "alone")
    certified(ALONE, alone, asked=request())
    done = dpcert_command(*asked_for(run, "--processes", 2))
    assert done.returncode == 0 and done.stdout.count("ACR") == 1, done.stderr
    assert rows(run) == rows(alone)


@pytest.mark.slow
def test_ranks_end_without_an_abort(run):
    for size in (2, 3, 2, 4, 2, 3, 2, 2):
        done = dpcert_command(*asked_for(run, "--radius", 0.1, "--processes", size))
        assert done.returncode == 0 and "terminate" not in done.stderr, done.stderr
        for file in run.glob("robust-*"):
            file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_a_random_moment(run, tmp_path, seed):
    """Before the first row, between two rows, or after the last: what is there is a beginning, and a resume completes it."""
    chance = random.Random(seed)
    alone = shutil.copytree(run, tmp_path / "alone")
    certified(ALONE, alone, asked=request())
    size = chance.choice([2, 3])
    group, victim = Group(tmp_path, size, _slowly, run, IMAGES), chance.randrange(size)
    time.sleep(chance.uniform(0.2, 1.5))
    group.processes[victim].kill()
    killed = time.monotonic()
    group.results()
    assert time.monotonic() - killed < 10
    if (run / scene.ROWS).exists():
        written, whole = without_time(run / scene.ROWS), without_time(alone / scene.ROWS)
        assert written == whole[: len(written)]
    Group(tmp_path, chance.choice([1, 2, 4]), _slowly, run, IMAGES).results()
    assert rows(run) == rows(alone)
