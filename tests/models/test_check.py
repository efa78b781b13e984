"""Layers that mix examples are refused by name, with the remedy."""

import pytest
import torch
from torch import nn

import dpcert
from dpcert.errors import ModelError
from dpcert.models.check import check_model


class Centred(nn.Module):
    """Subtracts the batch mean: mixes examples without being a layer anyone knows."""

    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x):
        self.seen += x.sum(dim=0).detach()
        return x


def net(*layers):
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 4))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (net(nn.BatchNorm1d(64)), r"layer '1' \(BatchNorm1d\) in training mode mixes.*GroupNorm"),
        (net(nn.BatchNorm1d(64, track_running_stats=False)).eval(), "BatchNorm1d"),
        (nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), net()), "running statistics"),
        (net(nn.Dropout(0.5)), "Dropout.*random numbers"),
        (net(Centred()), "layer '1' mixes examples"),
        (net(Remembers()), "buffer '1.seen' changes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), r"shape \[3\], the data has 4"),
        (nn.Sequential(nn.Flatten(), nn.Linear(63, 4)), "does not take inputs"),
        (net().double(), "needs float32"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(4)), "does not take inputs|uninitialized|shape"),
    ],
)
def test_refused(model, words):
    with pytest.raises(ModelError, match=words):
        check_model(model, (1, 8, 8), 4)


def test_nothing_to_train():
    model = net().requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameter"):
        check_model(model, (1, 8, 8), 4)


@pytest.mark.parametrize(
    "model",
    [
        net(),
        net(nn.BatchNorm1d(64)).eval(),
        net(nn.LayerNorm(64)),
        net(nn.Dropout(0.5)).eval(),
        net(nn.Dropout(0.0)),
        nn.Sequential(nn.InstanceNorm2d(1), net()),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 4)),
    ],
)
def test_accepted(model):
    check_model(model, (1, 8, 8), 4)


def test_the_papers_cnn():
    model = dpcert.build_model("cnn", seed=1)
    assert sum(p.numel() for p in model.parameters()) == 26_010
    check_model(model, (1, 28, 28), 10)
    again = dpcert.build_model("cnn", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_pooling_before_tanh_is_the_paper_to_the_bit():
    model = dpcert.build_model("cnn", seed=0)
    conv1, pool, tanh, conv2 = model[0], model[1], model[2], model[3]
    x = torch.rand(5, 1, 28, 28)
    papers = model[6:](pool(tanh(conv2(pool(tanh(conv1(x)))))))
    assert torch.equal(model(x), papers)


def test_small_images_and_unknown_models():
    with pytest.raises(ModelError, match="at least 16 x 16"):
        dpcert.build_model("cnn", input_shape=(1, 12, 12))
    with pytest.raises(ModelError, match="choose one of: cnn, lenet, linear"):
        dpcert.build_model("resnet")
    assert dpcert.build_model("cnn", input_shape=(3, 16, 16), classes=7)(torch.zeros(1, 3, 16, 16)).shape == (1, 7)
