"""The runner, with children that are tiny shell scripts: real processes, really failing and really killed."""

import fcntl
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from dpcert.errors import DpcertError
from dpcert.paper import runner as module
from dpcert.paper.estimate import Estimator
from dpcert.paper.grid import Cell, Need
from dpcert.paper.pieces import Piece, missing
from dpcert.paper.runner import Runner
from dpcert.scale.executors import LocalProcesses
from dpcert.scale.tasks import Resources
from tests.grid_fakes import fake_run, radius_of

CELLS = [Cell("mnist", "dpsgd"), Cell("mnist", "dp-gaussian"), Cell("mnist", "psac")]
NEEDS = [Need(cell, (0.5,)) for cell in CELLS]
# Called as `python -m dpcert train ... --out RUN` or `... certify RUN ...`: puts there what is in stock.
SCRIPT = """#!/bin/sh
shift 2
kind=$1
if [ $kind = train ]; then for word; do run=$word; done; else run=$2; fi
name=$(basename "$run")
echo "$kind $name" >> "{stock}/calls"
tell() {{ echo "{{\\"error\\": \\"$1\\", \\"reason\\": \\"$2\\"}}" > "$DPCERT_OUTCOME_FILE"; }}
trap 'echo saved >> "{stock}/saved"; exit 130' TERM
if [ -e "{stock}/slow-$name" ]; then for k in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3; done; fi
if [ -e "{stock}/taken-$name" ]; then rm "{stock}/taken-$name"; tell BusyError "someone works here"; exit 2; fi
if [ -e "{stock}/fail-$name" ]; then tell RunError "the disk is on fire"; exit 2; fi
if [ -e "{stock}/print-$name" ]; then echo "error: $run is in use by another process; wait"; exit 2; fi
if [ -e "{stock}/die-$name" ]; then kill -9 $$; fi
if [ -e "{stock}/idle-$name" ]; then exit 0; fi
mkdir -p "$run"
cp -r "{stock}/$kind/$name/." "$run/"
"""


@pytest.fixture
def stock(tmp_path, monkeypatch):
    folder = tmp_path / "stock"
    for cell in CELLS:
        fake_run(folder / "train", cell, {})
        fake_run(folder / "certify", cell, {0.5: radius_of(1, 0.5)})
    script = tmp_path / "python"
    script.write_text(SCRIPT.format(stock=folder))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return folder


def runner(results: Path, jobs: int = 1, tell=None) -> tuple[Runner, list[str]]:
    told: list[str] = []

    def listen(text, *, passing=False):
        if not passing:
            told.append(text)
        if tell is not None:
            tell(text, passing)

    return Runner(results, 100, LocalProcesses(jobs), Resources(), Estimator(results, CELLS), listen), told


def calls(stock: Path) -> list[str]:
    return (stock / "calls").read_text().splitlines() if (stock / "calls").exists() else []


def test_does_what_is_missing_and_nothing_twice(stock, tmp_path):
    results = tmp_path / "results"
    fake_run(results, CELLS[0], {0.5: radius_of(1, 0.5)})
    fake_run(results, CELLS[1], {})
    run, told = runner(results)
    assert run.run(NEEDS) == []
    assert calls(stock) == ["certify mnist-dp-gaussian", "train mnist-psac", "certify mnist-psac"]
    assert missing(NEEDS, results, 100) == []
    assert [text.split(":")[0] for text in told] == ["started", "done"] * 3
    log = (results / "logs" / "mnist-psac.log").read_text()
    assert "$ dpcert train mnist/psac --sigma 0.5 --seed 0 --out" in log and "$ dpcert certify" in log
    again, told = runner(results)
    assert again.run(NEEDS) == [] and told == [] and len(calls(stock)) == 3


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fail", "the disk is on fire"),
        ("die", "killed by SIGKILL"),
        ("idle", "it ended without doing its work"),
        ("print", "exit code 2"),  # what a child prints is for people: nothing is concluded from it
    ],
)
def test_one_that_fails_is_told_and_the_rest_goes_on_and_the_next_time_it_is_done(stock, tmp_path, how, reason):
    (stock / f"{how}-mnist-dpsgd").write_text("")
    results = tmp_path / "results"
    run, told = runner(results, jobs=2)
    failures = run.run(NEEDS)
    assert [(str(one.piece), one.reason) for one in failures] == [("train mnist-dpsgd", reason)]
    assert any(text.startswith("FAILED: train mnist-dpsgd") for text in told)
    assert [pieces[0].cell for pieces in missing(NEEDS, results, 100)] == [CELLS[0]]
    (stock / f"{how}-mnist-dpsgd").unlink()
    assert runner(results)[0].run(NEEDS) == [] and missing(NEEDS, results, 100) == []


