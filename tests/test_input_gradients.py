"""The prepared copy is the same function, with the same input gradients, and leaves the model alone."""

import pytest
import torch
from torch import nn

import dpcert
from dpcert.input_gradients import _OverPhases, for_input_gradients

CONVOLUTIONS = [
    {"in_channels": 1, "out_channels": 16, "kernel_size": 8, "stride": 2, "padding": 2},
    {"in_channels": 3, "out_channels": 5, "kernel_size": 4, "stride": 2, "padding": 1},
    {"in_channels": 1, "out_channels": 4, "kernel_size": 6, "stride": 3, "bias": False},
    {"in_channels": 2, "out_channels": 3, "kernel_size": (4, 2), "stride": 2, "padding": (0, 3)},
    {"in_channels": 1, "out_channels": 2, "kernel_size": 2, "stride": 2},
]
NOT_PHASED = [
    {"in_channels": 1, "out_channels": 2, "kernel_size": 3, "stride": 2},
    {"in_channels": 1, "out_channels": 2, "kernel_size": 4, "stride": 1},
    {"in_channels": 8, "out_channels": 2, "kernel_size": 4, "stride": 2},
    {"in_channels": 1, "out_channels": 2, "kernel_size": 4, "stride": 2, "dilation": 2},
    {"in_channels": 1, "out_channels": 2, "kernel_size": 4, "stride": 2, "padding": 1, "padding_mode": "reflect"},
    {"in_channels": 2, "out_channels": 2, "kernel_size": 4, "stride": 2, "groups": 2},
]


def same_function(model, x):
    prepared = for_input_gradients(model)
    outputs, gradients = [], []
    for module in (model, prepared):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
    return prepared


@pytest.mark.parametrize("size", [(28, 28), (9, 11), (17, 20)])
@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
def test_strided_convolutions_over_phases(settings, size):
    model = nn.Sequential(nn.Conv2d(**settings))
    assert isinstance(same_function(model, torch.randn(3, settings["in_channels"], *size))[0], _OverPhases)


@pytest.mark.parametrize("settings", NOT_PHASED, ids=str)
def test_other_convolutions_are_left_as_they_are(settings):
    model = nn.Sequential(nn.Conv2d(**settings))
    assert isinstance(same_function(model, torch.randn(3, settings["in_channels"], 12, 12))[0], nn.Conv2d)


def test_whole_models_and_no_trace():
    model = dpcert.build_model("cnn", seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prepared = same_function(model, torch.rand(5, 1, 28, 28))
    assert not any(p.requires_grad for p in prepared.parameters()) and all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert isinstance(model[0], nn.Conv2d) and model[0].weight.is_contiguous()
