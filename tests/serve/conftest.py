import json
from pathlib import Path

import pytest

from dpcert.data.registry import load_dataset
from tests.serve.client import Served

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def digits():
    """Test images of MNIST with their labels."""
    data = load_dataset("mnist")
    return data.x_test[:200], data.y_test[:200]


@pytest.fixture(scope="session")
def body(digits):
    """A clear digit (a 7) as JSON."""
    return json.dumps({"image": digits[0][0].tolist()})


@pytest.fixture(scope="session")
def service():
    """The service with its default settings, for tests that change nothing of it."""
    with Served() as served:
        yield served
        assert served.process.poll() is None, served.log()[-3000:]  # it never ended or restarted


@pytest.fixture
def own_run(tmp_path) -> Path:
    """A copy of the stored run that a test may change."""
    import shutil

    from tests.serve.client import STORED

    return Path(shutil.copytree(STORED, tmp_path / "run"))
