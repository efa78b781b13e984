"""R2: the k-th write, fsync, rename or removal fails; one clear line, the state before is intact, resume works."""

import pytest

from dpcert.errors import DpcertError
from dpcert.store import durable
from tests.faults import scene
from tests.faults.conftest import Stage
from tests.faults.injector import ERRORS, Fault, every_fault, failing
from tests.faults.test_crash import undisturbed

REASONS = {"ENOSPC": "No space left on device", "EIO": "Input/output error", "half, then ENOSPC": "No space left on device"}


def fail_everywhere(stage: Stage, name: str) -> tuple[int, list[Fault]]:
    """How many faults there were, and those after which something was lost."""
    count, lost = 0, []
    for fault in every_fault(undisturbed(stage, name), ERRORS):
        out = stage.begin(name, "failed")
        with failing(fault) as disk:
            try:
                stage.work(name)(stage.data, out)
            except DpcertError as error:
                message = str(error)
                assert REASONS[fault.kind] in message and str(out) in message and "\n" not in message
            else:
                assert fault.operation == "unlink", f"{fault} was not told"  # a temporary file that stays is no loss
        assert disk.fired
        count += 1
        try:
            with failing():
                stage.work(name)(stage.data, out)
            same = scene.results(out) == stage.expected(name)
        except DpcertError:
            same = False
        if not same:
            lost.append(fault)
    return count, lost


@pytest.mark.timeout(1800)  # half a minute of one core; only a machine that is busy with other things needs more
@pytest.mark.parametrize("name", ["train", "certify"])
def test_a_failing_disk_is_told_in_one_line_and_loses_nothing(stage, name, evidence):
    count, lost = fail_everywhere(stage, name)
    assert lost == [] and count >= {"train": 150, "certify": 80}[name]
    kinds = "disk full, I/O error, half a write and then full"
    figure = f"0 of {count} lost state; each one line and exit code 2 ({kinds}, at every call of {name})"
    evidence("R2", figure=figure, trials=count, twin="a store that ignores errors, or writes over the old file: caught")


@pytest.mark.parametrize("name", ["train", "certify"])
def test_a_short_write_is_continued(stage, name):
    """The system may take a part of the bytes and say so: not an error."""
    for fault in every_fault(undisturbed(stage, name), ("short",)):
        out = stage.begin(name, "short")
        with failing(fault) as disk:
            stage.work(name)(stage.data, out)
        assert disk.fired and scene.results(out) == stage.expected(name)


def test_twin_a_store_that_ignores_short_writes_is_caught(stage, monkeypatch):
    monkeypatch.setattr(durable, "_write_whole", lambda descriptor, data: durable.os.write(descriptor, data))
    assert any(not _same_after_short_write(stage, number) for number in range(1, 18))


def _same_after_short_write(stage: Stage, number: int) -> bool:
    out = stage.begin("train", "short")
    with failing(Fault("write", number, "short")):
        try:
            stage.work("train")(stage.data, out)
            return scene.results(out) == stage.expected("train")
        except DpcertError:
            return False


def test_twin_a_store_that_ignores_errors_is_caught(stage, monkeypatch):
    def careless(descriptor, data):
        try:
            durable.os.write(descriptor, data)
        except OSError:
            pass

    monkeypatch.setattr(durable, "_write_whole", careless)
    with pytest.raises((AssertionError, ValueError)):
        fail_everywhere(stage, "train")


def test_the_command_line_says_it_in_one_line(stage, capsys):
    """Exit code 2, one line on stderr, no traceback."""
    from dpcert.cli import main

    out = stage.folder / "cli"
    chosen = [word for name, value in scene.assignments(stage.data).items() for word in ("--set", f"{name}={value}")]
    with failing(Fault("write", 6, "ENOSPC")), pytest.raises(SystemExit) as stopped:
        main(["train", "mnist/dp-gaussian", *chosen, "--out", str(out)])
    lines = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and len(lines) == 1
    assert lines[0].startswith("error: cannot write") and "No space left on device; free space" in lines[0]
