"""One rule for all commands: a file that figures are read from is checked, by each command that reads it.

Every public file of a finished run is damaged in turn; each command that shows, uses or shares figures of it must refuse
the run in one line. A file that a command may ignore stands in `IGNORED`, with the reason.
"""

import json
import shutil

import numpy as np
import pytest

from dpcert.errors import RunError
from dpcert.release.files import read_public_files
from dpcert.release.verify import FAILED, verify
from dpcert.store import opened
from dpcert.store.records import AttackRow, SampleRow, header, read_rows, text_of

from .conftest import call
from .test_verify import edit_json

PLAIN, ROBUST = "certificates-sigma0.50", "robust-sigma0.50-r0.1"
FILES = (
    *("config.toml", "ledger.jsonl", "metrics.json", "model.safetensors", "training.tsv"),
    *(f"{name}.{ending}" for name in (PLAIN, "certificates-sigma0.50-simultaneous20") for ending in ("tsv", "json")),
    *(f"{name}.{ending}" for name in ("samples", "attacks", ROBUST) for ending in ("tsv", "json")),
)
IGNORED = {
    "report": {f"{ROBUST}.tsv", f"{ROBUST}.json"},  # a page shows no figure of them
    "attack": {"training.tsv", "samples.tsv", "samples.json", f"{ROBUST}.tsv", f"{ROBUST}.json"},
    "analyze": {"training.tsv", "attacks.tsv", "attacks.json", f"{ROBUST}.tsv", f"{ROBUST}.json"},
    "verify": set(),
    "export": set(),
}


@pytest.fixture(scope="module")
def whole(finished, tmp_path_factory):
    """A run with rows of every kind."""
    run = shutil.copytree(finished, tmp_path_factory.mktemp("whole") / "run")
    assert call("attack", run, "--attack", "pgd-l2", "--examples", 20, "--strengths", "0.1", "--steps", 2, "--starts", 1) == 0
    assert call("analyze", run) == 0
    return run


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def commands(run):
    attack = ("--attack", "pgd-l2", "--examples", 20, "--strengths", "0.1", "--steps", 2, "--starts", 1)
    return {
        "report": ("report", run),
        "attack": ("attack", run, *attack),
        "analyze": ("analyze", run),
        "verify": ("verify", run),
        "export": ("export", run, run.parent / "bundle.zip"),
    }


