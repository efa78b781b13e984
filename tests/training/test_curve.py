"""training.tsv: about a row an epoch, of released values and the test set, the same after a crash."""

import math
from types import SimpleNamespace

import pytest

import dpcert
from dpcert.privacy import mechanism
from dpcert.privacy import noise as noises
from dpcert.privacy.accounting import epsilon
from dpcert.store.records import CurveRow, read_rows
from dpcert.training import curve
from tests.training.test_loop import DATA, train


def rows(out):
    return read_rows(CurveRow, out / "training.tsv")


def test_a_row_an_epoch_with_what_was_spent_and_reached(tmp_path, monkeypatch):
    raw = []  # norms of the means before noise

    def add(clipped, *noise):
        raw.append(float(clipped.value.norm()) / 10)
        return noises.add(clipped, *noise)

    monkeypatch.setattr(mechanism, "noise", SimpleNamespace(add=add))
    run = train(tmp_path / "run", epochs=4, noise_seed=None, epsilon=1.0)
    found = rows(tmp_path / "run")
    assert [row.step for row in found] == [24, 48, 72, 96] and [row.epoch for row in found] == [1, 2, 3, 4]
    spent = [row.epsilon for row in found]
    assert spent == sorted(spent) and spent[-1] == pytest.approx(run.epsilon, abs=1e-6) and spent[-1] >= run.epsilon
    for row in found:
        exact = epsilon(
            noise_multiplier=run.plan.noise_multiplier, sampling_probability=10 / 240, steps=row.step, delta=run.plan.delta
        )
        assert exact <= row.epsilon <= exact * 1.02
    assert found[-1].test_accuracy == pytest.approx(curve.accuracy(run.model, DATA.x_test, DATA.y_test), abs=1e-6)
    noise = run.plan.noise_multiplier * 0.1 / 10 * math.sqrt(195)  # of the noised mean gradient, 195 parameters

    def is_noised(norm):
        return 0.8 * noise < norm < 1.2 * noise + 0.1

    assert all(is_noised(row.gradient_norm) for row in found)
    assert len(raw) == 96 and not any(is_noised(norm) for norm in raw)  # the twin


def test_a_run_that_is_not_private_spends_infinity(tmp_path):
    train(tmp_path / "run", epochs=1)
    assert [row.epsilon for row in rows(tmp_path / "run")] == [math.inf]


def test_a_training_without_noise_has_no_norm_of_its_gradients(tmp_path):
    train(tmp_path / "run", epochs=2, method=dpcert.method("regular"))
    assert [(row.epsilon, row.gradient_norm) for row in rows(tmp_path / "run")] == [(math.inf, None)] * 2


def test_long_trainings_have_at_most_some_fifty_rows(tmp_path):
    train(tmp_path / "run", epochs=150)
    assert 45 <= len(rows(tmp_path / "run")) <= 51


def test_with_records_held_out_the_test_set_is_left_alone(tmp_path):
    data = dpcert.Dataset(DATA.x_train, DATA.y_train, DATA.x_test, DATA.y_test, classes=3, size=240).holding_out(24)
    train(tmp_path / "run", data=data, epochs=2)
    assert {row.test_accuracy for row in rows(tmp_path / "run")} == {None}
