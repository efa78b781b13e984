"""The page with a server and without one, and a browser to look at it."""

from contextlib import contextmanager
from pathlib import Path

import pytest

import dpcert
from dpcert.errors import ConfigError
from dpcert.serve.export import write_demo
from tests.serve.client import Served
from tests.serve.page.browsing import launched, web_host

RUN = Path(__file__).parents[2] / "stored_runs" / "mnist-dp-gaussian"
VOTES = 2000


@contextmanager
def served(run, *options, **environment):
    """The address of ``dpcert serve RUN``."""
    with Served(*map(str, options), run=run, environment=environment) as service:
        yield f"http://127.0.0.1:{service.port}/"


@pytest.fixture(scope="module")
def browser():
    """Closed after each module: while it is open, its event loop runs in this thread, and no other one can."""
    with launched() as opened:
        yield opened


@pytest.fixture(scope="session")
def service():
    """The address of a service with few votes."""
    with served(RUN, "--n", VOTES) as address:
        yield address


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("web") / "deep" / "folder"
    try:
        return write_demo(dpcert.open_run(RUN), folder, None, 100, VOTES, 0.001)
    except ConfigError as error:
        pytest.skip(f"no ONNX Runtime for browsers: {error}")


@pytest.fixture(scope="session")
def demo(demo_folder):
    """The static demo on a web host, below a path that it cannot know."""
    with web_host(demo_folder.parents[1]) as address:
        yield f"{address}deep/folder/"


@pytest.fixture(params=["service", "demo"])
def address(request):
    return request.getfixturevalue(request.param)