def damages(data, name):
    """A flipped bit in the middle, another digit, a cut inside a line (rows that no figure counts may be interrupted)."""
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    found = {"flip": bytes(changed)}
    digits = [place for place, byte in enumerate(data) if ord("0") <= byte <= ord("8")]
    changed = bytearray(data)
    changed[digits[len(digits) // 3]] += 1
    found["digit"] = bytes(changed)
    if name not in ("samples.tsv", "attacks.tsv", f"{ROBUST}.tsv"):
        found["cut"] = data[: len(data) - 9]
    return found


def snapshot(run):
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def unnoticed(command, run, capsys):
    """Damage that `command` did not refuse in one line, or refused only after it changed something."""
    found, tried = [], 0
    for name in FILES:
        data = (run / name).read_bytes()
        for kind, damaged in damages(data, name).items():
            if name in IGNORED[command] or damaged == data:
                continue
            (run / name).write_bytes(damaged)
            before, tried = snapshot(run), tried + 1
            code = call(*commands(run)[command])
            err = capsys.readouterr().err
            if code != 2 or not err.startswith("error: ") or len(err.splitlines()) != 1 or snapshot(run) != before:
                found.append((name, kind, err))
                shutil.rmtree(run.parent / "bundle.zip", ignore_errors=True)
        (run / name).write_bytes(data)
    return found, tried


@pytest.mark.parametrize("command", IGNORED)
def test_a_command_checks_every_file_it_reads_figures_from(command, run, capsys, evidence):
    assert call(*commands(run)[command]) == 0  # unharmed, it is read
    (run.parent / "bundle.zip").unlink(missing_ok=True)
    capsys.readouterr()
    found, tried = unnoticed(command, run, capsys)
    assert found == [] and tried >= 20 and not (run.parent / "bundle.zip").exists()
    evidence(
        "R3", figure=f"{command}: {tried} of {tried} damaged public files refused", trials=tried, twin="no checksums: caught"
    )


def test_twin_without_checksums_is_caught(run, capsys, monkeypatch):
    def careless(data, origin, **options):
        try:
            return {key: value for key, value in json.loads(data).items() if key != "check"}
        except ValueError as error:
            raise RunError(origin) from error

    monkeypatch.setattr(opened, "parse_checked_json", careless)
    found, _ = unnoticed("report", run, capsys)
    assert {name for name, _, _ in found} >= {"samples.json", "attacks.json"}


def test_reproduce_refuses_a_damaged_ledger_as_well(tmp_path, capsys):
    from dpcert.paper.grid import Cell
    from tests.grid_fakes import fake_run

    cell = Cell("mnist", "dp-gaussian")
    folder = fake_run(tmp_path, cell, {0.5: np.full(100, 0.5)})
    show = ("reproduce", "figure-radii", "--show", "--results", tmp_path)
    assert call(*show) == 0
    text = (folder / "ledger.jsonl").read_text()
    (folder / "ledger.jsonl").write_text(text.replace('"noise_multiplier":1.0', '"noise_multiplier":2.0', 1))
    capsys.readouterr()
    assert call(*show) == 2 and "ledger.jsonl" in capsys.readouterr().err


def test_no_epsilon_is_shown_without_its_ledger(run, capsys):
    (run / "ledger.jsonl").unlink()
    assert call("report", run) == 2
    shown = capsys.readouterr()
    assert "ledger.jsonl" in shown.err and "epsilon" not in shown.out


@pytest.mark.parametrize("change", [{"epsilon": 0.5}, {"delta": 1e-9}, {"steps": 1}, {"noise_multiplier": 9.0}])
def test_a_report_shows_no_other_promise_than_ledger_and_model_hold(change, run, capsys):
    """Edited with a checksum that fits."""
    edit_json(run / "metrics.json", lambda metrics: metrics["privacy"].update(change))
    for command in ("report", "attack", "analyze"):
        assert call(*commands(run)[command]) == 2
        assert "states a different" in capsys.readouterr().err


# ------------------------------------------------------------------ samples and attacks, edited with checksums that fit


def edit(run, name, kind, change):
    rows = [change(row) for row in read_rows(kind, run / name)]
    (run / name).write_text("\n".join([header(kind), *map(text_of, rows)]) + "\n")


FORGERIES = {
    "a larger radius": ("samples.tsv", lambda run: edit(run, "samples.tsv", SampleRow, lambda r: SampleRow(**{**vars(r), "radius": r.radius + 1}))),
    "another answer": ("samples.tsv", lambda run: edit(run, "samples.tsv", SampleRow, lambda r: SampleRow(**{**vars(r), "correct": 1 - r.correct}))),
    "an image without certificate": ("samples.tsv", lambda run: edit(run, "samples.tsv", SampleRow, lambda r: SampleRow(**{**vars(r), "idx": r.idx + 1}))),
    "of another model": ("samples.tsv", lambda run: edit_json(run / "samples.json", lambda f: f.update(model_sha256="0" * 64))),
    "of other certificates": ("samples.tsv", lambda run: edit_json(run / "samples.json", lambda f: f.update(certificates_sha256="0" * 64))),
    "a larger accuracy": ("attacks.tsv", lambda run: edit(run, "attacks.tsv", AttackRow, lambda r: AttackRow(**{**vars(r), "accuracy": 0.123}))),
    "a narrower interval": ("attacks.tsv", lambda run: edit(run, "attacks.tsv", AttackRow, lambda r: AttackRow(**{**vars(r), "low": r.accuracy}))),
    "attacks on another model": ("attacks.tsv", lambda run: edit_json(run / "attacks.json", lambda f: f.update(model_sha256="0" * 64))),
    "no file beside them": ("attacks.tsv", lambda run: (run / "attacks.json").unlink()),
    "half a row": ("samples.tsv", lambda run: (run / "samples.tsv").write_bytes((run / "samples.tsv").read_bytes()[:-5])),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_edited_samples_and_attacks_do_not_verify(forgery, run):
    name, forge = FORGERIES[forgery]
    forge(run)
    assert [check.name for check in verify(read_public_files(run)) if check.outcome == FAILED] == [name]


def test_what_proves_nothing_is_named_as_not_checked(run, capsys):
    (run / "notes.txt").write_text("epsilon = 0.1")
    assert call("verify", run) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "notes.txt" in line]
    assert line.startswith("not checked") and "report.html" in line and "figures/" in line and "private" not in line


# ------------------------------------------------------------------ what export includes has passed the checks of verify


@pytest.mark.parametrize("name", [f"{ROBUST}.json", f"{ROBUST}.tsv", f"{PLAIN}.json", "training.tsv", "samples.json"])
def test_an_edited_file_is_not_exported_with_a_new_checksum(name, run, tmp_path, capsys):
    """`verify` failed on the folder and passed on the bundle."""
    text = (run / name).read_text()
    (run / name).write_text(text.replace("0.5", "0.7", 1) if "0.5" in text else text.replace("1", "2", 1))
    assert (run / name).read_text() != text
    assert call("verify", run) == 2 and call("export", run, tmp_path / "b.zip") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and "does not verify" in err and not (tmp_path / "b.zip").exists()


def test_only_files_whose_check_is_ok_are_in_a_bundle(run, tmp_path, capsys):
    """An unfinished sweep and a file of no known name are left out and named; so is all that verify did not check."""
    (run / "robust-sigma0.50-r0.2.tsv").write_text("idx\tlabel\tpre")
    (run / "robust-sigma0.50-r0.3.json").write_text("{}")
    (run / "robust-notes.txt").write_text("mine")
    assert call("export", run, tmp_path / "b.zip") == 0
    out = capsys.readouterr().out
    content = read_public_files(tmp_path / "b.zip").content
    for name in ("robust-sigma0.50-r0.2.tsv", "robust-sigma0.50-r0.3.json", "robust-notes.txt", "samples.tsv", "attacks.json"):
        assert f"left out: {name}" in out and name not in content
    assert call("verify", tmp_path / "b.zip") == 0