def test_the_rest_of_a_piece_does_not_make_the_others_look_short(stock, tmp_path):
    results = tmp_path / "results"
    fake_run(results, CELLS[0], {}, seconds=1000.0)
    (results / CELLS[1].name).mkdir()
    (results / CELLS[1].name / "ledger.jsonl").write_text("begun by a session before\n")
    run, _ = runner(results)
    left = Piece("train", CELLS[2], 100)
    before = run._estimator.seconds(left)
    assert run.run([Need(CELLS[1])]) == [] and run._estimator.seconds(left) == before
    assert run.run([Need(CELLS[2])]) == [] and run._estimator.seconds(left) < before  # a whole one, which took no time


def test_jobs_run_side_by_side(stock, tmp_path):
    for cell in CELLS[:2]:
        (stock / f"slow-{cell.name}").write_text("")
    run, told = runner(tmp_path / "results", jobs=2)
    assert run.run([Need(cell) for cell in CELLS[:2]]) == []
    assert [text.split(":")[0] for text in told] == ["started", "started", "done", "done"]


def test_one_job_is_one_at_a_time(stock, tmp_path):
    run, told = runner(tmp_path / "results", jobs=1)
    run.run([Need(cell) for cell in CELLS[:2]])
    assert [text.split(":")[0] for text in told] == ["started", "done", "started", "done"]


def test_an_interrupt_lets_the_children_save(stock, tmp_path):
    (stock / "slow-mnist-dpsgd").write_text("")
    due = time.monotonic() + 1.0

    def interrupt(text, passing):
        if passing and time.monotonic() > due:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner(tmp_path / "results", tell=interrupt)[0].run(NEEDS[:1])
    assert (stock / "saved").read_text() == "saved\n"


def test_a_directory_in_use_is_waited_for(stock, tmp_path):
    results = tmp_path / "results"
    folder = fake_run(results, CELLS[0], {})
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    threading.Timer(1.0, os.close, (descriptor,)).start()
    began = time.monotonic()
    assert runner(results)[0].run(NEEDS[:1]) == []
    assert time.monotonic() - began > 0.9 and calls(stock) == ["certify mnist-dpsgd"]


def test_a_child_that_came_second_tries_again(stock, tmp_path):
    """Two sessions look at the lock at the same moment: who loses waits, it has not failed."""
    (stock / "taken-mnist-dpsgd").write_text("")
    run, told = runner(tmp_path / "results")
    assert run.run(NEEDS[:1]) == [] and not any("FAILED" in text for text in told)
    assert calls(stock) == ["train mnist-dpsgd", "train mnist-dpsgd", "certify mnist-dpsgd"]


def test_the_order_is_kept_and_a_later_part_of_a_cell_waits_for_the_earlier(stock, tmp_path):
    first, second = CELLS[:2]
    parts = [Need(first), Need(second, (0.5,)), Need(first, (0.5,))]
    assert runner(tmp_path / "results")[0].run(parts) == []
    assert calls(stock) == ["train mnist-dpsgd", "train mnist-dp-gaussian", "certify mnist-dp-gaussian", "certify mnist-dpsgd"]
    (stock / "calls").unlink()
    assert runner(tmp_path / "two", jobs=2)[0].run([Need(first), Need(first, (0.5,))]) == []
    assert calls(stock) == ["train mnist-dpsgd", "certify mnist-dpsgd"]


