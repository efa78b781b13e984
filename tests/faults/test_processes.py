"""R1, R5 and D9 with real processes and real signals. No assertion depends on when a signal arrives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dpcert.errors import DpcertError, RunError
from dpcert.privacy.ledger import Ledger
from dpcert.runs import training as runs
from dpcert.store.records import CertificateRow, read_rows
from dpcert.store.runs import RunDirectory
from dpcert.training import loop, state, step
from tests.faults import scene, victim
from tests.faults.conftest import Stage

KILLS_A_RUN = 3
LONGEST = 120.0  # seconds after which a process that should have ended is a failure


@dataclass
class Kills:
    kills: int = 0
    runs: int = 0
    furthest_ahead: int = 0


def start(target, *arguments):
    context = victim.processes()
    ready = context.Event()
    process = context.Process(target=target, args=(*arguments, ready), daemon=True)
    process.start()
    assert ready.wait(LONGEST)
    return process


def finish(process) -> int:
    process.join(LONGEST)
    assert process.exitcode is not None
    return process.exitcode


def kill_at_random(stage: Stage, wanted: int, seed: int) -> Kills:
    """Kill runs at random moments, each up to three times, and let it come through: it must end with the same bytes."""
    seen, generator = Kills(), np.random.default_rng(seed)
    out, counter = stage.folder / "victim", stage.folder / "steps"
    usual = 0.0  # how long the last whole run took: it only decides where the kills fall
    while seen.kills < wanted:
        assert seen.runs <= 20 * wanted
        shutil.rmtree(out, ignore_errors=True)
        counter.write_bytes(bytes(8))
        for moment in generator.uniform(0.0, usual, KILLS_A_RUN):
            process = start(victim.whole_run, stage.data, out, counter)
            process.join(moment)
            process.kill()
            code = finish(process)
            assert code in (0, -signal.SIGKILL)
            seen.kills += code == -signal.SIGKILL
            seen.furthest_ahead = max(seen.furthest_ahead, steps_ahead(out, counter))
        process, began = start(victim.whole_run, stage.data, out, counter), time.monotonic()
        assert finish(process) == 0
        usual = max(usual, time.monotonic() - began)
        assert scene.results(out) == stage.certified
        seen.runs += 1
    return seen


def steps_ahead(out: Path, counter: Path) -> int:
    """Steps charged beyond those begun: D9 wants 0 to one block."""
    true_steps = int.from_bytes(counter.read_bytes(), "little")
    ledger = out / "ledger.jsonl"
    ahead = (Ledger.load(ledger).steps_authorised if ledger.exists() else 0) - true_steps
    assert 0 <= ahead <= scene.STEPS_PER_BLOCK
    return ahead


def tell(seen: Kills, evidence) -> None:
    figure = f"0 of {seen.runs} runs differ after {seen.kills} kills -9 of real processes at random moments"
    evidence("R1", figure=figure, trials=seen.kills, twin="a store without rename, one without fsync: caught")
    figure = f"{seen.kills} kills -9: the ledger 0 to {seen.furthest_ahead} steps ahead (a block: {scene.STEPS_PER_BLOCK}), never behind"
    evidence("D9", figure=figure, trials=seen.kills, twin="a ledger written after the step: caught")


@pytest.mark.timeout(1800)
def test_killed_at_random_moments_a_run_ends_with_the_same_bytes(stage, evidence):
    tell(kill_at_random(stage, 8, seed=0), evidence)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_200_random_moments(stage, evidence):
    """At least 200 kills -9 in train and certify. About five minutes on two idle cores; false alarms: none possible."""
    seen = kill_at_random(stage, 200, seed=1)
    assert seen.kills >= 200
    tell(seen, evidence)


def second_start_and_restart(stage: Stage, name: str, lock: str = "ours") -> tuple[bool, bool]:
    """Whether a second start is refused while the first lives, and whether one works after kill -9 of it."""
    out = stage.begin(name, f"held-{name}-{lock}")
    context = victim.processes()
    ready = context.Event()
    process = context.Process(target=victim.held, args=(name, stage.data, out, ready, lock), daemon=True)
    process.start()
    assert ready.wait(LONGEST)
    refused = False
    try:
        stage.work(name)(stage.data, out)
    except RunError as error:
        refused = "in use by another process" in str(error)
    process.kill()
    assert finish(process) == -signal.SIGKILL
    try:
        stage.work(name)(stage.data, out)
        return refused, scene.results(out) == stage.expected(name)
    except DpcertError:
        return refused, False


@pytest.mark.parametrize("name", ["train", "certify"])
def test_a_second_process_is_refused_and_the_lock_dies_with_the_first(stage, name, evidence):
    assert second_start_and_restart(stage, name) == (True, True)
    twin = "no lock, and a lock file that outlives its process: caught"
    evidence("R5", figure=f"{name}: a second start is refused; after kill -9 a start works", trials=1, twin=twin)


@pytest.mark.parametrize("lock", ["file", "none"])
def test_twin_a_wrong_lock_is_caught(stage, monkeypatch, lock):
    wrong = {"file": victim.locked_by_a_file, "none": victim.not_locked}[lock]
    monkeypatch.setattr(RunDirectory, "locked", wrong)
    assert second_start_and_restart(stage, "train", lock) != (True, True)


def command(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "dpcert", *words], env=environment, stdout=-3, stderr=-1, text=True)


def terminated(process: subprocess.Popen[str], under_way) -> tuple[float, int, str]:
    """Send SIGTERM once the work is under way: seconds until the end, exit code, what was said."""
    deadline = time.monotonic() + LONGEST
    while not under_way():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    process.terminate()
    _, said = process.communicate(timeout=LONGEST)
    return time.monotonic() - began, process.returncode, said


def test_sigterm_ends_training_with_its_state_saved(stage, evidence):
    out = stage.folder / "terminated"
    endless = scene.assignments(stage.data, train__epochs=20_000.0)  # 80,000 steps
    chosen = [word for name, value in endless.items() for word in ("--set", f"{name}={value}")]
    process = command("train", "mnist/dp-gaussian", *chosen, "--out", str(out))
    seconds, code, said = terminated(process, lambda: (out / "ledger.jsonl").exists())
    assert code == 130 and "resume with: " in said.splitlines()[-1]
    saved = state._read_state(out / "private" / "state.json")
    assert 0 <= saved["step"] <= Ledger.load(out / "ledger.jsonl").steps_authorised
    state.load_tensors(out / "private" / saved["checkpoint"], saved["sha256"])
    evidence("R5", figure=f"SIGTERM in training: exit 130, state saved, {seconds:.1f} s (5 allowed)", trials=1)


def test_sigterm_ends_certification_with_its_rows_saved(stage, evidence):
    out = stage.begin("certify", "terminated")
    process = command("certify", str(out), "--n", "1000000", "--examples", "all", "--fresh-noise", "--seed", "1")
    path = out / "certificates-sigma0.50-fresh.tsv"
    seconds, code, said = terminated(process, lambda: path.exists() and path.read_text().count("\n") >= 2)
    assert code == 130 and "resume with: " in said.splitlines()[-1]
    assert 1 <= len(read_rows(CertificateRow, path, allow_torn_end=True)) <= scene.ALL_EXAMPLES
    evidence("R5", figure=f"SIGTERM in certification: exit 130, rows saved, {seconds:.1f} s (5 allowed)", trials=1)


def parts_after_the_signal(stage: Stage, monkeypatch, out: Path) -> int:
    """Send SIGTERM in the first part of step 4; how many more parts of batches are worked on?"""
    real, parts = step._clipped_sum_of, []

    def counted(problem, engine, indices, part, number):
        parts.append(number)
        if number == 4 and parts.count(4) == 1:
            signal.raise_signal(signal.SIGTERM)
        return real(problem, engine, indices, part, number)

    with monkeypatch.context() as patch:
        patch.setattr(step, "_clipped_sum_of", counted)
        config = scene.config(stage.data, train__physical_batch=1)  # an example at a time: several parts a step
        with pytest.raises(loop.Interrupted):
            runs.train(config, out)
    return parts.count(4) - 1


def test_a_long_step_is_given_up_between_its_parts(stage, monkeypatch, evidence):
    """R5 must not depend on how long a step takes: it ends after the part at hand, and is taken again when resumed."""
    out = stage.folder / "given-up"
    assert parts_after_the_signal(stage, monkeypatch, out) == 0
    assert json.loads((out / "private" / "state.json").read_text())["step"] == 4
    config = scene.config(stage.data, train__physical_batch=1)
    runs.train(config, out)
    runs.train(config, stage.folder / "whole")
    assert scene.results(out) == scene.results(stage.folder / "whole")
    evidence(
        "R5",
        figure="a stop waits for 0 further parts of the step at hand",
        trials=1,
        twin="a step that looks at its end: caught",
    )


def test_twin_a_step_that_cannot_be_given_up_is_caught(stage, monkeypatch):
    monkeypatch.setattr(loop, "replace", lambda problem, **changes: problem)
    assert parts_after_the_signal(stage, monkeypatch, stage.folder / "deaf") > 0
