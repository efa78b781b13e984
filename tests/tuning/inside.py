"""A search inside this process: an executor that runs trials by calling what the command calls, and can be interrupted."""

from pathlib import Path

import numpy as np

from dpcert.errors import DpcertError
from dpcert.runs.resolve import resolve
from dpcert.scale.tasks import Outcome
from dpcert.tuning.trials import run_trial
from tests.conftest import blobs


class Ended:
    def __init__(self, outcome):
        self._outcome = outcome

    def outcome(self):
        return self._outcome


class InProcess:
    """Runs each task at once. `fail` says for a task whether it fails, `stop_after` raises like Ctrl-C."""

    def __init__(self, fail=lambda task: False, stop_after=None):
        self.ran, self._fail, self._stop_after = [], fail, stop_after
        self.stopped = False

    def slots(self, resources):
        return 1

    def submit(self, task):
        if self._stop_after is not None and len(self.ran) >= self._stop_after:
            raise KeyboardInterrupt
        self.ran.append(task.name)
        if self._fail(task):
            return Ended(Outcome(2, "ModelError", "no such model", 0.1))
        assert task.words[0] == "trial" and task.words[2] == "--out"
        try:
            run_trial(resolve(task.words[1], {}), Path(task.words[3]))
        except DpcertError as error:
            return Ended(Outcome(2, type(error).__name__, str(error), 0.1))
        return Ended(Outcome(0, seconds=0.1))

    def stop(self):
        self.stopped = True


def write_data(folder):
    path = folder / "blobs.npz"
    np.savez(path, **blobs(0, train=72, test=12, size=4))
    return path


def write_space(folder, text="[train]\nbatch_size = [6, 12]\nlearning_rate = { low = 0.1, high = 2.0, log = true }\n"):
    path = folder / "space.toml"
    path.write_text(text)
    return path


def assignments(data, **changes):
    fixed = {
        "data.path": str(data),
        "data.classes": 3,
        "model.name": "linear",
        "train.batch_size": 6,
        "train.learning_rate": 0.5,
        "train.epochs": 1.0,
        "train.threads": 1,
        "certify.n0": 10,
        "certify.n": 100,
        "certify.examples": 4,
    }
    return fixed | {name.replace("__", "."): value for name, value in changes.items()}


def words(data, space, out, *more):
    """The options of ``dpcert tune`` for the same search."""
    settings = [
        word for name, value in assignments(data).items() if name != "data.path" for word in ("--set", f"{name}={value}")
    ]
    return ["tune", "mnist/dp-gaussian", "--space", str(space), "--data", str(data), "--out", str(out), *settings, *more]
