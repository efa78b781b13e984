import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build" / "cache")  # machine code; not in the user's home
settings.register_profile("dpcert", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("dpcert")


def blobs(seed: int, train: int = 240, test: int = 60, size: int = 8, classes: int = 3) -> dict[str, np.ndarray]:
    """Three kinds of bright squares on noise: learnt in a few steps."""
    generator = np.random.default_rng(seed)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = generator.integers(0, classes, count)
        images = generator.uniform(0.0, 0.2, (count, size, size)).astype(np.float32)
        for image, label in zip(images, labels, strict=True):
            start = int(label) * size // classes
            image[start : start + size // classes] += 0.8
        return images, labels

    x_train, y_train = draw(train)
    x_test, y_test = draw(test)
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def pytest_collection_modifyitems(items):
    """The time limit is there for tests that hang; the slow ones may take long on a busy machine."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.timeout(7200))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The global generators start alike in every test: no test sees which ones ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


EVIDENCE = Path(__file__).parents[1] / "build" / "evidence.jsonl"


@pytest.fixture
def evidence(request):
    """What the test of a guarantee reached, for docs/guarantees.md: call it after the last assertion.

    ``evidence("D8", figure="0 of 500 below the optimistic bound", trials=500, twin="RDP said to be PLD: caught")``
    """
    began = time.perf_counter()

    def note(identity: str, *, figure: str, trials: int, twin: str = "") -> None:
        EVIDENCE.parent.mkdir(exist_ok=True)
        seconds = round(time.perf_counter() - began, 1)
        row = {"id": identity, "figure": figure, "trials": trials, "twin": twin, "seconds": seconds}
        with EVIDENCE.open("a") as file:
            file.write(json.dumps({**row, "test": request.node.nodeid}) + "\n")

    return note


@pytest.fixture
def small_arrays() -> dict[str, np.ndarray]:
    return blobs(0)


@pytest.fixture
def small_npz(tmp_path, small_arrays):
    path = tmp_path / "blobs.npz"
    np.savez(path, **small_arrays)
    return path


def trained_cnn(count: int = 40) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """The model of results/mnist-dp-gaussian and some of MNIST's test images: weights on which leaks show."""
    from dpcert.data.registry import load_dataset
    from dpcert.runs.open import open_run

    data = load_dataset("mnist")
    model = open_run(Path(__file__).parents[1] / "results" / "mnist-dp-gaussian").model
    return model, data.x_test[:count], data.y_test[:count]
