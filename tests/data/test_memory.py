"""Data larger than memory: training from a file of 20 GB needs less than 2 GB."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.measured import sparse_folder


def peaks(folder: Path, place: str) -> tuple[float, float]:
    """MiB: what a small training needs, and what training on the folder and opening the run need."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.data.measured", str(folder), str(folder / f"run-{place}"), place]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    before, after = map(float, done.stdout.split())
    return before, after


def test_training_from_a_file_needs_little_memory_and_the_twin_does_not(tmp_path):
    size = 600 << 20
    sparse_folder(tmp_path / "big", size)
    before, after = peaks(tmp_path / "big", "disk")
    assert after - before < 300
    before, after = peaks(tmp_path / "big", "memory")
    assert after - before > 600


@pytest.mark.slow
def test_training_from_20_gb_needs_less_than_2_gb(tmp_path, evidence):
    """With the settings that everybody has: whether an array stays on disk is decided by its size."""
    records = sparse_folder(tmp_path / "big", 20 * 10**9)
    before, after = peaks(tmp_path / "big", "default")
    assert after < 2e9 / 2**20
    figure = f"20 GB in {records} records: {after:.0f} MiB at most, {after - before:.0f} MiB more than 64 records"
    evidence("R4", figure=figure, trials=records, twin="loaded into memory: rejected")
