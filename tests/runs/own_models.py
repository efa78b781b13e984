"""Custom models that the tests of custom runs name on the command line."""

import torch
from torch import nn

from dpcert.models.noisy import NoisyModel


class Residual(nn.Module):
    """A residual model for colour images of 16 x 16."""

    activation = staticmethod(torch.relu)

    def __init__(self, input_shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], 4, 3, stride=2, padding=1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 4 * 4, classes)

    def forward(self, x):
        x = self.activation(self.stem(x))
        x = x + self.activation(self.conv(x))
        return self.head(nn.functional.avg_pool2d(x, 2).flatten(1))


class Impostor(Residual):
    """The same tensors, another function of them."""

    activation = staticmethod(torch.tanh)


def residual(input_shape, classes):
    return Residual(input_shape, classes)


def impostor(input_shape, classes):
    return Impostor(input_shape, classes)


def wider(input_shape, classes):
    model = Residual(input_shape, classes)
    model.conv = nn.Conv2d(4, 4, 5, padding=2)
    return model


def raising(input_shape, classes):
    raise RuntimeError("no such luck\nsecond line")


def not_a_module(input_shape, classes):
    return "a string"


not_callable = 3


def tiny(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), 6), nn.Tanh(), nn.Linear(6, classes))


def frozen(input_shape, classes, trunk_seed=0):
    """A fixed random trunk with a trained head."""
    generator = torch.Generator().manual_seed(trunk_seed)
    conv = nn.Conv2d(input_shape[0], 4, 3, padding=1)
    inner = nn.Linear(4 * torch.Size(input_shape[1:]).numel(), 12)
    for parameter in (*conv.parameters(), *inner.parameters()):
        parameter.requires_grad_(False).copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), inner, nn.Tanh(), nn.Linear(12, classes))


def frozen_otherwise(input_shape, classes):
    return frozen(input_shape, classes, trunk_seed=1)


class Mixing(nn.Sequential):
    """Divides by the largest pixel of the batch."""

    def forward(self, x):
        return super().forward(x / x.amax())


def mixing(input_shape, classes):
    return Mixing(*tiny(input_shape, classes))


def noise_inside(input_shape, classes):
    """A model with noise after its first layer."""
    rest = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, classes))
    return NoisyModel(nn.Conv2d(input_shape[0], 4, 4, 2, 1), rest, [0.1, 0.2, 0.3, 0.2], input_shape)


def noise_at_both_sites(input_shape, classes):
    """The same, with noise on the image too."""
    rest = nn.Sequential(nn.Hardtanh(), nn.Flatten(), nn.Linear(4 * 16, classes))
    return NoisyModel(nn.Conv2d(input_shape[0], 4, 4, 2, 1), rest, 0.2, input_shape, input_scale=0.25)
