"""S1 at run time: nothing is unpickled on any load path, and hostile pickles in the place of our files do nothing."""

import dataclasses
import gzip
import hashlib
import pickle
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dpcert
from dpcert.cli import main
from dpcert.data import cifar, registry
from dpcert.errors import DpcertError
from dpcert.runs.config import parse, read_toml
from dpcert.training.loop import Interrupted
from tests.conftest import blobs
from tests.security.guards import UnpickledError, no_unpickling

SETTINGS = (
    "model.name=linear",
    "train.batch_size=10",
    "train.epochs=2",
    "data.classes=3",
    "certify.n=200",
    "privacy.noise_seed=1",
)
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def request(folder: Path, out: Path) -> list[str]:
    own = ["--set", f"data.path={folder / 'blobs.npz'}", *SMALL, "--examples", "5", "--seed", "1"]
    return ["run", "mnist/dp-gaussian", *own, "--out", str(out)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pickle")
    np.savez(folder / "blobs.npz", **blobs(0))
    np.save(folder / "image.npy", blobs(0)["x_test"][0])
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "image.png")
    assert call(*request(folder, folder / "run")) == 0
    return folder


def half_way(out: Path) -> None:
    """A run that was stopped after step 7 of 48."""

    def stop(done: int, total: int, **facts: str) -> None:
        if done == 7:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_small(out, progress=stop)


def train_small(out: Path, **options):
    data = dpcert.Dataset(**blobs(0), classes=3, size=240)
    return dpcert.train("linear", data, "dpsgd", epochs=2, batch_size=10, seed=0, noise_seed=1, out=out, **options)


def small_cifar(folder: Path, patch: pytest.MonkeyPatch) -> None:
    batch = bytes(cifar.RECORD_BYTES) * 10_000
    source = dataclasses.replace(
        registry.CIFAR10, digests=dict.fromkeys(registry.CIFAR10.digests, hashlib.sha256(batch).hexdigest())
    )
    patch.setitem(registry.SOURCES, "cifar10", source)
    (folder / source.folder).mkdir(exist_ok=True)
    for name in source.digests:
        (folder / source.folder / f"{name}.gz").write_bytes(gzip.compress(batch, 1))
    patch.setenv("DPCERT_DATA", str(folder))


def paths_of(folder: Path, half: Path) -> dict[str, object]:
    run = str(folder / "run")
    return {
        "finished run": lambda: call(*request(folder, folder / "run")) == 0,
        "more certificates": lambda: call("certify", run, "--n", "200", "--examples", "8") == 0,
        "decisions at a radius": lambda: call("certify", run, "--radius", "0.1", "--n", "200", "--examples", "3") == 0,
        "predict .npy": lambda: call("predict", run, str(folder / "image.npy"), "--n", "50") == 0,
        "predict .png": lambda: call("predict", run, str(folder / "image.png"), "--n", "50") == 0,
        "report": lambda: call("report", run) == 0,
        "resume": lambda: train_small(half).ledger.is_closed,
        "reload": lambda: train_small(half).ledger.is_closed,
        "config": lambda: parse(read_toml(folder / "run" / "config.toml"), "x"),
        "npz": lambda: dpcert.data.dataset.read_npz(folder / "blobs.npz"),
        "idx": lambda: dpcert.load_dataset("mnist"),
        "cifar": lambda: dpcert.load_dataset("cifar10"),
    }


def test_no_load_path_unpickles(folder, tmp_path, monkeypatch, evidence):
    """S1: every load path with every way to unpickle mined; the audit hook sees the C unpickler under any name."""
    half_way(tmp_path / "half")
    small_cifar(folder, monkeypatch)
    paths = paths_of(folder, tmp_path / "half")
    hostile = hostile_files(tmp_path)
    with no_unpickling() as seen:
        for name, load in paths.items():
            assert load(), name
        for name, load in hostile.items():
            with pytest.raises(DpcertError):
                load(folder)
            assert not (tmp_path / "done").exists(), name
    assert not [event for event in seen if event.startswith("pickle")]
    figure = f"0 unpicklings on {len(paths)} load paths; {len(hostile)} of {len(hostile)} hostile pickles refused unread"
    evidence(
        "S1", figure=figure, trials=len(paths) + len(hostile), twin="np.load with pickles, torch.load, pickle.loads: caught"
    )


class Evil:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def hostile_files(tmp_path: Path) -> dict[str, object]:
    """Pickles where our files should be; each must be refused without a look inside."""
    evil = Evil(tmp_path / "done")
    objects = np.empty(4, dtype=object)
    objects[:] = [evil] * 4
    np.savez(tmp_path / "objects.npz", **(blobs(0, train=4) | {"y_train": objects}))
    np.save(tmp_path / "objects.npy", objects)
    torch.save({"weight": evil}, tmp_path / "torch.bin")
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(evil))
    shutil.copy(tmp_path / "torch.bin", tmp_path / "torch.npz")

    def in_run(name: str, source: str):
        def load(folder: Path) -> object:
            copy = tmp_path / f"run-{name}-{source}"
            shutil.copytree(folder / "run", copy)
            shutil.copy(tmp_path / source, copy / name)
            return dpcert.open_run(copy)

        return load

    from dpcert.runs.predict import read_images

    return {
        "objects in .npz": lambda folder: dpcert.data.dataset.read_npz(tmp_path / "objects.npz"),
        "torch archive as .npz": lambda folder: dpcert.data.dataset.read_npz(tmp_path / "torch.npz"),
        "objects in .npy": lambda folder: read_images(tmp_path / "objects.npy"),
        "pickle as .npy": lambda folder: read_images(tmp_path / "plain.npy"),
        "torch file as weights": in_run("model.safetensors", "torch.bin"),
        "pickle as weights": in_run("model.safetensors", "plain.npy"),
        "pickle as ledger": in_run("ledger.jsonl", "plain.npy"),
        "pickle as config": in_run("config.toml", "plain.npy"),
    }


@pytest.mark.parametrize("twin", ["numpy", "torch", "pickle", "bound earlier"])
def test_twins_are_caught(twin, tmp_path):
    """A reader that does unpickle trips the trap, even through a name bound before the trap was set."""
    objects = np.array([Evil(tmp_path / "done")], dtype=object)
    np.save(tmp_path / "x.npy", objects)
    torch.save({"weight": Evil(tmp_path / "done")}, tmp_path / "x.pt")
    early = pickle.loads
    with no_unpickling() as seen:
        if twin == "bound earlier":
            early(pickle.dumps(Evil(tmp_path / "done")))
            assert any(event.startswith("pickle.find_class") for event in seen)
            return
        with pytest.raises(UnpickledError):
            if twin == "numpy":
                np.load(tmp_path / "x.npy", allow_pickle=True)
            elif twin == "torch":
                torch.load(tmp_path / "x.pt", weights_only=False)
            else:
                pickle.loads(pickle.dumps(Evil(tmp_path / "done")))  # noqa: S301 (the trap must see it)
