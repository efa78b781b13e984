"""The joint: public constants, the divisor, and no release without a charge."""

import dataclasses

import numpy as np
import pytest
import torch

from dpcert.data.dataset import Dataset
from dpcert.errors import BudgetError
from dpcert.gradients.engine import ClippedSum
from dpcert.methods import METHODS, method
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import STEPS_PER_BLOCK, Mechanism, opening_facts
from dpcert.rng import key_from_seed
from dpcert.store.durable import canonical_json
from dpcert.training.loop import plan_for
from dpcert.training.settings import Settings

SETTINGS = Settings.of(
    epsilon=3.0, delta=1e-5, epochs=10, batch_size=8, learning_rate=0.5, momentum=0.9, optimizer="sgd", clip_norm=0.1
)
KEY = key_from_seed(0, "test")


def data(records, **public):
    generator = np.random.default_rng(0)
    x, y = generator.random((records, 8, 8), dtype=np.float32), generator.integers(0, 3, records)
    return Dataset(x, y, x[:10], y[:10], **public)


def plan(records, **public):
    return plan_for(data(records, **public), method("dp-gaussian"), SETTINGS)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.clip != "none"])
def test_with_the_public_size_given_one_record_more_or_less_changes_no_byte_of_the_plan(name, evidence):
    """D6: nor of what the ledger opens with, whichever record it is and with validation records held out too."""
    for held_out in (0, 20):
        texts = set()
        for records in (199, 200, 201):
            made = plan_for(data(records, size=200, classes=3).holding_out(held_out), method(name), SETTINGS)
            texts.add(canonical_json(opening_facts(made, noise_is_secret=True)))
        assert len(texts) == 1
    without = {canonical_json(dataclasses.asdict(plan(n, classes=3))) for n in (199, 200, 201)}
    assert len(without) == 3
    evidence("D6", figure=f"{name}: N-1, N, N+1 give byte-equal plans", trials=6, twin="size not given: 3 different plans")


def test_twin_without_the_public_size_it_does_and_the_statement_says_so():
    plans = [plan(n, classes=3) for n in (200, 201)]
    assert plans[0] != plans[1] and not plans[0].size_given


def mechanism(authorised=True):
    made = plan(200, size=200)
    ledger = Ledger()
    ledger.open(opening_facts(made, noise_is_secret=True))
    m = Mechanism(made, KEY, ledger)
    if authorised:
        m.charge(0)
    return m


def test_nothing_is_released_before_it_is_charged():
    value = ClippedSum(torch.zeros(4, dtype=torch.float64), 0.1, torch.zeros(0))
    with pytest.raises(BudgetError, match="not authorised"):
        mechanism(authorised=False).release(value, 0)
    mechanism().release(value, 0)


def test_a_block_is_charged_once_however_often_it_is_run():
    m = mechanism()
    for step in range(STEPS_PER_BLOCK):
        m.charge(step)
    assert m.ledger.steps_authorised == STEPS_PER_BLOCK
    m.charge(STEPS_PER_BLOCK)
    assert m.ledger.steps_authorised == 2 * STEPS_PER_BLOCK


def test_the_last_block_ends_with_the_plan():
    m = mechanism()
    for step in range(m.plan.steps):
        m.charge(step)
    assert m.ledger.steps_authorised == m.plan.steps == 250


def test_the_divisor_is_the_expected_batch_size():
    m = dataclasses.replace(mechanism(), plan=dataclasses.replace(mechanism().plan, noise_multiplier=0.0))
    value = ClippedSum(torch.full((4,), 16.0, dtype=torch.float64), 0.1, torch.zeros(3))
    assert torch.equal(m.release(value, 0), torch.full((4,), 2.0, dtype=torch.float64))


def test_batch_and_noise_depend_on_key_and_step_only():
    value = ClippedSum(torch.zeros(4, dtype=torch.float64), 0.1, torch.zeros(0))
    first, second = mechanism(), mechanism()
    for step in (0, 3, 7):
        assert np.array_equal(first.sample(200, step), second.sample(200, step))
        assert torch.equal(first.release(value, step), second.release(value, step))
    assert not torch.equal(first.release(value, 0), first.release(value, 1))


def test_noise_of_a_release_has_the_planned_scale():
    m = mechanism()
    value = ClippedSum(torch.zeros(100_000, dtype=torch.float64), 0.1, torch.zeros(0))
    assert float(m.release(value, 1).std()) == pytest.approx(m.plan.noise_multiplier * 0.1 / 8, rel=0.011)
