"""What somebody meets who types the first commands: each line printed can be typed, read and copied."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dpcert.cli import main
from dpcert.cli._show import print_table
from dpcert.data.registry import SOURCES
from dpcert.methods import ALL_METHODS
from dpcert.runs import presets
from dpcert.runs.resolve import resolve
from tests.conftest import blobs

ROOT = Path(__file__).parents[2]
SMALL = ["model.name=linear", "train.batch_size=10", "data.classes=3", "certify.n=200"]


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def request(folder, *more):
    """A run whose names want quoting."""
    settings = [f"data.path={folder / 'my blobs.npz'}", *SMALL, *more]
    words = [word for setting in settings for word in ("--set", setting)]
    return ["run", "mnist/dp-gaussian", *words, "--examples", "10", "--out", str(folder / "a run")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first contact")
    np.savez(folder / "my blobs.npz", **blobs(0, train=2000))
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    assert call(*request(folder, "train.epochs=1")) == 0
    return folder / "a run"


@pytest.mark.parametrize("words", [[], ["data"]])
def test_the_bare_name_shows_help_and_is_no_error(words, capsys):
    assert call(*words) == 0
    shown = capsys.readouterr()
    assert "Usage" in shown.out and shown.err == ""


def test_a_second_run_says_that_there_is_nothing_to_do(finished, folder, capsys):
    capsys.readouterr()
    assert call(*request(folder, "train.epochs=1")) == 0
    out = capsys.readouterr().out
    assert f"already trained, nothing to do: {finished}" in out and f"report: {finished / 'report.html'}" in out
    assert out.count("report: ") == 1


def test_report_says_where_everything_is(finished, tmp_path, capsys):
    page, table, figures = tmp_path / "p.html", tmp_path / "t.md", tmp_path / "figures"
    assert call("report", finished, "--html", page, "--markdown", table, "--figures", figures) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: {path}" in out for name, path in (("report", page), ("table", table), ("figures", figures)))


def test_a_bundle_is_named_as_such_and_the_remedy_works(finished, tmp_path, capsys):
    bundle = tmp_path / "my bundle.zip"
    np.save(tmp_path / "image.npy", blobs(0)["x_test"][0])
    assert call("export", finished, bundle) == 0
    capsys.readouterr()
    for words in (["report"], ["certify"], ["analyze"], ["attack"], ["predict", tmp_path / "image.npy"]):
        assert call(words[0], bundle, *words[1:]) == 2
        told = capsys.readouterr().err
        assert "is a bundle (dpcert export)" in told and told.count("\n") == 1
    remedy = shlex.split(told.strip().split("check the bundle: ")[1])
    assert remedy[0] == "dpcert" and call(*remedy[1:]) == 0
    (tmp_path / "text").write_text("no archive")
    assert call("report", tmp_path / "text") == 2 and "is a file, must be a run directory" in capsys.readouterr().err


def started(*words, python=True):
    command = [sys.executable, "-m", "dpcert"] if python else [str(Path(sys.executable).with_name("dpcert"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def steps_in(checkpoint):
    return json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0


@pytest.mark.parametrize("python", [True, False])
def test_what_is_printed_after_ctrl_c_can_be_typed(folder, tmp_path, python):
    if not python and not Path(sys.executable).with_name("dpcert").exists():
        pytest.skip("dpcert is not installed as a script")
    shutil.copy(folder / "my blobs.npz", tmp_path / "my blobs.npz")
    words = request(tmp_path, "train.epochs=4", "train.learning_rate=0.25")  # 800 steps
    process = started(*words, python=python)
    checkpoint = tmp_path / "a run" / "private" / "state.json"
    while process.poll() is None and steps_in(checkpoint) == 0:  # before the first step SIGINT may be ignored (a job of nohup)
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    hint = told.strip().splitlines()[-1].split("resume with: ")[1]
    assert "'" in hint and "train.learning_rate=0.25" in hint
    # the hint of every other command that meets the unfinished run is one that works, too
    asked = started("certify", str(tmp_path / "a run"))
    _, refused = asked.communicate(timeout=120)
    finish = re.search(r"(?:go on|training) with: (dpcert .*)", refused).group(1)
    here = f"{sys.executable} -m dpcert"
    first, then = (finish.replace("dpcert", here, 1), hint) if python else (hint, finish.replace("dpcert", here, 1))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for command in (first, then):
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    assert "already trained" in done.stdout and (tmp_path / "a run" / "model.safetensors").exists()


@pytest.mark.parametrize("dataset", presets.DATASETS)
def test_a_data_set_alone_leads_to_a_preset(dataset, capsys):
    assert call("run", dataset) == 2
    assert f"did you mean {dataset}/dp-gaussian?" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 60])
def test_no_name_or_address_is_broken(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert call("methods") == call("presets") == call("data", "list") == 0
    out = capsys.readouterr().out
    assert all(out.count(name) for name in ALL_METHODS) and all(source.mirror in out for source in SOURCES.values())


def test_lists_are_short_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for command, most in (("presets", 25), ("methods", 60)):
        assert call(command) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= most and max(map(len, lines)) <= 80


def test_presets_names_the_phases_of_every_fine_tuned_family(capsys):
    """Head steps and main phase; the K of each family is its own."""
    assert call("presets") == 0
    out = " ".join(capsys.readouterr().out.split())
    for family in presets.FINE_TUNED:
        config = resolve(f"{family}/dp-gaussian", {})
        words = out.split(f"{family}/METHOD")[1].split(". ")[0].rstrip(".") + "."  # what most methods do
        assert f"public {config.model.name}" in words
        main = f"{config.model.train} {config.train.optimizer} {config.train.learning_rate:g}/{config.train.batch_size}"
        head_alone = config.model.train == "head"
        assert (main in words) is not head_alone and (f"{config.head.steps} full-batch steps" in words) is bool(
            config.head.steps
        )
        assert words.endswith(f", K {config.head.copies if head_alone else config.method.copies}.")


@pytest.mark.parametrize("columns", range(30, 130, 7))
def test_a_table_of_any_width_keeps_every_word(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [
        ("a-rather-long-name-of-a-run", "short", "some words that may wrap", ""),
        ("b", "http://an.address/of/its/own", "x", "y"),
    ]
    print_table(("name", "second", "third one", "fourth"), rows, "title")
    out = capsys.readouterr().out
    assert all(word in out for row in rows for cell in row for word in cell.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", "test images to certify"),
        ("train", "Not used in training"),
        ("certify", "test images to certify"),
        ("attack", "test images to attack"),
        ("analyze", "certified images to measure"),
        ("reproduce", "test images to certify, measure and attack"),
    ],
)
def test_help_says_what_examples_means_here(command, words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert call(command, "--help") == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_make_says_how_to_call_it(monkeypatch):
    # The suite itself runs under `make test`: a make below another one prints the folders it enters and leaves.
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)
    for target in ("install", "run"):
        planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert ".venv/bin/dpcert, or as dpcert after: source .venv/bin/activate" in planned.splitlines()[-1]
