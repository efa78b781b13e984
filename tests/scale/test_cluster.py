"""A real Ray cluster of three nodes on this machine: a small grid, a killed node, a killed worker, a lost cluster.

`make test-cluster` installs Ray and runs these tests; without Ray they are skipped.
"""

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from dpcert.errors import RunError
from dpcert.paper.estimate import Estimator
from dpcert.paper.grid import Cell, Need
from dpcert.paper.pieces import missing
from dpcert.paper.runner import Runner
from dpcert.scale.executors import LocalProcesses
from dpcert.scale.ray import RayExecutor
from dpcert.scale.tasks import Resources, Task

NO_RAY = "Ray is not installed: make test-cluster installs it and runs this test"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(find_spec("ray") is None, reason=NO_RAY)]
# Small, and with noise of a known seed, so that two trainings are equal byte for byte.
CHANGE = (("train.epochs", 0.1), ("privacy.noise_seed", 7))
CELLS = [Cell("mnist", method, change=CHANGE) for method in ("dpsgd", "dp-gaussian", "psac")]
NEEDS = [Need(cell, (0.5,)) for cell in CELLS]
EXAMPLES = 4
SMALL = {"object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}


@pytest.fixture(scope="module")
def loopback():
    """Ray listens on 127.0.0.1 only, without a dashboard and without usage statistics."""
    given = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def cluster(loopback):
    from ray.cluster_utils import Cluster

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script that starts Ray in the background
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **SMALL})
    made.others = [made.add_node(num_cpus=1, **SMALL) for _ in range(2)]
    signal.signal(signal.SIGINT, before)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def from_processes(tmp_path_factory):
    results = tmp_path_factory.mktemp("processes")
    run_in_processes(results)
    return results


def released(results: Path) -> dict[str, object]:
    """Everything that must not depend on where a run was computed."""
    found: dict[str, object] = {}
    for cell in CELLS:
        folder = results / cell.name
        rows = (folder / "certificates-sigma0.50.tsv").read_text().splitlines()
        time_column = rows[0].split("\t").index("time")
        found[cell.name] = [
            (folder / "model.safetensors").read_bytes(),
            (folder / "ledger.jsonl").read_bytes(),
            [[word for place, word in enumerate(row.split("\t")) if place != time_column][:8] for row in rows],
        ]
        assert not (folder / "private" / "key").exists()
    return found


