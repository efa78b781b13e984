"""Real processes, really killed: the same bytes at the end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import blobs

NAMES = ("model.safetensors", "ledger.jsonl", "config.toml")


def request(folder: Path, out: Path, *changes: str) -> list[str]:
    settings = [
        f"data.path={folder / 'blobs.npz'}",
        "data.classes=3",
        "model.name=linear",
        "train.batch_size=20",
        "train.epochs=50",  # 600 steps
        "privacy.noise_seed=3",
        "certify.n=2000",
        "train.threads=1",
    ]
    chosen = [word for setting in settings for word in ("--set", setting)]
    return [
        sys.executable,
        "-m",
        "dpcert",
        "run",
        "mnist/dp-gaussian",
        *chosen,
        "--seed",
        "4",
        "--examples",
        "40",
        "--out",
        str(out),
        *changes,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def rows(out: Path) -> list[list[str]]:
    lines = (out / "certificates-sigma0.50.tsv").read_text().splitlines()
    return [[cell for place, cell in enumerate(line.split("\t")) if place not in (5, 9)] for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    np.savez(folder / "blobs.npz", **blobs(0))
    subprocess.run(request(folder, folder / "whole"), check=True, env=environment(), capture_output=True)
    return folder


def finish_after_kills(folder: Path, out: Path, waits: list[float], number: int = signal.SIGKILL) -> list[int]:
    codes = []
    for wait in waits:
        process = subprocess.Popen(
            request(folder, out), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while not (out / "ledger.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)  # the interesting part begins when the first step is charged
        time.sleep(wait)
        process.send_signal(number)
        codes.append(process.wait(timeout=60))
    subprocess.run(request(folder, out), check=True, env=environment(), capture_output=True)
    return codes


def assert_same(whole: Path, out: Path) -> None:
    for name in NAMES:
        assert (whole / "whole" / name).read_bytes() == (out / name).read_bytes(), name
    assert rows(whole / "whole") == rows(out)


def test_killed_several_times_a_run_ends_with_the_same_bytes(whole):
    out = whole / "killed"
    finish_after_kills(whole, out, [0.05, 0.8, 1.5])
    assert_same(whole, out)


def test_interrupted_it_saves_exits_130_and_goes_on(whole):
    out = whole / "interrupted"
    codes = finish_after_kills(whole, out, [0.3], signal.SIGINT)
    assert codes == [130]
    assert_same(whole, out)


def test_the_same_seeds_give_the_same_bytes_and_other_settings_the_same_ledger(whole):
    out = whole / "other"
    subprocess.run(
        request(whole, out, "--set", "train.physical_batch=21", "--set", "certify.n=500", "--set", "train.threads=2"),
        check=True,
        env=environment(),
        capture_output=True,
    )
    assert (whole / "whole" / "ledger.jsonl").read_bytes() == (out / "ledger.jsonl").read_bytes()