def test_what_failed_is_not_tried_again_by_a_later_part(stock, tmp_path):
    (stock / "fail-mnist-dpsgd").write_text("")
    failures = runner(tmp_path / "results")[0].run([Need(CELLS[0]), NEEDS[1], NEEDS[0]])
    assert len(failures) == 1 and calls(stock).count("train mnist-dpsgd") == 1


def test_rows_that_cannot_be_moved_get_one_line(stock, tmp_path, monkeypatch):
    results = tmp_path / "results"
    fake_run(results, CELLS[0], {}, weights=False)
    monkeypatch.setattr(module, "holds_rows_only", lambda directory: True)
    results.joinpath("logs").write_text("in the way")
    with pytest.raises(DpcertError, match="cannot move .*mnist-dpsgd to .*: File exists; move or delete it yourself"):
        runner(results)[0].run(NEEDS[:1])


def test_complete_rows_without_weights_are_left_alone(stock, tmp_path):
    results = tmp_path / "results"
    fake_run(results, CELLS[0], {0.5: radius_of(1, 0.5)}, weights=False)
    run, told = runner(results)
    assert run.run(NEEDS[:1]) == [] and told == [] and calls(stock) == []


def test_rows_without_weights_are_moved_and_trained_anew(stock, tmp_path, monkeypatch):
    results = tmp_path / "results"
    fake_run(results, CELLS[0], {0.5: radius_of(1, 0.5, 50)}, weights=False)
    monkeypatch.setattr(module, "holds_rows_only", lambda directory: not directory.model.exists() and directory.path.exists())
    run, told = runner(results)
    assert run.run(NEEDS[:1]) == []
    assert (results / "logs" / "mnist-dpsgd-without-weights" / "certificates-sigma0.50.tsv").exists()
    assert any("has rows without weights" in text for text in told) and missing(NEEDS[:1], results, 100) == []


def test_rows_only_is_told_from_half_finished():
    from dpcert.paper.pieces import holds_rows_only
    from dpcert.store.runs import RunDirectory

    results = Path(__file__).parents[2] / "results"
    assert not holds_rows_only(RunDirectory(results / "mnist-dpsgd"))
    assert not holds_rows_only(RunDirectory(results / "no-such-run"))


def test_a_closed_ledger_without_weights_is_rows_only(tmp_path):
    import shutil

    from dpcert.paper.pieces import holds_rows_only
    from dpcert.store.runs import RunDirectory

    folder = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "stored_runs" / "mnist-dpsgd", folder)
    (folder / "model.safetensors").unlink()
    assert holds_rows_only(RunDirectory(folder))


@pytest.mark.parametrize("jobs", [0, -1])
def test_at_least_one_job(tmp_path, jobs):
    with pytest.raises(DpcertError, match=f"--jobs is {jobs}, must be a whole number"):
        runner(tmp_path, jobs)


@pytest.mark.slow
def test_real_children_killed_and_gone_on_with(tmp_path):
    """Certification of a real model by a real child: killed in the middle, then finished by the same call."""
    import shutil

    cell = Cell("mnist", "dpsgd")
    shutil.copytree(Path(__file__).parents[1] / "stored_runs" / cell.name, tmp_path / cell.name)
    need = Need(cell, (0.25,))
    rows = tmp_path / cell.name / "certificates-sigma0.25.tsv"
    killed: list[int] = []
    runners: list[Runner] = []

    def kill(text, passing):
        if not killed and rows.exists() and len(rows.read_text().splitlines()) > 3:
            child = runners[0]._running[0].pending.child.process
            killed.append(child.pid)
            child.kill()

    def session(tell=None):
        estimator = Estimator(tmp_path, [cell])
        listen = lambda text, *, passing=False: tell and tell(text, passing)  # noqa: E731
        runners.append(Runner(tmp_path, 40, LocalProcesses(1), Resources(), estimator, listen))
        return runners[-1].run([need])

    first = session(kill)
    if killed:  # a quick machine may have finished before
        assert [one.reason for one in first] == ["killed by SIGKILL"]
        before = rows.read_text().splitlines()[1:4]
    assert session() == [] and missing([need], tmp_path, 40) == []
    assert len(rows.read_text().splitlines()) == 41
    if killed:
        assert set(before) <= set(rows.read_text().splitlines())
