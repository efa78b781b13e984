"""D13: with the noise fixed, one record swapped: what is not a function of the released weights has the same bytes."""

import hashlib
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcert
from dpcert.cli import main
from dpcert.gradients import engine
from dpcert.privacy import mechanism
from dpcert.runs import training as runs
from dpcert.store.durable import write_checked_json
from dpcert.store.metrics import read_metrics
from dpcert.training import loop
from tests.conftest import blobs

SETTINGS = ("data.classes=3", "data.size=240", "model.name=linear", "train.batch_size=10", "train.epochs=5", "privacy.noise_seed=5",
            "certify.n=200")  # fmt: skip


def swapped() -> dict[str, np.ndarray]:
    """One record's pixels and label changed as far as they go: its gradient is another one."""
    arrays = blobs(0)
    arrays["x_train"][7] = 1.0 - arrays["x_train"][7]
    arrays["y_train"][7] = (arrays["y_train"][7] + 1) % 3
    return arrays


def whole_run(folder: Path, arrays: dict[str, np.ndarray], method: str, capsys) -> str:
    """Train, certify, decide and report; returns what was printed. The data always lies at the same path."""
    np.savez(folder.parent / "blobs.npz", **arrays)
    own = [word for setting in (f"data.path={folder.parent / 'blobs.npz'}", *SETTINGS) for word in ("--set", setting)]
    for arguments in (
        ["run", f"mnist/{method}", *own, "--seed", "1", "--examples", "6", "--out", str(folder)],
        ["certify", str(folder), "--radius", "0.1", "--n", "300", "--examples", "4", "--seed", "1"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert not stop.value.code
    return capsys.readouterr().out.replace(str(folder), "RUN")


def content(file: Path) -> object:
    """The bytes of a file without what a clock wrote into it."""
    if file.suffix == ".tsv":  # the columns `time` and `check` (which covers it)
        rows = [line.split("\t") for line in file.read_text().splitlines()]
        return [[cell for name, cell in zip(rows[0], row, strict=True) if name not in ("time", "check")] for row in rows]
    if file.name == "metrics.json":
        return {key: value for key, value in json.loads(file.read_text()).items() if key not in ("timing", "check")}
    data = file.read_bytes()
    if file.suffix == ".html":  # shows the folder, and the SHA-256 of files that a clock wrote into
        data = data.replace(str(file.parent).encode(), b"RUN")
        for other in (*file.parent.glob("*.tsv"), file.parent / "metrics.json"):
            data = data.replace(hashlib.sha256(other.read_bytes()).hexdigest().encode(), other.name.encode())
    return data


def differing(a: Path, b: Path) -> set[str]:
    names = [{str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} for folder in (a, b)]
    return (names[0] ^ names[1]) | {name for name in names[0] & names[1] if content(a / name) != content(b / name)}


@pytest.fixture
def frozen(monkeypatch):
    """Every release is noise alone, whatever the records: what depends on one of them all the same is a side output."""
    real = mechanism.Mechanism.release

    def of_nobody(self, clipped, step):
        return real(self, engine.ClippedSum(torch.zeros_like(clipped.value), clipped.sensitivity, clipped.norms), step)

    monkeypatch.setattr(mechanism.Mechanism, "release", of_nobody)


@pytest.mark.parametrize("method", ["dp-gaussian", "dpsgd"])
def test_with_equal_weights_every_file_and_line_is_equal(method, tmp_path, capsys, frozen, evidence):
    first = whole_run(tmp_path / "first", blobs(0), method, capsys)
    second = whole_run(tmp_path / "second", swapped(), method, capsys)
    assert differing(tmp_path / "first", tmp_path / "second") == set()
    assert first == second
    files = sum(file.is_file() for file in (tmp_path / "first").rglob("*"))
    assert files >= 9
    evidence("D13", figure=f"{method}: 0 of {files} files and no printed line depend on a record but through the weights", trials=files,
             twin="a training loss in metrics.json, a norm in a log: seen")  # fmt: skip


def test_with_the_real_step_only_what_is_made_from_the_weights_differs(tmp_path, capsys):
    whole_run(tmp_path / "first", blobs(0), "dpsgd", capsys)
    whole_run(tmp_path / "second", swapped(), "dpsgd", capsys)
    found = differing(tmp_path / "first", tmp_path / "second")
    assert "model.safetensors" in found  # the swap does reach the weights: the test above is not empty
    assert not found & {"config.toml", "ledger.jsonl"}


def test_twin_a_training_loss_among_the_metrics_is_seen(tmp_path, capsys, frozen, monkeypatch):
    real = runs._write_training_metrics

    def leaky(directory, method, run, data, seconds):
        real(directory, method, run, data, seconds)
        metrics = read_metrics(directory.metrics)
        loss = torch.nn.functional.cross_entropy(run.model(data.x_train), data.y_train)
        write_checked_json(directory.metrics, {**metrics, "train_loss": float(loss)})

    monkeypatch.setattr(runs, "_write_training_metrics", leaky)
    whole_run(tmp_path / "first", blobs(0), "dpsgd", capsys)
    whole_run(tmp_path / "second", swapped(), "dpsgd", capsys)
    assert "metrics.json" in differing(tmp_path / "first", tmp_path / "second")


@pytest.fixture
def sensitive(monkeypatch):
    """Every per-example norm and loss that a training computes."""
    seen: list[float] = []
    real = engine.ClippedSum.__init__

    def spy(self, value, sensitivity, norms):
        seen.extend(norms.tolist())
        real(self, value, sensitivity, norms)

    monkeypatch.setattr(engine.ClippedSum, "__init__", spy)
    return seen


def holds_a_number(data: bytes, values: list[float]) -> bool:
    """Whether one of the values stands in `data`, as float64 or as text of seven digits or more."""
    texts = {word.rstrip(b"0") for word in re.findall(rb"\d+\.\d{6,}", data)}
    wanted = {f"{value:.{digits}f}".encode().rstrip(b"0") for value in values for digits in (7, 8, 9, 12)}
    wanted |= {repr(value).encode() for value in values} | {repr(float(np.float32(value))).encode() for value in values}
    return bool(texts & wanted) or any(np.float64(value).tobytes() in data for value in values)


def test_no_norm_or_loss_of_an_example_is_written_anywhere(tmp_path, sensitive):
    """Looked at half way, private/ included, and at the end."""
    data = dpcert.Dataset(**blobs(0), classes=3, size=240)

    def stop(done, total, **facts):
        if done == 60 and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            signal.raise_signal(signal.SIGTERM)

    def train():
        return dpcert.train("linear", data, "dpsgd", epochs=5, batch_size=10, seed=0, out=tmp_path / "run", progress=stop)

    with pytest.raises(loop.Interrupted):
        train()
    model = dpcert.build_model("linear", input_shape=(1, 8, 8), classes=3, seed=0)
    losses = torch.nn.functional.cross_entropy(model(data.x_train), data.y_train, reduction="none").tolist()
    values = [value for value in {*sensitive, *losses} if value not in (0.0, 1.0)]
    assert len(values) > 500
    half = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(half) >= 5 and not [file for file in half if holds_a_number(file.read_bytes(), values)]
    train()
    values = [value for value in {*sensitive, *losses} if value not in (0.0, 1.0)]
    done = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert done and not [file for file in done if holds_a_number(file.read_bytes(), values)]


def test_twin_a_written_norm_is_found():
    norm = 0.123456789012345
    for text in (
        f"norm {norm}",
        json.dumps({"norms": [norm]}),
        f"{norm:.8f}\t1",
        np.float64(norm).tobytes(),
        f"{np.float32(norm):.9f}",
    ):
        data = text if isinstance(text, bytes) else text.encode()
        assert holds_a_number(b"abc" + data, [norm, float(np.float32(norm))])
    assert not holds_a_number(b"0.5 0.25 epsilon 2.99", [norm])
