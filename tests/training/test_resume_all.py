"""Killed at several steps and resumed: the same bytes, for each optimizer, schedule and average."""

import itertools
import signal

import pytest

from dpcert.interrupts import Interrupted
from dpcert.training.averaging import AVERAGES, Average
from dpcert.training.optimizers import OPTIMIZERS
from dpcert.training.schedules import SCHEDULES
from tests.training.knobs import STEPS, files, small_blocks, train

__all__ = ["small_blocks"]
# Nine of them always, in which every pair of names occurs; the other combinations with the slow tests.
ALL = [
    pytest.param(*names, id="-".join(names), marks=() if sum(places) % 3 == 0 else pytest.mark.slow)
    for names, places in zip(
        itertools.product(OPTIMIZERS, SCHEDULES, AVERAGES), itertools.product(range(3), repeat=3), strict=True
    )
]


class Crash(BaseException):
    """Stands for kill -9: nothing catches it."""


def crash_after(step):
    def progress(done, total, **facts):
        if done == step:
            raise Crash

    return progress


def stop_after(step):
    def progress(done, total, **facts):
        if done == step:
            signal.raise_signal(signal.SIGTERM)

    return progress


def chosen(optimizer, schedule, averaging):
    keys = {"optimizer": optimizer, "schedule": schedule, "averaging": averaging}
    return keys | ({} if schedule == "constant" else {"warmup": 0.25})


def interrupted_often(out, **keys):
    """Killed in the first block, stopped in the second, killed in the third and after the last step."""
    with pytest.raises(Crash):
        train(out, progress=crash_after(2), **keys)
    with pytest.raises(Interrupted):
        train(out, progress=stop_after(4), **keys)
    for step in (7, STEPS):
        with pytest.raises(Crash):
            train(out, progress=crash_after(step), **keys)
    train(out, **keys)


@pytest.mark.parametrize(("optimizer", "schedule", "averaging"), ALL)
def test_a_run_that_was_killed_at_several_steps_ends_in_the_same_bytes(tmp_path, small_blocks, optimizer, schedule, averaging):
    keys = chosen(optimizer, schedule, averaging)
    train(tmp_path / "whole", **keys)
    interrupted_often(tmp_path / "killed", **keys)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert not list((tmp_path / "killed" / "private").glob("*"))


@pytest.mark.parametrize("averaging", ["ema", "tail"])
def test_twin_an_average_that_begins_again_after_a_crash_is_caught(tmp_path, small_blocks, monkeypatch, averaging):
    keys = chosen("sgd", "cosine", averaging)
    train(tmp_path / "whole", **keys)
    real = Average.include
    counts: dict[int, int] = {}

    def forgetful(self, done):
        counts[id(self)] = counts.get(id(self), 0) + 1
        real(self, counts[id(self)] if averaging == "ema" else max(done, STEPS // 2 + counts[id(self)]))

    monkeypatch.setattr(Average, "include", forgetful)
    with pytest.raises(Crash):
        train(tmp_path / "killed", progress=crash_after(7), **keys)
    counts.clear()
    train(tmp_path / "killed", **keys)
    assert files(tmp_path / "killed")["model.safetensors"] != files(tmp_path / "whole")["model.safetensors"]
