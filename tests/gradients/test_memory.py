"""The default number of rows in memory: a function of the model and the input shape, within fixed budgets."""

import pytest
import torch
from torch import nn

from dpcert.gradients import memory
from dpcert.gradients.memory import default_physical_batch, keep_freed_memory
from dpcert.models.registry import build_model
from dpcert.models.resnet import resnet

SHAPE = (3, 32, 32)


def only_the_head(model):
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def test_the_packaged_cnn_keeps_its_default():
    assert default_physical_batch(build_model("cnn"), (1, 28, 28)) == 480
    assert default_physical_batch(build_model("linear"), (1, 28, 28)) == 480


def test_more_trained_parameters_or_activations_mean_fewer_rows():
    wide, narrow = (resnet(name, SHAPE, 10).eval() for name in ("resnet-48", "resnet-32"))
    assert default_physical_batch(wide, SHAPE) < default_physical_batch(narrow, SHAPE) < 480
    assert default_physical_batch(wide, SHAPE) < default_physical_batch(only_the_head(wide), SHAPE)
    assert default_physical_batch(narrow, (3, 128, 128)) < default_physical_batch(narrow, SHAPE)


@pytest.mark.parametrize("name", ["resnet-32", "resnet-48"])
def test_both_budgets_hold(name):
    model = resnet(name, SHAPE, 10).eval()
    rows = default_physical_batch(model, SHAPE)
    assert 4 * rows * sum(p.numel() for p in model.parameters()) <= 640 << 20
    assert 4 * (rows + 1) * sum(p.numel() for p in model.parameters()) > 640 << 20


def test_at_least_one_row_and_no_trace_on_the_model():
    huge = nn.Sequential(nn.Flatten(), nn.Linear(10, 10))
    huge.unused = nn.Parameter(torch.empty(1 << 20).expand(1 << 10, 1 << 20))  # counts as 2^30 parameters
    assert default_physical_batch(huge, (1, 2, 5)) == 1
    model = resnet("resnet-32", SHAPE, 10).eval()
    assert default_physical_batch(model, SHAPE) == default_physical_batch(model, SHAPE)
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_model_that_cannot_run_is_left_to_the_model_check():
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError("position")

    assert default_physical_batch(nn.Sequential(Fails(3, 3)), (3,)) == 480


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_a_system_without_glibc_is_left_as_it_is(error, monkeypatch):
    def missing(name):
        raise error("no such library or function")

    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    keep_freed_memory()


def test_freed_memory_is_kept_on_glibc(monkeypatch):
    calls = []
    library = type("Library", (), {"mallopt": staticmethod(lambda key, value: calls.append((key, value)))})
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: library)
    keep_freed_memory()
    assert calls == [(-1, (1 << 31) - 1), (-3, 1 << 30)]
