"""The Python example of the contract, small."""

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from tests.conftest import blobs


def test_the_way_through_the_library(tmp_path):
    data = dpcert.Dataset(**blobs(0), classes=3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))
    method = dpcert.method("dp-gaussian", sigma=0.5, copies=2)
    run = dpcert.train(
        model,
        data,
        method,
        epsilon=8.0,
        delta=1e-3,
        epochs=15,
        batch_size=24,
        learning_rate=0.5,
        momentum=0.9,
        optimizer="sgd",
        clip_norm=0.1,
        dataset_size=None,
        out=None,
        seed=None,
    )
    assert 7.9 < run.epsilon <= 8.0 and run.model is model and "treated as public" in str(run.statement)
    certs = dpcert.certify(run.model, data.x_test[:20], data.y_test[:20], sigma=0.5, n0=100, n=1000, alpha=0.001)
    assert certs.acr > 0.2 and certs.certified_accuracy(0.25) > 0.5
    assert certs.radius.shape == certs.predict.shape == (20,)
    predicted = dpcert.predict(run.model, data.x_test[:20], sigma=0.5, n=1000, alpha=0.001)
    assert (predicted == data.y_test[:20]).float().mean() > 0.5


def test_a_method_of_ones_own():
    from dpcert.views import Gaussian

    data = dpcert.Dataset(**blobs(0), classes=3)
    own = dpcert.Method(
        views=Gaussian(0.3, 1, keep_original=False), regulariser=lambda logits, label: logits.square().mean(), clip="psac"
    )
    run = dpcert.train("linear", data, own, epochs=2, batch_size=24, seed=1)
    assert run.statement.private and run.plan.clip_rule == "psac"


def test_the_public_size_can_be_given():
    data = dpcert.Dataset(**blobs(0), classes=3)
    run = dpcert.train("linear", data, "dpsgd", epochs=1, batch_size=20, dataset_size=200)
    assert run.plan.dataset_size == 200 and run.plan.sampling_probability == 0.1
    assert "treated as public" not in str(run.statement)


def test_models_that_mix_examples_are_refused_before_anything_is_spent():
    data = dpcert.Dataset(**blobs(0), classes=3)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\)"):
        dpcert.train(model, data, "dpsgd")


def test_shapes_that_do_not_fit_are_refused():
    data = dpcert.Dataset(**blobs(0), classes=3)
    with pytest.raises(ValueError, match="does not take inputs"):
        dpcert.train(nn.Sequential(nn.Flatten(), nn.Linear(65, 3)), data, "dpsgd")
    with pytest.raises(ValueError, match="the data has 3 classes"):
        dpcert.train(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), data, "dpsgd")


def test_numpy_arrays_and_tensors_are_alike():
    arrays = blobs(0)
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}
    assert torch.equal(dpcert.Dataset(**arrays).x_train, dpcert.Dataset(**tensors).x_train)