class Child(NamedTuple):
    """A ``dpcert`` process on the cluster, the Ray worker that started it, and the raylet, i.e. the node, of that one."""

    child: int
    worker: int
    raylet: int
    words: list[str]

    @property
    def is_training(self) -> bool:
        return "train" in self.words and Path(self.words[-1], "ledger.jsonl").exists()


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def children() -> list[Child]:
    """The running ``dpcert`` processes of Ray workers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")[:-1]
            worker = parent_of(int(folder.name))
            if words[1:3] == ["-m", "dpcert"] and b"ray::" in Path(f"/proc/{worker}/cmdline").read_bytes():
                found.append(Child(int(folder.name), worker, parent_of(worker), words))
        except (OSError, IndexError):
            continue
    return found


def wait_for(what, seconds=120.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)


def run_grid(address: str, results: Path, harm) -> list[str]:
    """Run the grid on the cluster; `harm` is called until it has found its victim, a task that is training."""
    events: list[str] = []
    harmed: list[bool] = []

    def listen(text, *, passing=False):
        if not passing:
            events.append(text)
        if not harmed and any(harm(child) for child in children() if child.is_training):
            harmed.append(True)

    with RayExecutor(address, results / "logs", None, listen, 1) as executor:
        wait_for(lambda: executor.slots(Resources()) == 3)
        assert Runner(results, EXAMPLES, executor, Resources(), Estimator(results, CELLS), listen).run(NEEDS) == []
    assert missing(NEEDS, results, EXAMPLES) == [] and harmed
    return events


def run_in_processes(results: Path) -> None:
    def silent(text, *, passing=False):
        pass

    assert Runner(results, EXAMPLES, LocalProcesses(1), Resources(), Estimator(results, CELLS), silent).run(NEEDS) == []


def test_a_grid_survives_a_killed_node_and_its_rows_equal_those_of_processes(cluster, from_processes, tmp_path):
    def kill_its_node(child):
        nodes = [node for node in cluster.others if node.all_processes["raylet"][0].process.pid == child.raylet]
        for node in nodes:  # not the head
            cluster.remove_node(node, allow_graceful=False)
        return bool(nodes)

    events = run_grid(cluster.address, tmp_path, kill_its_node)
    assert any(text.startswith("lost: train mnist-") and "retry 1 of 3 resumes it" in text for text in events), events
    assert released(tmp_path) == released(from_processes)
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == sorted([*(f"{cell.name}.log" for cell in CELLS), "ray.log"])
    assert children() == []


def test_a_killed_worker_takes_its_child_along_and_is_replaced(cluster, from_processes, tmp_path):
    survivors: list[int] = []

    def kill_its_worker(child):
        os.kill(child.worker, signal.SIGKILL)
        until = time.monotonic() + 20
        while Path(f"/proc/{child.child}").exists() and "Z" not in Path(f"/proc/{child.child}/stat").read_text():
            if time.monotonic() > until:
                survivors.append(child.child)
                break
            time.sleep(0.05)
        return True

    events = run_grid(cluster.address, tmp_path, kill_its_worker)
    assert any("its worker died; retry 1 of 3 resumes it" in text for text in events), events
    assert survivors == [] and released(tmp_path) == released(from_processes)


def test_a_lost_cluster_gets_one_line_and_processes_finish_the_work(cluster, from_processes, tmp_path):
    """The same folder goes on elsewhere: nothing is lost and no step is charged twice."""

    def kill_the_head(child):
        cluster.head_node.all_processes["gcs_server"][0].process.kill()
        return True

    with pytest.raises(RunError) as lost:
        run_grid(cluster.address, tmp_path, kill_the_head)
    assert "is lost; what is done is saved: rerun the same command to resume" in str(lost.value)
    run_in_processes(tmp_path)  # waits for directories that a task of the lost cluster still uses
    assert released(tmp_path) == released(from_processes) and children() == []


def test_stop_saves_and_an_impossible_task_gets_one_line(cluster, tmp_path):
    with RayExecutor(cluster.address, tmp_path / "logs", None, print, 1) as executor:
        wait_for(lambda: executor.slots(Resources()) == 3)
        with pytest.raises(RunError, match="no node of Ray at 127.0.0.1:[0-9]+ has 2 CPUs for a task"):
            executor.slots(Resources(2))
        words = ("train", "mnist/dpsgd", "--out", str(tmp_path / "run"))
        running, queued = (
            executor.submit(Task(name, words, tmp_path / "logs" / f"{name}.log", size))
            for name, size in (("a", Resources()), ("b", Resources(99)))
        )
        wait_for((tmp_path / "run" / "ledger.jsonl").exists)
        executor.stop()
        assert (running.outcome().code, queued.outcome().code) == (130, 130)
    assert children() == [] and not (tmp_path / "logs" / "b.log").exists()


def listening() -> set[str]:
    """The local addresses, in hex, at which processes of Ray listen."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        sockets |= {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            name = str(descriptor.readlink())
            if name in sockets and b"ray" in Path(*descriptor.parts[:3], "cmdline").read_bytes():
                found.add(sockets[name])
        except OSError:
            continue
    return found


def test_ray_on_this_machine_listens_to_this_machine_only(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with RayExecutor(None, tmp_path / "logs", None, print, 1) as executor:
        pending = executor.submit(
            Task("a task", ("train", "mnist/dpsgd", "--out", str(tmp_path / "run")), tmp_path / "logs" / "a.log")
        )
        wait_for((tmp_path / "run" / "ledger.jsonl").exists)
        found = listening()
        executor.stop()
        assert pending.outcome().code == 130
    assert found and all(address.endswith("0100007F") for address in found), found


def test_the_client_server_works_too(loopback, tmp_path):
    """The address of a Ray Client server is told apart from that of a cluster."""
    import socket

    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port, **SMALL},
    )
    try:
        with RayExecutor(f"127.0.0.1:{port}", tmp_path, None, print, 1) as executor:
            pending = executor.submit(Task("a task", ("--version",), tmp_path / "a.log"))
            wait_for(lambda: pending.outcome() is not None)
            assert pending.outcome().code == 0
    finally:
        made.shutdown()
