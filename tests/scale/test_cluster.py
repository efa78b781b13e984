"""A real Ray cluster of three nodes on this machine: a small grid, a killed node, a killed worker, a lost cluster.

`make test-cluster` installs Ray and runs these tests; without Ray they are skipped.
"""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-cluster installs it and runs this test")

from dpcert.errors import RunError
from dpcert.paper.estimate import Estimator
from dpcert.paper.grid import Cell, Need
from dpcert.paper.pieces import missing
from dpcert.paper.runner import Runner
from dpcert.scale.executors import LocalProcesses
from dpcert.scale.ray import RayExecutor
from dpcert.scale.tasks import Resources, Task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# Small, and with noise of a known seed, so that two trainings are equal byte for byte.
CHANGE = (("train.epochs", 0.2), ("privacy.noise_seed", 7))
CELLS = [Cell("mnist", method, change=CHANGE) for method in ("dpsgd", "dp-gaussian", "psac")]
NEEDS = [Need(cell, (0.5,)) for cell in CELLS]
EXAMPLES = 8
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

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **SMALL})
    made.others = [made.add_node(num_cpus=1, **SMALL) for _ in range(2)]
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def from_processes(tmp_path_factory):
    results = tmp_path_factory.mktemp("processes")
    estimator = Estimator(results, CELLS)
    assert (
        Runner(results, EXAMPLES, LocalProcesses(1), Resources(), estimator, lambda text, *, passing=False: None).run(NEEDS)
        == []
    )
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


def children() -> dict[int, int]:
    """The running ``dpcert`` processes of Ray workers, and their workers."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if words[1:3] == [b"-m", b"dpcert"] and b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes():
                found[int(folder.name)] = parent
        except (OSError, IndexError):
            continue
    return found


def wait_for(what, seconds=120.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)


def run_grid(address: str, results: Path, harm=None) -> list[str]:
    """Run the grid on the cluster; `harm` is called once, when three tasks are training."""
    events: list[str] = []
    done: list[bool] = []

    def listen(text, *, passing=False):
        if not passing:
            events.append(text)
        if harm is not None and not done and all((results / cell.name / "ledger.jsonl").exists() for cell in CELLS):
            done.append(True)
            harm()

    with RayExecutor(address, results / "logs", None, listen, 1) as executor:
        wait_for(lambda: executor.slots(Resources()) == 3)
        assert Runner(results, EXAMPLES, executor, Resources(), Estimator(results, CELLS), listen).run(NEEDS) == []
    assert missing(NEEDS, results, EXAMPLES) == [] and (harm is None or done)
    return events


def test_a_grid_survives_a_killed_node_and_its_rows_equal_those_of_processes(cluster, from_processes, tmp_path):
    events = run_grid(cluster.address, tmp_path, lambda: cluster.remove_node(cluster.others.pop(), allow_graceful=False))
    assert any(text.startswith("lost: train mnist-") and "retry 1 of 3 resumes it" in text for text in events), events
    assert released(tmp_path) == released(from_processes)
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == sorted([*(f"{cell.name}.log" for cell in CELLS), "ray.log"])
    assert children() == {}


def test_a_killed_worker_takes_its_child_along_and_is_replaced(cluster, from_processes, tmp_path):
    killed: list[int] = []

    def kill():
        child, worker = next(iter(children().items()))
        os.kill(worker, signal.SIGKILL)
        killed.append(child)
        threading.Thread(target=wait_for, args=(lambda: not Path(f"/proc/{child}").exists(), 10)).start()

    events = run_grid(cluster.address, tmp_path, kill)
    assert any("its worker died; retry 1 of 3 resumes it" in text for text in events), events
    assert killed and released(tmp_path) == released(from_processes)


def test_a_lost_cluster_gets_one_line_and_processes_finish_the_work(cluster, from_processes, tmp_path):
    """The same folder goes on elsewhere: nothing is lost and no step is charged twice."""
    head = cluster.head_node.all_processes["gcs_server"][0].process
    with pytest.raises(RunError) as lost:
        run_grid(cluster.address, tmp_path, head.kill)
    assert "is lost; what is done is saved: rerun the same command to resume" in str(lost.value)
    wait_for(lambda: not children(), 60)
    estimator = Estimator(tmp_path, CELLS)
    assert (
        Runner(tmp_path, EXAMPLES, LocalProcesses(1), Resources(), estimator, lambda text, *, passing=False: None).run(NEEDS)
        == []
    )
    assert released(tmp_path) == released(from_processes)


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
    assert children() == {} and not (tmp_path / "logs" / "b.log").exists()


def test_the_client_server_and_this_machine_work_too(loopback, tmp_path):
    """`ray` alone starts Ray here; the address of a Ray Client server is told apart from that of a cluster."""
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
        for address in (f"127.0.0.1:{port}", None):
            with RayExecutor(address, tmp_path, None, print, 1) as executor:
                pending = executor.submit(Task("a task", ("--version",), tmp_path / "a.log"))
                wait_for(lambda pending=pending: pending.outcome() is not None)
                assert pending.outcome().code == 0
    finally:
        made.shutdown()
