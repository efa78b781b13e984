"""``dpcert serve RUN --export DIR``: complete or not at all, nothing private, one clear line for what is missing."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.errors import ConfigError, ModelError, RunError
from dpcert.serve import export, runtime
from tests.cli.test_commands import call
from tests.conftest import blobs

pytest.importorskip("onnxruntime")
RUN = Path(__file__).parents[1] / "stored_runs" / "mnist-dp-gaussian"
RUNTIME = {"page/ort.js": b"export const env = {};", "page/ort.wasm": b"\0asm"}


@pytest.fixture
def without_npm(monkeypatch):
    """The files of npm's package without npm."""
    monkeypatch.setattr(export, "runtime_files", lambda: RUNTIME)


@pytest.fixture(scope="module")
def run():
    return dpcert.open_run(RUN)


def test_it_is_complete_and_describes_the_model(run, tmp_path, without_npm):
    folder = export.write_demo(run, tmp_path / "new" / "demo", None, 100, 1000, 0.001)
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert {"index.html", "model.json", "model.onnx", "gallery.json", *RUNTIME, "page/worker.js", "page/theme.css"} <= names
    facts = json.loads((folder / "model.json").read_text())
    assert facts["model_sha256"] == run.model_sha256 and (facts["sigma"], facts["n0"], facts["n"]) == (0.5, 100, 1000)
    assert facts["privacy"]["epsilon"] == run.epsilon
    images = json.loads((folder / "gallery.json").read_text())
    assert len(images) == 24 and np.allclose(images[3]["image"], run.data.x_test[3].numpy(), atol=1e-6)
    assert folder.stat().st_mode & 0o777 == 0o755  # a web server of another user can read it


def test_the_graph_computes_the_models_logits_for_any_number_of_rows(run):
    import onnxruntime

    session = onnxruntime.InferenceSession(export.graph_of(run.model, run.input_shape, 0.5), providers=["CPUExecutionProvider"])
    rows = torch.randn((300, 1, 28, 28), generator=torch.Generator().manual_seed(1))
    for count in (1, 7, 300):
        (logits,) = session.run(["logits"], {"rows": rows[:count].numpy()})
        with torch.inference_mode():
            assert np.abs(logits - run.model(rows[:count]).numpy()).max() < 1e-4


def test_a_model_that_mixes_rows_is_refused():
    class Centered(nn.Module):
        def forward(self, x):
            return (x - x.mean(dim=0)).flatten(1)[:, :3]

    with pytest.raises(ModelError):
        export.graph_of(Centered(), (1, 4, 4), 0.5)


def test_test_images_of_custom_data_are_left_out_unless_asked_for(tmp_path, without_npm):
    data = dpcert.Dataset(**blobs(0))
    dpcert.train(
        dpcert.build_model("linear", input_shape=(1, 8, 8), classes=3), data, dpcert.method("dpsgd"),
        epsilon=3.0, delta=1e-5, epochs=1, batch_size=60, out=tmp_path / "run",
    )  # fmt: skip
    run = dpcert.open_run(tmp_path / "run", dpcert.build_model("linear", input_shape=(1, 8, 8), classes=3), data)
    for gallery, expected in ((None, 0), (False, 0), (True, 24)):
        folder = export.write_demo(run, tmp_path / f"demo-{gallery}", 0.5, 100, 500, 0.001, gallery)
        assert len(json.loads((folder / "gallery.json").read_text())) == expected


def test_a_folder_with_files_is_not_touched(run, tmp_path, without_npm):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="not an empty folder"):
        export.write_demo(run, tmp_path / "mine", None, 100, 1000, 0.001)
    assert [file.name for file in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_a_failed_write_leaves_nothing(run, tmp_path, without_npm, monkeypatch):
    written = []

    def fails_at_the_fifth(path, data):
        written.append(path)
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        return 0

    monkeypatch.setattr(Path, "write_bytes", fails_at_the_fifth)
    with pytest.raises(RunError, match="No space left"):
        export.write_demo(run, tmp_path / "demo", None, 100, 1000, 0.001)
    assert list(tmp_path.iterdir()) == []


def test_without_npm_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime.shutil, "which", lambda name: None)
    assert call("serve", str(RUN), "--export", str(tmp_path / "demo")) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: npm is not installed") and len(said.splitlines()) == 1 and not (tmp_path / "demo").exists()


def test_npm_that_fails_is_quoted(monkeypatch, tmp_path):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error network' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="npm error network"):
        runtime.packed()


def archive(members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as opened:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            opened.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def test_another_archive_than_the_tested_one_is_refused():
    with pytest.raises(ConfigError, match="SHA-512"):
        runtime.checked(archive(dict.fromkeys(runtime.MEMBERS.values(), b"evil")))


def test_only_the_named_members_are_read_and_nothing_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, binary = runtime.MEMBERS.values()
    hostile = {script: b"code()\n//# sourceMappingURL=x.map", binary: b"wasm", "../../evil": b"x", "/tmp/evil": b"x"}
    assert runtime.members(archive(hostile)) == {"page/ort.js": b"code()", "page/ort.wasm": b"wasm"}
    assert list(tmp_path.iterdir()) == []
