"""Runs of the prior systems: the audit of their step, resuming in another process, and their phases."""

import os
import subprocess
import sys

import numpy as np
import pytest

import dpcert
from dpcert.errors import ConfigError
from dpcert.models.systems import vulnerabilities
from dpcert.runs.open import open_run
from dpcert.runs.resolve import resolve
from dpcert.runs.training import train
from dpcert.training.audit import Trainings, one_step
from tests.conftest import blobs
from tests.contracts.systems import SOUND

SETTINGS = {"train.epochs": 1, "train.batch_size": 24, "train.seed": 1, "privacy.noise_seed": 7}


@pytest.mark.parametrize("name", SOUND)
def test_the_mechanism_audit_covers_every_sound_system(name):
    """Few draws, so the bound is weak, but it is above 0 and below what the step promises."""
    draws = 100 if name == "stobatch" else 300
    audit = one_step(dpcert.method(name, sigma=0.25), draws=draws, seed=0, confidence=0.95)
    assert 0.0 < audit.share <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_the_mechanism_audit_with_all_draws(name, evidence):
    audit = one_step(dpcert.method(name, sigma=0.25), seed=0)
    assert 0.6 <= audit.share <= 1.0
    evidence("D10", figure="every bound below the exact epsilon and above 0.6 of it", trials=20_000)


@pytest.mark.parametrize("name", ["securesgd-as-published", "stobatch-as-published"])
def test_the_audit_refuses_what_promises_nothing(name):
    with pytest.raises(ConfigError, match="no privacy guarantee"):
        one_step(dpcert.method(name))


def test_whole_trainings_are_audited_with_a_linear_model_only():
    with pytest.raises(ConfigError, match="audit its step"):
        Trainings(dpcert.method("pixeldp"))


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "blobs.npz"
    np.savez(path, **blobs(0, train=96, test=12, size=16))
    return path


class Crash(BaseException):
    """Stands for kill -9: nothing catches it."""


def crash_after(step):
    def progress(done, total, **facts):
        if done == step:
            raise Crash

    return progress


@pytest.mark.parametrize(
    ("name", "changed"), [("securesgd", {}), ("stobatch", {}), ("securesgd", {"model.noise_weights": "charged"})]
)
def test_a_killed_run_resumes_in_another_process_to_the_same_bytes(tmp_path, images, name, changed):
    changes = {**SETTINGS, "data.path": str(images), "data.classes": 3, "data.size": 96, **changed}
    config = resolve(f"mnist/{name}", changes)
    train(config, tmp_path / "whole")
    with pytest.raises(Crash):
        train(config, tmp_path / "killed", progress=crash_after(2))
    words = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "dpcert", "train", f"mnist/{name}", *words, "--out", str(tmp_path / "killed")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as here: the number of workers may change rounding errors
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for file in ("model.safetensors", "ledger.jsonl"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    model = open_run(tmp_path / "whole").model
    if name == "securesgd" and not changed:  # the scales of the file, not those of another initialization
        built = config.model_spec().build((1, 16, 16), 3, seed=1)
        assert np.array_equal(model.scales.numpy(), built.scales.numpy()) and len(vulnerabilities(built)) == 16
