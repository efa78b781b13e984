import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpcert.privacy import mechanism
from dpcert.store import growing
from dpcert.training import lifecycle, loop
from tests.faults import scene
from tests.faults.injector import failing


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 3 steps, and every row of certificates made durable at once."""
    monkeypatch.setattr(mechanism, "STEPS_PER_BLOCK", scene.STEPS_PER_BLOCK)
    monkeypatch.setattr(loop, "STEPS_PER_BLOCK", scene.STEPS_PER_BLOCK)
    monkeypatch.setattr(lifecycle, "STEPS_PER_BLOCK", scene.STEPS_PER_BLOCK)
    monkeypatch.setattr(growing, "_SECONDS_BETWEEN_SYNCS", -1.0)


@dataclass(frozen=True)
class Stage:
    """A folder for runs, with its data, and what an uninterrupted run leaves."""

    folder: Path
    data: Path
    trained: dict[str, Any]
    certified: dict[str, Any]

    def work(self, stage: str):
        return {"train": scene.train, "certify": scene.certify}[stage]

    def expected(self, stage: str) -> dict[str, Any]:
        return self.trained if stage == "train" else self.certified

    def begin(self, stage: str, name: str) -> Path:
        """A directory in which `stage` can begin."""
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        if stage == "certify":
            shutil.copytree(self.folder / "trained", out)
        return out


@pytest.fixture
def stage(tmp_path) -> Stage:
    data = scene.write_data(tmp_path)
    with failing():  # no fault: only quick, since fsync is not passed on
        scene.train(data, tmp_path / "trained")
        shutil.copytree(tmp_path / "trained", tmp_path / "certified")
        scene.certify(data, tmp_path / "certified")
    return Stage(tmp_path, data, scene.results(tmp_path / "trained"), scene.results(tmp_path / "certified"))
