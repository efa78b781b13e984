"""Tasks and outcomes: what a failed process says about itself travels as data, never as printed words."""

import json
import subprocess
import sys

import pytest

from dpcert.cli import main
from dpcert.errors import BusyError, RunError
from dpcert.scale import child as children
from dpcert.scale.tasks import OUTCOME_FILE, Outcome, OutcomeFile, Resources, Task, read_record
from dpcert.store.runs import RunDirectory


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        (Outcome(0), None),
        (Outcome(0, "RunError", "left over"), None),
        (Outcome(2, "RunError", "no space"), "no space"),
        (Outcome(2), "exit code 2"),
        (Outcome(130), "interrupted"),
        (Outcome(-9), "killed by SIGKILL"),
        (Outcome(-63), "killed by signal 63"),
    ],
)
def test_why_a_task_failed(outcome, failure):
    assert outcome.failure == failure


def test_a_task_survives_json(tmp_path):
    task = Task("train a", ("train", "ä b"), tmp_path / "log", Resources(3, 1))
    assert Task.from_json(json.loads(json.dumps(task.as_json()))) == task
    assert str(Resources(1)) == "1 CPU" and str(Resources(2, 1)) == "2 CPUs and 1 GPU"


def _recorded(monkeypatch, path, *words):
    path.write_text("")
    monkeypatch.setenv(OUTCOME_FILE, str(path))
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return stop.value.code, read_record(path)


@pytest.mark.parametrize(
    ("words", "error", "reason"),
    [
        (["report", "no-such-run"], "RunError", "no-such-run is not a run directory"),
        (["train", "no/such"], "ConfigError", "no/such"),
        (["train", "--sigma", "much"], "BadParameter", "Invalid value for"),
    ],
)
def test_the_command_line_records_its_error(monkeypatch, tmp_path, capsys, words, error, reason):
    code, record = _recorded(monkeypatch, tmp_path / "record", *words)
    assert code == 2 and record[0] == error and reason in record[1]
    assert capsys.readouterr().err.strip() == f"error: {record[1]}"


def test_success_records_nothing_and_grandchildren_do_not_inherit_the_file(monkeypatch, tmp_path):
    assert _recorded(monkeypatch, tmp_path / "record", "--version") == (0, (None, None))
    environment = {OUTCOME_FILE: "somewhere", "HOME": "/"}
    OutcomeFile.claim(environment)
    assert environment == {"HOME": "/"}


def test_a_bug_is_recorded_and_keeps_its_traceback(monkeypatch, tmp_path):
    from dpcert.cli import app

    monkeypatch.setattr(app, "app", lambda arguments, standalone_mode: 1 / 0)
    (tmp_path / "record").write_text("")
    monkeypatch.setenv(OUTCOME_FILE, str(tmp_path / "record"))
    with pytest.raises(ZeroDivisionError):
        main(["methods"])
    assert read_record(tmp_path / "record") == ("ZeroDivisionError", "ZeroDivisionError: division by zero")


def test_a_directory_in_use_has_its_own_error(tmp_path):
    directory = RunDirectory(tmp_path)
    with directory.locked(), pytest.raises(BusyError) as busy, directory.locked():
        pass
    assert isinstance(busy.value, RunError)


def test_only_a_file_that_the_parent_created_is_written(tmp_path):
    """A variable that is left over, or a link in place of the file, harms nothing."""
    OutcomeFile(str(tmp_path / "missing")).record("RunError", "text")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    OutcomeFile(str(tmp_path / "link")).record("RunError", "text")
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"error": 1, "reason": "x"}', '{"error": "E"}', '{"error": "a b", "reason": "x"}'),
        *("[" * 10**5, "\0" * 99, '{"error": "E", "reason": NaN}', '{"error": "E", "reason": "' + "x" * 10**6 + '"}'),
    ],
)
def test_a_damaged_record_says_nothing(tmp_path, text):
    (tmp_path / "record").write_text(text)
    assert read_record(tmp_path / "record") == (None, None)


def test_a_record_is_one_line_of_bounded_length(tmp_path):
    (tmp_path / "record").write_text("")
    OutcomeFile(str(tmp_path / "record")).record("RunError", "two\nlines " + "x" * 10**6)
    error, reason = read_record(tmp_path / "record")
    assert error == "RunError" and reason.startswith("two lines x") and len(reason) <= 2000


WATCHED = """
import os, sys, time
from dpcert.scale.child import PARENT, die_with_parent
if os.fork() == 0:
    os.environ[PARENT] = sys.argv[1] if len(sys.argv) > 1 else str(os.getppid())
    die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(0.5)
os._exit(0)
"""


@pytest.mark.parametrize("arguments", [[], ["1" * 9]])  # the parent dies; it was dead before the child looked
def test_a_child_of_a_dead_worker_ends(arguments):
    """The pipe closes when the grandchild, which would sleep for a minute, is dead."""
    done = subprocess.run([sys.executable, "-c", WATCHED, *arguments], capture_output=True, timeout=30, check=True)
    assert done.stdout.strip().isdigit() or arguments


def test_without_the_variable_nobody_is_watched():
    environment: dict[str, str] = {}
    before = {thread.name for thread in __import__("threading").enumerate()}
    children.die_with_parent(environment)
    environment = {children.PARENT: "soon"}
    children.die_with_parent(environment)
    assert environment == {} and {thread.name for thread in __import__("threading").enumerate()} == before
