"""R1 and D9 in one process: a crash at every write, fsync, rename and removal of train and certify."""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from dpcert.errors import DpcertError
from dpcert.privacy import ledger as ledger_module
from dpcert.privacy.ledger import Ledger
from dpcert.training import loop
from tests.faults import scene
from tests.faults.conftest import Stage
from tests.faults.injector import KILLS, Disk, Fault, Killed, WithoutFsync, WithoutRename, every_fault, failing


@dataclass
class Outcome:
    crashes: int = 0
    differing: list[Fault] = field(default_factory=list)
    undercharged: list[Fault] = field(default_factory=list)
    overcharged: list[Fault] = field(default_factory=list)


@pytest.fixture
def steps_begun(monkeypatch):
    """How many steps have begun, in all starts of a run: a list that each run empties."""
    begun, real = set(), loop.private_step

    def counted(problem, step):
        begun.add(step)
        return real(problem, step)

    monkeypatch.setattr(loop, "private_step", counted)
    return begun


def undisturbed(stage: Stage, name: str, disk_type: type[Disk] = Disk) -> Counter[str]:
    out = stage.begin(name, "undisturbed")
    with failing(disk_type=disk_type) as disk:
        stage.work(name)(stage.data, out)
    assert scene.results(out) == stage.expected(name)
    return disk.calls


def crash_everywhere(stage: Stage, name: str, steps_begun: set[int], disk_type: type[Disk] = Disk) -> Outcome:
    """Crash, look at the ledger, resume, compare; for a broken store until the first difference."""
    outcome = Outcome()
    for fault in every_fault(undisturbed(stage, name, disk_type), KILLS):
        steps_begun.clear()
        out = stage.begin(name, "crashed")
        with failing(fault, disk_type) as disk, pytest.raises(Killed):
            stage.work(name)(stage.data, out)
        assert disk.fired
        outcome.crashes += 1
        if name == "train":
            _look_at_ledger(out, len(steps_begun), fault, outcome)
        try:
            with failing(disk_type=disk_type):  # undisturbed, and quick: fsync is only noted
                stage.work(name)(stage.data, out)
            same = scene.results(out) == stage.expected(name)
        except DpcertError:
            same = False
        if not same:
            outcome.differing.append(fault)
            if disk_type is not Disk:
                break
    return outcome


def _look_at_ledger(out, true_steps, fault, outcome):
    path = out / "ledger.jsonl"
    try:
        charged = Ledger.load(path).steps_authorised if path.exists() else 0
    except DpcertError:
        charged = 0
    if charged < true_steps:
        outcome.undercharged.append(fault)
    if charged > true_steps + scene.STEPS_PER_BLOCK:
        outcome.overcharged.append(fault)


@pytest.mark.timeout(1800)  # half a minute of one core; only a machine that is busy with other things needs more
@pytest.mark.parametrize("name", ["train", "certify"])
def test_a_crash_anywhere_resumes_to_the_same_bytes(stage, name, steps_begun, evidence):
    found = crash_everywhere(stage, name, steps_begun)
    assert found.differing == [] and found.undercharged == [] and found.overcharged == []
    assert found.crashes >= {"train": 200, "certify": 100}[name]
    twins = "a store without rename, one without fsync: caught"
    where = f"every write, fsync, rename and removal of {name}, power cuts included"
    evidence("R1", figure=f"0 of {found.crashes} resumes differ ({where})", trials=found.crashes, twin=twins)
    if name == "train":
        evidence(
            "D9",
            figure=f"0 of {found.crashes} crashes left a ledger short of the steps taken, 0 more than a block ahead",
            trials=found.crashes,
            twin="a ledger written after the step: caught",
        )


@pytest.mark.parametrize("name", ["train", "certify"])
@pytest.mark.parametrize("disk_type", [WithoutFsync, WithoutRename])
def test_twin_a_careless_store_is_caught(stage, name, steps_begun, disk_type):
    assert crash_everywhere(stage, name, steps_begun, disk_type).differing


def test_twin_a_ledger_behind_the_step_is_caught(stage, steps_begun, monkeypatch):
    """The line of a block reaches the disk only with the next one: after the steps that it charges."""
    real, late = ledger_module.write_atomically, []

    def write_behind(path, data):
        late.append((path, data))
        if len(late) > 1:
            real(*late.pop(0))

    monkeypatch.setattr(ledger_module, "write_atomically", write_behind)
    out = stage.folder / "behind"
    with failing(Fault("replace", 12, "kill after")), pytest.raises(Killed):
        stage.work("train")(stage.data, out)
    outcome = Outcome()
    _look_at_ledger(out, len(steps_begun), Fault("replace", 12, "kill after"), outcome)
    assert outcome.undercharged
