"""S9: a link in a run directory is never followed. What it leads to keeps its content, its mode and its name.

The directory itself may be reached through a link: that one was typed by the user.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dpcert.cli import main
from dpcert.errors import RunError
from dpcert.privacy.ledger import Ledger
from dpcert.store import durable
from dpcert.store.runs import RunDirectory
from tests.faults import scene

ROWS = scene.ROWS
FILES = (
    *("config.toml", "ledger.jsonl", "model.safetensors", "metrics.json", "training.tsv", "report.html"),
    *(ROWS, ROWS.replace(".tsv", ".json"), "samples.tsv", "samples.json", "attacks.tsv", "attacks.json"),
    *("private/key", "private/state.json", "private/checkpoint-8.safetensors", "figures/radii.svg", ".metrics.json.tmp"),
    *("notes.txt", ".config.toml.tmp", "private/.key.tmp"),
)
FOLDERS = ("private", "figures")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small finished run with every part, and its data."""
    folder = tmp_path_factory.mktemp("links")
    data = scene.write_data(folder)
    scene.train(data, folder / "run")
    scene.certify(data, folder / "run")
    (folder / "run" / "figures").mkdir()
    return data, folder / "run"


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made[1], tmp_path / "run")


@pytest.fixture
def outside(tmp_path):
    """What must not be touched: a folder that holds the names we use, and a file."""
    folder = tmp_path / "precious"
    folder.mkdir(mode=0o755)
    for name in ("key", "state.json", "checkpoint-3.safetensors", "radii.svg", "certified_accuracy.svg", "mine"):
        (folder / name).write_text("precious" * 4)
    return folder


def state_of(folder):
    return {
        file: (file.lstat().st_mode, file.read_bytes() if file.is_file() else None) for file in (folder, *folder.rglob("*"))
    }


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def commands(data, run):
    """Every command that works in a run directory, on one that is finished."""
    chosen = [f"{key}={value}" for key, value in scene.assignments(data, certify__examples=scene.ALL_EXAMPLES).items()]
    request = ["mnist/dp-gaussian", *(word for text in chosen for word in ("--set", text)), "--out", run]
    few = ("--n0", 10, "--n", 100, "--examples", 4)
    np.save(run.parent / "image.npy", np.zeros((4, 4), np.float32))
    return {
        "train": ("train", *request),
        "run": ("run", *request),
        "certify": ("certify", run, *few, "--sigma", 0.25),
        "decide": ("certify", run, *few, "--radius", 0.1),
        "attack": ("attack", run, "--examples", 4, "--strengths", "0.1"),
        "analyze": ("analyze", run, "--examples", 4),
        "predict": ("predict", run, run.parent / "image.npy", "--n", 10),
        "report": ("report", run, "--html", run / "report.html", "--figures", run / "figures"),
        "verify": ("verify", run),
        "export": ("export", run, run.parent / "bundle.zip"),
    }


