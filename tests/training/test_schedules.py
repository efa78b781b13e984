"""Learning-rate schedules: against PyTorch's, within bounds, and as the steps really take them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from dpcert.training.schedules import SCHEDULES, ScheduleKeys, learning_rate_factor
from dpcert.training.settings import TrainConfig
from tests.training.knobs import STEPS, notes, train

__all__ = ["notes"]


def pytorchs(schedule: str, rising: int, steps: int) -> list[float]:
    """The learning rates of PyTorch's own schedulers, for a learning rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    falling = {
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "linear": lambda: lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps - rising),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - rising),
    }[schedule]()
    scheduler = falling
    if rising:
        warm = lr_scheduler.LinearLR(optimizer, start_factor=1 / rising, end_factor=1.0, total_iters=rising - 1)
        scheduler = lr_scheduler.SequentialLR(optimizer, [warm, falling], milestones=[rising])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "steps"), [(0.0, 1), (0.0, 7), (0.0, 100), (0.1, 30), (0.29, 100), (0.5, 8)])
def test_schedules_are_pytorchs(schedule, warmup, steps):
    """The twin, a rate that falls from the first step on, is rejected wherever there is a warm-up and a fall."""
    keys = ScheduleKeys(schedule=schedule, warmup=warmup)
    ours = [learning_rate_factor(keys, step, steps) for step in range(steps)]
    expected = pytorchs(schedule, round(warmup * steps), steps)
    assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if warmup and schedule != "constant":
        twin = [min(1.0, (step + 1) / (warmup * steps)) * SCHEDULES[schedule](step / steps) for step in range(steps)]
        assert twin != pytest.approx(expected, rel=1e-2)


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    warmup=st.floats(0, 1),
    steps=st.integers(1, 10**6),
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
)
def test_a_rate_is_positive_rises_in_the_warm_up_and_never_after_it(schedule, warmup, steps, places):
    keys, rising = ScheduleKeys(schedule=schedule, warmup=warmup), round(warmup * steps)
    first, second = sorted(int(place * steps) for place in places)
    early, late = (learning_rate_factor(keys, step, steps) for step in (first, second))
    assert 0 < early <= 1 and 0 < late <= 1
    assert early <= late if second < rising else first < rising or late <= early


def test_without_schedule_and_warm_up_the_rate_has_the_same_bits():
    train = TrainConfig(learning_rate=0.1)
    assert {train.learning_rate_at(step, 1000) for step in range(1000)} == {0.1}


@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 0.0), ("constant", 0.5), ("linear", 0.25), ("cosine", 1.0)])
def test_a_training_takes_the_rates_of_its_schedule(notes, schedule, warmup):
    train(schedule=schedule, warmup=warmup)
    keys = TrainConfig(learning_rate=0.1, schedule=schedule, warmup=warmup)
    assert notes.rates == [keys.learning_rate_at(step, STEPS) for step in range(STEPS)]
