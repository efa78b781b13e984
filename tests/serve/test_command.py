"""`dpcert serve` on the command line: one clear line for every wrong request, loopback by default, private data kept private."""

import json
import socket

import numpy as np
import pytest
import torch

import dpcert
from dpcert.cli import main
from dpcert.cli import serve as command
from dpcert.errors import ConfigError
from dpcert.runs.open import open_run
from dpcert.serve import guard, server
from dpcert.serve.gallery import Gallery, gallery_of
from dpcert.serve.model import served
from dpcert.serve.settings import Asked
from tests.conftest import blobs
from tests.serve.client import STORED


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main(["serve", *map(str, words)])
    return stop.value.code


@pytest.fixture
def answered(monkeypatch):
    """The server is prepared, but answers nothing."""
    built = []
    monkeypatch.setattr(server, "answer_until_a_signal", lambda made, listener: built.append(listener.getsockname()))
    return built


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    """A run on custom data: a file, remembered in its config."""
    folder = tmp_path_factory.mktemp("serve")
    np.savez(folder / "blobs.npz", **blobs(0))
    words = [
        "--data",
        str(folder / "blobs.npz"),
        "--set",
        "train.epochs=1",
        "--set",
        "train.batch_size=20",
        "--set",
        "data.classes=3",
    ]
    with pytest.raises(SystemExit) as stop:
        main(["train", "mnist/dpsgd", *words, "--set", "model.name=linear", "--out", str(folder / "run")])
    assert stop.value.code == 0
    return folder / "run"


def error_of(capsys) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert call(STORED, "--port", port) == 2
    assert f"127.0.0.1:{port} cannot be used (Address already in use); choose another --port" in error_of(capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("runs/nothing-here",), "runs/nothing-here"),
        ((STORED, "--host", "256.1.1.1"), "--host is '256.1.1.1'"),
        ((STORED, "--host", "192.0.2.1"), "192.0.2.1:0 cannot be used"),
        ((STORED, "--queue", 0), "--queue is 0"),
        ((STORED, "--timeout", 0), "--timeout is 0"),
        ((STORED, "--n", 0), "n is 0"),
        ((STORED, "--alpha", 0.5), "alpha is 0.5"),
        ((STORED, "--sigma", -1), "sigma is -1"),
        ((STORED, "--api-key-file", "nothing-here"), "nothing-here: No such file"),
    ],
)
def test_a_wrong_request_is_one_line(words, expected, capsys):
    assert call(*words, "--port", 0) == 2
    assert expected in error_of(capsys)


def test_the_extra_is_not_installed(monkeypatch, capsys):
    find = command.importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert call(STORED) == 2
    assert error_of(capsys).endswith("uvicorn is not installed; install the service with: pip install 'dpcert[serve]'")


@pytest.mark.parametrize("key", ["", "short", "has a space in it, too", "x" * 15, "é" * 20, "tab\tinside-of-the-key"])
def test_a_weak_key_is_refused(key, tmp_path, monkeypatch, capsys):
    (tmp_path / "key").write_text(key, encoding="utf-8")
    assert call(STORED, "--api-key-file", tmp_path / "key") == 2
    assert "API key" in error_of(capsys)
    monkeypatch.setenv(guard.KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match="API key"):
        guard.read_api_key(None, key)


def test_the_key_of_the_file_goes_first_and_is_not_kept(tmp_path):
    (tmp_path / "key").write_text("a-key-of-the-file-0123\n")
    key = guard.read_api_key(tmp_path / "key", "a-key-of-the-environment")
    assert key.accepts({"authorization": "Bearer a-key-of-the-file-0123"})
    assert not key.accepts({"authorization": "Bearer a-key-of-the-environment"})
    assert "0123" not in repr(vars(key)) and guard.read_api_key(None, None) is None


def test_loopback_is_the_default_and_another_address_without_a_key_is_warned_of(answered, capsys, monkeypatch):
    assert call(STORED, "--port", 0, "--no-gallery") == 0
    assert answered[0][0] == "127.0.0.1" and "warning" not in capsys.readouterr().err
    assert call(STORED, "--port", 0, "--no-gallery", "--host", "0.0.0.0") == 0
    lines = capsys.readouterr().err.splitlines()
    assert (
        answered[1][0] == "0.0.0.0" and len(lines) == 1 and lines[0].startswith("warning: --host is 0.0.0.0 without an API key")
    )
    monkeypatch.setenv(guard.KEY_VARIABLE, "a-key-of-the-environment")
    assert call(STORED, "--port", 0, "--no-gallery", "--host", "0.0.0.0") == 0
    assert "warning" not in capsys.readouterr().err


def test_help_has_an_example(capsys):
    assert call("--help") == 0
    assert "dpcert serve runs/mnist-dp-gaussian" in capsys.readouterr().out


def test_test_images_of_custom_data_are_shown_only_if_asked_for(custom):
    run = open_run(custom)
    assert "may be private" in gallery_of(run, None)
    shown = gallery_of(run, True)
    assert isinstance(shown, Gallery) and len(shown) == len(run.data.x_test)
    assert "switched off" in gallery_of(open_run(STORED), False)
    given = open_run(custom, data=custom.parent / "blobs.npz")
    assert "may be private" in gallery_of(given, None) and isinstance(gallery_of(given, True), Gallery)


def test_the_gallery_downloads_nothing(monkeypatch, tmp_path):
    from dpcert.runs import images

    monkeypatch.setattr(images, "missing_files", lambda source: ["t10k-images-idx3-ubyte"])
    monkeypatch.setattr("dpcert.data.fetch.first_existing", lambda paths: None)
    assert "not on this machine" in gallery_of(open_run(STORED), None)


def test_no_training_record_can_be_asked_for(custom):
    run = open_run(custom)
    shown = gallery_of(run, True)
    train = {tuple(image.flatten().tolist()) for image in run.data.x_train}
    seen = {tuple(torch.tensor(shown.image(index).image).flatten().tolist()) for index in range(len(shown))}
    assert not train & seen and len(seen) == len(shown)
    with pytest.raises(IndexError):
        shown.image(len(shown))


def test_a_run_that_is_not_private_says_so(tmp_path):
    data = dpcert.Dataset(**blobs(0), classes=3)
    dpcert.train("linear", data, "dpsgd", epochs=1, batch_size=20, out=tmp_path / "run", seed=0, noise_seed=1)
    card = served(open_run(tmp_path / "run"), None, 100, Asked(100, 0.001), gallery=False).card
    assert not card.privacy.private and card.privacy.epsilon is None and "not private" in card.privacy.statement
    assert card.class_names is None and card.certification == [] and card.input_shape == [1, 8, 8]


def test_a_run_on_custom_data_is_served(custom):
    """Another shape, another number of classes, no certificates yet."""
    from tests.serve.client import call as ask
    from tests.serve.client import require_right
    from tests.serve.test_limits import in_a_thread

    run = open_run(custom)
    body = json.dumps({"image": run.data.x_test[0].tolist()})
    with in_a_thread(run=custom) as port:
        answer = ask(port, "POST", "/predict?n=500", body).json
        require_right(answer, n=500, sha256=run.model_sha256, classes=3, sigma=run.config.certification_sigma)
        assert ask(port, "POST", "/attack?strength=0.5", body).json["distance"] <= 0.5
        assert ask(port, "GET", "/gallery").status == 404 and ask(port, "GET", "/model").json["input_shape"] == [1, 8, 8]
