"""``--processes`` and torchrun as a user sees them: one progress, one error line, exit codes, and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dpcert.errors import RankError
from dpcert.interrupts import Interrupted
from dpcert.scale import launch
from dpcert.store.runs import RunDirectory
from dpcert.training.state import steps_in_checkpoint
from tests.conftest import blobs
from tests.e2e.test_kill import environment
from tests.scale.test_faults import assert_alike

LIMIT_SECONDS = 180.0


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    keys = {
        "data.path": folder / "blobs.npz",
        "data.classes": 3,
        "model.name": "linear",
        "train.batch_size": 20,
        "train.epochs": 50,  # 600 steps
        "privacy.noise_seed": 3,
        "train.threads": 1,
    }
    chosen = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return ["train", "mnist/dp-gaussian", *chosen, "--seed", "4", "--out", str(out), *more]


def start(folder: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "dpcert", *arguments(folder, out, *more)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(process: "subprocess.Popen[str]") -> list[int]:
    """The processes that `process` has started, in order: the ranks."""
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for_steps(process: "subprocess.Popen[str]") -> None:
    """Return when rank 0 shows its first step."""
    for line in process.stderr:
        if line.startswith("train "):
            return
    pytest.fail(f"no step was taken: {process.communicate()}")


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("train ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("processes")
    np.savez(made / "blobs.npz", **blobs(0))
    return made


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted training by one process."""
    process = start(folder, folder / "whole")
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0
    return folder / "whole"


def started(folder: Path, out: Path, *more: str) -> "tuple[subprocess.Popen[str], list[int]]":
    """Two ranks that are training."""
    process = start(folder, out, "--processes", "2", *more)
    wait_for_steps(process)
    return process, children(process)


def test_a_killed_rank_is_one_line_and_leaves_no_process(folder):
    process, ranks = started(folder, folder / "killed")
    os.kill(ranks[1], signal.SIGKILL)
    output, text = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 2 and all(map(ended, ranks)) and len(ranks) == 2
    assert errors(text) == ["error: rank 0 lost another rank: it ended or cannot be reached; rerun the same command to resume"]
    assert "epsilon" not in output and "trained" not in output


def test_a_wrong_request_is_one_line(folder):
    process = start(folder, folder / "wrong", "--processes", "2", "--set", "train.epochs=-1")
    output, text = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, output) == (2, "")
    assert errors(text) == ["error: mnist/dp-gaussian: train.epochs is -1: input should be greater than 0"]


@pytest.mark.slow
def test_killed_and_interrupted_a_run_goes_on_with_any_number_of_processes(folder, whole):
    out = folder / "resumed"
    process, ranks = started(folder, out)
    os.kill(ranks[0], signal.SIGKILL)
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 2
    process, ranks = started(folder, out)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130 and all(map(ended, ranks))
    assert len(errors(text)) == 1 and "interrupted; resume with: " in text and "--processes 2" in text
    assert steps_in_checkpoint(RunDirectory(out)) % 100 > 0  # saved at the stop request, not at the end of a block
    process = start(folder, out, "--processes", "3")
    output, text = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0 and errors(text) == [] and output.count("trained: ") == 1, text
    assert_alike(whole, out)


@pytest.mark.slow
def test_ranks_do_not_outlive_a_launcher_that_is_killed(folder, whole):
    out = folder / "orphans"
    process, ranks = started(folder, out)
    process.kill()
    process.communicate(timeout=LIMIT_SECONDS)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all(map(ended, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process = start(folder, out)
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0
    assert_alike(whole, out)


def torchrun(folder: Path, out: Path, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dpcert"]
    return subprocess.Popen(
        [*command, *arguments(folder, out, *more)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_torchrun_starts_stops_and_reports(folder, whole):
    out = folder / "torchrun"
    process = torchrun(folder, out)
    wait_for_steps(process)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=LIMIT_SECONDS)
    assert text.count("interrupted; resume with: ") == 1, text
    assert steps_in_checkpoint(RunDirectory(out)) % 100 > 0
    process = torchrun(folder, out)
    output, text = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0 and output.count("trained: ") == 1 and "error" not in text
    assert_alike(whole, out)
    process = torchrun(folder, out, "--set", "train.epochs=3")
    _, text = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode != 0 and sum(line.startswith("error: ") for line in text.splitlines()) == 1


@pytest.mark.parametrize(
    ("codes", "reported", "asked", "expected"),
    [
        ([0, 0], False, False, 0),
        ([2, 2], True, False, 2),
        ([2, -9], True, False, 2),
        ([130, 130], False, True, 130),
        ([130, -9], False, True, 130),
        ([1, 2], True, False, 2),
        ([1, 1], True, False, 1),
        ([-15, -15], False, True, Interrupted),
        ([-9, -9], False, False, "rank 0 was killed by signal 9"),
        ([0, 3], False, False, "rank 1 exited with code 3"),
    ],
)
def test_the_exit_code_of_all_ranks(codes, reported, asked, expected):
    if isinstance(expected, int):
        assert launch._verdict(codes, reported=reported, asked=asked) == expected
        return
    kind = RankError if isinstance(expected, str) else expected
    with pytest.raises(kind) as raised:
        launch._verdict(codes, reported=reported, asked=asked)
    assert not isinstance(expected, str) or expected in str(raised.value)
