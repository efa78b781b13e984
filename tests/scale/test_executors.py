"""Executors by their contract: the same generic tasks in local processes and through the bridge to a stand-in for Ray."""

import json
import sys
import time
from pathlib import Path

import pytest

from dpcert.errors import ConfigError, DpcertError, RunError
from dpcert.scale import ray as rays
from dpcert.scale.environment import core_count
from dpcert.scale.executors import LocalProcesses
from dpcert.scale.placement import Placement
from dpcert.scale.ray import RayExecutor
from dpcert.scale.tasks import Resources, Task

FAKE = Path(__file__).parent / "fake_ray"
SLEEPER = (
    "import sys, time, signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\nprint('up', flush=True)\ntime.sleep(60)"
)


@pytest.fixture
def fake_ray(monkeypatch):
    """Use the stand-in; its argument says how the cluster fails."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(FAKE), *sys.path]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(rays, "_SECONDS_BEFORE_RETRY", 0.0)

    def script(**how):
        monkeypatch.setenv("FAKE_RAY", json.dumps(how))

    script()
    return script


def finished(pending, seconds=60.0):
    until = time.monotonic() + seconds
    while (outcome := pending.outcome()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return outcome


def task(tmp_path, *words, name="a task", resources=Resources()):
    return Task(name, words, tmp_path / "logs" / "a.log", resources)


@pytest.mark.parametrize("on", ["processes", "ray", "ray://127.0.0.1:6379"])
def test_a_generic_task_succeeds_or_says_why_not_and_its_output_is_in_its_log(tmp_path, fake_ray, on):
    """Nothing here is about a paper: any command of dpcert can be submitted, e.g. the trial of a search."""
    events: list[str] = []
    with Placement.parse(on, None, None, 0).open(tmp_path / "logs", events.append) as executor:
        assert executor.slots(Resources()) >= 1
        good = executor.submit(task(tmp_path, "--version"))
        assert (finished(good).code, finished(good).failure) == (0, None)
        bad = finished(executor.submit(task(tmp_path, "methods", "--nonsense")))
    assert (bad.code, bad.error) == (2, "NoSuchOption") and "No such option" in bad.failure and bad.seconds > 0
    log = (tmp_path / "logs" / "a.log").read_text()
    assert "$ dpcert --version\ndpcert 0." in log and "error: " in log
    assert events == [] and sorted(path.name for path in (tmp_path / "logs").iterdir()) in (["a.log"], ["a.log", "ray.log"])


@pytest.fixture
def sleepers(tmp_path, monkeypatch):
    """Tasks that save and exit when asked to, without the time to import dpcert."""
    script = tmp_path / "sleeper"
    script.write_text(f"#!{sys.executable}\n{SLEEPER}\n")
    script.chmod(0o755)
    return script


def _is_up(log):
    until = time.monotonic() + 30
    while not log.exists() or "up" not in log.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_stop_lets_local_tasks_save(tmp_path, monkeypatch, sleepers):
    monkeypatch.setattr(sys, "executable", str(sleepers))
    executor = LocalProcesses(2)
    pending = executor.submit(task(tmp_path))
    _is_up(tmp_path / "logs" / "a.log")
    executor.stop()
    assert pending.outcome().code == 130


def test_stop_lets_tasks_of_the_cluster_save(tmp_path, fake_ray):
    with RayExecutor(None, tmp_path / "logs", None, print, 2) as executor:
        run = tmp_path / "run"
        pending = executor.submit(task(tmp_path, "train", "mnist/dpsgd", "--out", str(run)))
        until = time.monotonic() + 120
        while not (run / "ledger.jsonl").exists():
            assert time.monotonic() < until and pending.outcome() is None
            time.sleep(0.05)
        executor.stop()
        assert pending.outcome().code == 130
    assert "interrupted" in (tmp_path / "logs" / "a.log").read_text() and (run / "private" / "key").exists()


def test_gpus_are_handed_out_and_given_back(tmp_path, monkeypatch, sleepers):
    sleepers.write_text("#!/bin/sh\necho visible $CUDA_VISIBLE_DEVICES threads $OMP_NUM_THREADS\n")
    monkeypatch.setattr(sys, "executable", str(sleepers))
    each = Resources(3, 2)
    executor = LocalProcesses(8, each, gpus=["4", "5", "6", "7", "8"])
    assert executor.slots(each) == 2 and executor.slots(Resources()) == 8
    first, second = (executor.submit(task(tmp_path, resources=each)) for _ in range(2))
    with pytest.raises(DpcertError, match="needs 2 GPUs, 1 are free"):
        executor.submit(task(tmp_path, resources=each))
    finished(first), finished(second)
    finished(executor.submit(task(tmp_path, resources=each)))
    seen = [line for line in (tmp_path / "logs" / "a.log").read_text().splitlines() if "visible" in line]
    assert sorted(seen[:2]) == ["visible 4,5 threads 3", "visible 6,7 threads 3"] and seen[2] == "visible 8,4 threads 3"
    with pytest.raises(ConfigError, match="--gpus-per-task is 2, this machine has 1 GPUs"):
        LocalProcesses(1, each, gpus=["0"])


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("threads", "--on is 'threads', must be processes, ray or ray://HOST:PORT"),
        ("", "--on is ''"),
        ("RAY", "--on is 'RAY'"),
        ("ray:", "--on is 'ray:'"),
        ("ray://", "its address must be HOST:PORT"),
        ("ray://head", "its address must be HOST:PORT"),
        ("ray://:6379", "its address must be HOST:PORT"),
        ("ray://head:0", "a port from 1 to 65535"),
        ("ray://head:65536", "a port from 1 to 65535"),
        ("ray://head:٣", "a port from 1 to 65535"),
        ("ray://head:" + "9" * 5000, "a port from 1 to 65535"),
        ("ray://user@head:1/x:1", "without a path"),
    ],
)
def test_a_wrong_place_gets_one_line(on, words):
    with pytest.raises(ConfigError, match=".*") as refused:
        Placement.parse(on, None, None, 0)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "values"), [("--jobs", (0, None, 0)), ("--cpus-per-task", (None, 0, 0)), ("--gpus-per-task", (None, None, -1))]
)
def test_a_wrong_number_gets_one_line(name, values):
    with pytest.raises(ConfigError, match=f"{name} is "):
        Placement.parse("ray", *values)


def test_defaults_of_a_task():
    cores = core_count()
    assert Placement.parse("processes", None, None, 0).resources == Resources(cores, 0)
    assert Placement.parse("processes", cores * 2, None, 0).resources == Resources(1, 0)
    assert Placement.parse("ray", None, None, 1).resources == Resources(1, 1)
    assert Placement.parse("ray://[::1]:6379", 5, 4, 0).address == "[::1]:6379"


def test_the_environment_names_the_cluster(tmp_path, fake_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with (
        pytest.raises(RunError, match=r"no Ray answers at 127.0.0.1:1 \(unavailable\)"),
        Placement("ray").open(tmp_path, print),
    ):
        pass
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with (
        pytest.raises(ConfigError, match="RAY_ADDRESS is 'head', its address must be HOST:PORT"),
        Placement("ray").open(tmp_path, print),
    ):
        pass


def test_without_ray_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rays.importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match=r"needs the package ray; install it with: pip install 'dpcert\[ray\]'"),
        Placement("ray").open(tmp_path, print),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def _error_of(tmp_path, words=("--version",), resources=Resources(), jobs=None):
    with pytest.raises(DpcertError) as refused, RayExecutor(None, tmp_path, jobs, print, 2) as executor:
        until = time.monotonic() + 60
        pending = executor.submit(Task("a task", words, tmp_path / "a.log", resources))
        while time.monotonic() < until:
            pending.outcome()
            time.sleep(0.05)
    assert "\n" not in str(refused.value) and not list(tmp_path.glob(".session-*"))
    return str(refused.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"die": 1}, "the connection to Ray at this machine is lost; what is done is saved: rerun the same command to resume"),
        ({"error": "No module named 'dpcert'"}, "a node cannot run a task: No module named 'dpcert'"),
        ({"identity": "1.0"}, "the driver has 1.0; install the same version on every node"),
        ({"session": ".session-x"}, "does not share the results folder: "),
    ],
)
def test_a_cluster_that_cannot_do_the_work_gets_one_line(tmp_path, fake_ray, how, words):
    fake_ray(**how)
    assert words in _error_of(tmp_path)


def test_a_cluster_that_refuses_the_connection_gets_one_line(tmp_path, fake_ray):
    fake_ray(init="Version mismatch: 1\nand more")
    with pytest.raises(RunError) as refused, RayExecutor("127.0.0.1:6379", tmp_path, None, print, 2):
        pass
    assert "Ray at 127.0.0.1:6379 does not accept this process: Version mismatch: 1; check --on" in str(refused.value)


@pytest.mark.parametrize(
    ("lose", "how", "why"), [(1, "WorkerCrashedError", "its worker died"), (3, "NodeDiedError", "its node died")]
)
def test_a_lost_worker_is_replaced(tmp_path, fake_ray, lose, how, why):
    fake_ray(lose=lose, how=how)
    events: list[str] = []
    with RayExecutor(None, tmp_path, None, events.append, 2) as executor:
        assert finished(executor.submit(Task("a task", ("--version",), tmp_path / "a.log"))).code == 0
    assert events == [f"lost: a task: {why}; retry {number} of 3 resumes it" for number in range(1, lose + 1)]


def test_retries_are_bounded_and_the_other_tasks_go_on(tmp_path, fake_ray):
    fake_ray(lose=4, how="OutOfMemoryError")
    with RayExecutor(None, tmp_path, None, print, 2) as executor:
        outcome = finished(executor.submit(Task("a task", ("--version",), tmp_path / "a.log")))
    assert (outcome.code, outcome.error) == (1, "WorkerLost")
    assert outcome.failure == "its node ran out of memory, and so did 3 retries"


def test_slots_follow_the_nodes(tmp_path, fake_ray):
    fake_ray(nodes=[[0, 0], [4, 0], [9, 2]])
    with RayExecutor(None, tmp_path, None, print, 2) as executor:
        while executor._nodes is None:
            executor.slots(Resources())
            time.sleep(0.05)
        assert [executor.slots(Resources(cpus, gpus)) for cpus, gpus in ((1, 0), (2, 0), (4, 0), (1, 1), (8, 1))] == [
            13,
            6,
            3,
            2,
            1,
        ]
        with pytest.raises(
            RunError, match="has 10 CPUs for a task .nodes: 0 CPUs and 0 GPUs, 4 CPUs and 0 GPUs, 9 CPUs and 2 GPUs"
        ):
            executor.slots(Resources(10))
        with pytest.raises(RunError, match="has 1 CPU and 3 GPUs for a task"):
            executor.slots(Resources(1, 3))
    with RayExecutor(None, tmp_path, 7, print, 2) as executor:
        assert executor.slots(Resources(10)) == 7  # an autoscaler sees the demand


def test_the_lines_of_ray_are_in_a_log_and_not_on_the_terminal(tmp_path, fake_ray, capfd):
    with RayExecutor(None, tmp_path, None, print, 2):
        pass
    assert "Ray prints to stdout" in (tmp_path / "ray.log").read_text()
    assert capfd.readouterr() == ("", "")


def test_tasks_find_the_data_of_the_driver_and_otherwise_that_of_their_node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPCERT_DATA", "data")
    assert rays._environment_of_tasks() == {"DPCERT_DATA": str(tmp_path / "data")}
    monkeypatch.delenv("DPCERT_DATA")
    assert rays._environment_of_tasks() == {}


def test_files_of_the_working_directory_are_not_imported(tmp_path, fake_ray, monkeypatch):
    (tmp_path / "ray.py").write_text("raise SystemExit('wrong ray')")
    monkeypatch.chdir(tmp_path)
    with RayExecutor(None, tmp_path / "logs", None, print, 2) as executor:
        assert finished(executor.submit(task(tmp_path, "--version"))).code == 0


def test_a_relative_log_is_refused(tmp_path, fake_ray):
    with RayExecutor(None, tmp_path, None, print, 2) as executor, pytest.raises(ConfigError, match="must be an absolute path"):
        executor.submit(Task("a task", ("--version",), Path("a.log")))