def plant(place, target):
    """A link in the place of a file or folder that may be there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize(
    "command", ["train", "run", "certify", "decide", "attack", "analyze", "predict", "report", "verify", "export"]
)
def test_a_link_in_a_run_directory_is_refused_in_one_line(command, made, run, outside, capsys, evidence):
    cases = [(name, target) for name in FILES for target in (outside / "mine", outside / "absent")]
    cases += [(name, target) for name in FOLDERS for target in (outside, outside / "absent")]
    before = state_of(outside)
    for name, target in cases:
        copy = shutil.copytree(run, run.parent / "copy")
        plant(copy / name, target)
        assert call(*commands(made[0], copy)[command]) == 2, name
        err = capsys.readouterr().err
        assert err.startswith("error: ") and len(err.splitlines()) == 1 and "is a symbolic link" in err, (name, err)
        assert str(copy / name) in err
        assert state_of(outside) == before and (copy / name).is_symlink(), name
        shutil.rmtree(copy)
    evidence("S8", figure=f"{command}: {len(cases)} of {len(cases)} links refused, 0 targets touched", trials=len(cases))


def test_other_things_than_files_are_refused_and_nobody_waits_for_a_pipe(run, capsys):
    os.mkfifo(run / "samples.tsv")
    assert call("report", run) == 2
    assert "neither a file nor a folder" in capsys.readouterr().err
    with pytest.raises(OSError):
        durable.read_file(run / "absent")
    assert durable.read_file(run / "samples.tsv") == b""


def test_the_run_directory_itself_may_be_reached_through_a_link(made, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    scene.train(made[0], tmp_path / "runs" / "new")
    (tmp_path / "direct").symlink_to(tmp_path / "disk" / "new")
    for command in ("certify", "report", "verify", "export"):
        assert call(*commands(made[0], tmp_path / "direct")[command]) == 0
    assert {path.name for path in (tmp_path / "disk" / "new").iterdir()} >= {"ledger.jsonl", "report.html", "private"}


# ------------------------------------------------------------------ links that are put there after the first look


def swap(run, outside):
    """Another process puts a link in the place of private/."""
    (run / "private").rename(run / "was-private")
    (run / "private").symlink_to(outside)


@pytest.mark.parametrize("moment", ["store_key", "save_checkpoint", "close"])
def test_a_link_swapped_in_during_training_is_not_followed(moment, made, outside, tmp_path, monkeypatch):
    out, before = tmp_path / "new", state_of(outside)
    owner = {"store_key": RunDirectory, "close": Ledger}.get(moment)
    if moment == "save_checkpoint":
        from dpcert.training import loop as owner
    real = getattr(owner, moment)

    def swapped(*arguments, **options):
        if not (out / "private").is_symlink():
            swap(out, outside)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, moment, swapped)
    with pytest.raises(RunError, match="private is a symbolic link"):
        scene.train(made[0], out)
    assert state_of(outside) == before


def test_a_link_swapped_in_while_the_work_is_done_is_not_followed(outside, tmp_path):
    """Between the look and the call: the folder that was opened is the one that is worked in."""
    folder = tmp_path / "new" / "private"
    directory = RunDirectory(folder.parent)
    directory.create()
    before, real = state_of(outside), durable.refuse_link

    def late(path):
        real(path)
        if not folder.is_symlink():
            swap(folder.parent, outside)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "refuse_link", late)
        directory.store_key(bytes(32))
    assert (tmp_path / "new" / "was-private" / "key").read_bytes() == bytes(32)
    assert state_of(outside) == before


@pytest.mark.parametrize("dangling", [False, True])
def test_each_operation_refuses_a_link_on_its_own(dangling, outside, tmp_path):
    link, linked = tmp_path / "link", tmp_path / "linked"
    link.symlink_to(outside / ("absent" if dangling else "mine"))
    linked.symlink_to(outside / "absent" if dangling else outside)
    before = state_of(outside)
    operations = {
        "append": lambda: durable.Appender(link, 1.0).__enter__(),
        "write": lambda: durable.write_atomically(link, b"x"),
        "read": lambda: durable.read_file(link),
        "destroy": lambda: durable.destroy(link),
        "write in it": lambda: durable.write_atomically(linked / "mine", b"x", real_folder=True),
        "destroy in it": lambda: durable.destroy(linked / "key"),
        "remove in it": lambda: durable.remove(linked / "key"),
        "chmod": lambda: durable.make_private(linked),
    }
    for name, operation in operations.items():
        with pytest.raises(RunError, match="is a symbolic link"):
            operation()
        assert state_of(outside) == before and link.is_symlink() and linked.is_symlink(), name


def test_a_link_in_place_of_a_temporary_file_is_not_written_through(outside, tmp_path):
    (tmp_path / ".file.tmp").symlink_to(outside / "mine")
    before = state_of(outside)
    durable.write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new" and not (tmp_path / "file").is_symlink()
    assert state_of(outside) == before


@pytest.mark.parametrize("target", ["mine", "absent"])
def test_outputs_do_not_go_through_a_planted_link(target, run, outside, tmp_path, capsys):
    link, folder = tmp_path / "out", tmp_path / "figures"
    link.symlink_to(outside / target)
    folder.symlink_to(outside)
    before = state_of(outside)
    for arguments in (
        ("export", run, link),
        ("report", run, "--html", link),
        ("report", run, "--markdown", link),
        ("report", run, "--figures", folder),
    ):
        assert call(*arguments) == 2, arguments
        err = capsys.readouterr().err
        assert err.startswith("error: ") and len(err.splitlines()) == 1 and "is a symbolic link" in err
        assert state_of(outside) == before and link.is_symlink()


# ------------------------------------------------------------------ the twins


def test_twin_without_the_first_look_each_operation_still_refuses(made, outside, tmp_path, monkeypatch):
    monkeypatch.setattr(RunDirectory, "refuse_links", lambda directory: None)
    before = state_of(outside)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "private").symlink_to(outside)
    with pytest.raises(RunError, match="is a symbolic link"):
        scene.train(made[0], tmp_path / "new")
    assert state_of(outside) == before


def test_twin_that_follows_links_is_caught(made, outside, tmp_path, monkeypatch):
    """As it was: finishing a run emptied the folder that private/ led to, and changed its mode."""
    monkeypatch.setattr(RunDirectory, "refuse_links", lambda directory: None)
    for module in ("dpcert.store.durable", "dpcert.store.runs", "dpcert.runs.resolve"):
        monkeypatch.setattr(f"{module}.refuse_link", lambda path: None)
    monkeypatch.setattr(os, "O_NOFOLLOW", 0)
    before = state_of(outside)
    (outside / "state.json").unlink()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "private").symlink_to(outside)
    scene.train(made[0], tmp_path / "new")
    assert state_of(outside) != before and list(outside.iterdir()) == []
    assert Path(outside).stat().st_mode & 0o777 == 0o700
