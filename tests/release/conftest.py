"""One small finished run for all tests of this folder, with every secret that was drawn for it."""

import shutil

import numpy as np
import pytest

from dpcert.cli import main
from tests.conftest import blobs

SMALL = ["model.name=linear", "train.batch_size=10", "train.epochs=3", "data.classes=3", "certify.n=200"]


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def settings(*assignments):
    return [word for assignment in assignments for word in ("--set", assignment)]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The run and the keys of its noises, DP noise and certification noise."""
    folder = tmp_path_factory.mktemp("release")
    np.savez(folder / "blobs.npz", **blobs(0))
    out, drawn = folder / "run", []
    with pytest.MonkeyPatch.context() as patch:
        for module in ("dpcert.training.loop", "dpcert.runs.certify"):
            patch.setattr(f"{module}.secret_key", lambda: drawn.append(np.random.bytes(32)) or drawn[-1])
        data = f"data.path={folder / 'blobs.npz'}"
        assert call("run", "mnist/dp-gaussian", *settings(data, *SMALL), "--examples", "20", "--out", out) == 0
        assert call("certify", out, "--n", 200, "--examples", 20, "--simultaneous") == 0
        assert call("certify", out, "--n", 200, "--examples", 20, "--radius", 0.1) == 0
    assert len(drawn) == 4  # DP noise, and the noise of three sweeps
    return out, drawn


@pytest.fixture(scope="session")
def finished(made):
    return made[0]


@pytest.fixture
def copied(finished, tmp_path):
    """A copy that a test may spoil."""
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"
