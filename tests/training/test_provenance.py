"""D22: weights that have seen the records never get a finite epsilon that ignores it."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.errors import DpcertWarning
from dpcert.interrupts import Interrupted
from dpcert.privacy.ledger import Ledger
from dpcert.training.provenance import record_hashes

pytestmark = pytest.mark.filterwarnings("ignore::dpcert.errors.DpcertWarning")
SETTINGS = {"epochs": 1, "batch_size": 8, "learning_rate": 0.1, "epsilon": 2.0, "delta": 1e-3}


def data_of(seed, records=40):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(records, 1, 6, 6, generator=generator)
    return dpcert.Dataset(x, torch.arange(records) % 3, x[:6], torch.arange(6) % 3)


def fresh():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def train(model, data, method="dpsgd", **options):
    return dpcert.train(model, data, method, **{**SETTINGS, **options})


def shift(module):
    """Change every weight, so that no tensor is recognized by its values."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.01


def composed(*runs):
    from dpcert.privacy.accounting import compose

    return compose([release for run in runs for release in run.ledger.own_releases()], SETTINGS["delta"])


def test_the_same_cell_run_twice_is_charged_twice(evidence):
    model, data = fresh(), data_of(0)
    first = train(model, data)
    with pytest.warns(DpcertWarning, match="already been trained on these records"):
        second = train(model, data)
    third = train(model, data)
    assert first.epsilon <= 2.0 < second.epsilon < third.epsilon
    assert second.epsilon == composed(first, second) and third.epsilon == composed(first, second, third)
    assert "epsilon covers those 5 steps too" in str(second.statement)
    assert "The initial weights must not depend on the training records." in str(first.statement)
    evidence(
        "D22", figure="a second and third training composed with those before", trials=3, twin="each alone: below the truth"
    )


def test_twin_each_training_alone_is_below_the_truth():
    model, data = fresh(), data_of(0)
    first, second = train(model, data), train(model, data)
    assert composed(second) == first.epsilon < second.epsilon


@pytest.mark.parametrize(
    "how",
    [
        "deepcopy",
        "state dict",
        "one layer",
        "another loop",
        "part of another model",
        "a layer of it, changed",
        "averaged in place",
    ],
)
def test_weights_are_recognized_however_they_came(how):
    model, data = fresh(), data_of(0)
    first = train(model, data)
    if how == "deepcopy":
        again = copy.deepcopy(model)
    elif how == "state dict":
        again = fresh()
        again.load_state_dict(model.state_dict())
    elif how == "part of another model":
        again = nn.Sequential(model, nn.Linear(3, 3))
        shift(model[1])
    elif how == "a layer of it, changed":
        again = nn.Sequential(nn.Flatten(), model[1], nn.Linear(3, 3))
        shift(model[1])
    elif how == "averaged in place":
        again, other = copy.deepcopy(model), fresh()
        with torch.no_grad():
            for mine, theirs in zip(again.parameters(), other.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
    elif how == "one layer":
        again = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Tanh(), nn.Linear(3, 3))
        again[1].load_state_dict(model[1].state_dict())
    else:
        again = model
        shift(again)
    assert train(again, data).epsilon == pytest.approx(composed(first, first), rel=1e-9)


def test_other_records_and_fresh_models_are_not_charged():
    model, data = fresh(), data_of(0)
    first = train(model, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DpcertWarning)
        assert train(model, data_of(1)).epsilon == first.epsilon
        assert train(fresh(), data).epsilon == first.epsilon


def test_untrained_parts_of_a_trained_model_are_not_charged():
    """A frozen backbone and a layer without weights have learnt nothing from the records."""
    data, backbone, activation = data_of(0), nn.Linear(36, 5).requires_grad_(False), nn.Tanh()
    first = train(nn.Sequential(nn.Flatten(), backbone, activation, nn.Linear(5, 3)), data)
    assert train(nn.Sequential(nn.Flatten(), backbone, activation, nn.Linear(5, 3)), data).epsilon == first.epsilon


def test_a_pickled_model_does_not_carry_hashes_of_the_records():
    model, data = fresh(), data_of(0)
    data.x_train[0] = 0.0  # its hash is 0 under every key
    first = train(model, data)
    pickled = pickle.dumps(model)
    hashes = record_hashes(data.x_train)
    assert not any(int(number).to_bytes(8, "little") in pickled for number in hashes[1:])
    again = pickle.loads(pickled)  # noqa: S301
    assert train(again, data).epsilon > first.epsilon  # in this process the tensors are recognized


def test_one_shared_record_is_enough():
    model, data, other = fresh(), data_of(0), data_of(1)
    train(model, data)
    other.x_train[7] = data.x_train[11]
    assert train(model, other).epsilon > 2.0


@pytest.mark.parametrize("method", ["regular", "seeded"])
def test_training_without_privacy_before_leaves_nothing_to_promise(method):
    model, data = fresh(), data_of(0)
    train(model, data, "regular") if method == "regular" else train(model, data, noise_seed=1)
    for _ in range(2):
        run = train(model, data)
        assert not run.statement.private and run.epsilon == float("inf")
        assert run.statement.reason == "the initial weights were trained on these records without privacy"


def test_an_earlier_training_that_was_not_private_is_never_outweighed():
    model, data = fresh(), data_of(0)
    train(model, data_of(1))  # private, on other records
    train(model, data, "regular")
    assert not train(model, data).statement.private


def test_an_interrupted_training_counts_as_far_as_it_was_charged(monkeypatch):
    model, data = fresh(), data_of(0)
    calls = []

    def stop(*arguments, **facts):
        calls.append(1)
        raise Interrupted("enough")

    with pytest.raises(KeyboardInterrupt):
        train(model, data, progress=stop)
    assert calls and train(model, data).epsilon > 2.0


def test_a_run_directory_keeps_what_its_initial_weights_had_seen(tmp_path):
    model, data = fresh(), data_of(0)
    first = train(model, data)
    second = train(model, data, out=tmp_path / "run")
    again = train(fresh(), data, out=tmp_path / "run")  # finished: only loaded
    assert first.epsilon < second.epsilon == again.epsilon
    assert Ledger.load(tmp_path / "run" / "ledger.jsonl").earlier
    assert train(again.model, data).epsilon > second.epsilon  # loaded weights are known too


def test_a_killed_run_that_began_warm_is_still_charged_for_it(tmp_path, monkeypatch):
    """The crash comes after the first checkpoint and before the ledger opens; another process has never seen the module."""
    from dpcert.training import lifecycle

    model, data = fresh(), data_of(0)
    first = train(model, data)

    def crash(*arguments):
        raise RuntimeError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(lifecycle, "_open_ledger", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(model, data, out=tmp_path / "run")
    assert train(fresh(), data, out=tmp_path / "run").epsilon == composed(first, first)


def test_hashes_of_records_tell_them_apart():
    x = torch.rand(5000, 1, 5, 5)
    x[4999] = x[3]
    hashes = record_hashes(x)
    assert hashes[3] == hashes[4999] and len(np.unique(hashes)) == 4999
    assert np.array_equal(record_hashes(x[10:20]), hashes[10:20])
