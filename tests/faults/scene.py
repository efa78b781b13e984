"""Runs that are as small as they can be and still have everything: three blocks of steps, certificates that are extended.

Blocks have 3 steps here instead of 100, so that 8 steps meet every kind of write.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dpcert.privacy import mechanism
from dpcert.runs import certify as certifying
from dpcert.runs.config import Config
from dpcert.runs.open import open_run
from dpcert.runs.resolve import resolve
from dpcert.runs.training import train as train_in_directory
from dpcert.training import loop
from tests.conftest import blobs

STEPS_PER_BLOCK, STEPS = 3, 8
FIRST_EXAMPLES, ALL_EXAMPLES = 4, 12
ROWS = "certificates-sigma0.50.tsv"


def make_blocks_small(steps: int = STEPS_PER_BLOCK) -> None:
    """For this process: a test undoes it with the fixture `small_blocks`."""
    mechanism.STEPS_PER_BLOCK = loop.STEPS_PER_BLOCK = steps


def write_data(folder: Path) -> Path:
    path = folder / "blobs.npz"
    np.savez(path, **blobs(0, train=24, test=ALL_EXAMPLES, size=4))
    return path


def assignments(data: Path, **changes: Any) -> dict[str, Any]:
    fixed = {
        "data.path": str(data),
        "data.classes": 3,
        "model.name": "linear",
        "train.batch_size": 6,
        "train.epochs": STEPS * 6 / 24,
        "train.threads": 1,
        "train.seed": 4,
        "privacy.noise_seed": 3,
        "certify.n0": 10,
        "certify.n": 100,
        "certify.seed": 4,
    }
    return fixed | {name.replace("__", "."): value for name, value in changes.items()}


def config(data: Path, examples: int = ALL_EXAMPLES, **changes: Any) -> Config:
    return resolve("mnist/dp-gaussian", assignments(data, certify__examples=examples, **changes))


def train(data: Path, out: Path) -> None:
    train_in_directory(config(data), out)


def certify(data: Path, out: Path) -> None:
    """Some examples, then more: the rows of the second call belong between those of the first."""
    for examples in (FIRST_EXAMPLES, ALL_EXAMPLES):
        certifying.certify(open_run(out), certifying.request_of(config(data, examples)))


def results(out: Path) -> dict[str, Any]:
    """Everything a run leaves, byte by byte, but for the times. A file too many is a difference too."""
    found: dict[str, Any] = {}
    for file in sorted(out.rglob("*")):
        name = str(file.relative_to(out))
        if file.is_dir():
            continue
        if file.suffix == ".tsv":
            found[name] = without_time(file.read_text())
        elif name == "metrics.json":
            metrics = json.loads(file.read_bytes())
            found[name] = {key: value for key, value in metrics.items() if key not in ("timing", "check")}
        else:
            found[name] = file.read_bytes()
    return found


def without_time(text: str) -> list[list[str]]:
    """The rows of a file of certificates, less `time` and the checksum that covers it."""
    lines = [line.split("\t") for line in text.split("\n")]
    return [[cell for place, cell in enumerate(line) if place not in (5, 9)] for line in lines]
