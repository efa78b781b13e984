"""Large gradients: float64 in blocks and one product at a time give what the simple forms give."""

import pytest
import torch
from torch import nn

from dpcert.gradients import layers, parts
from dpcert.gradients.parts import Factored, Instantiated, Stacked


def rows(size, b=5, seed=0):
    return torch.randn(b, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("b", [1, 3, 700])
def test_blocks_are_exact(b):
    gradients = rows(parts.WIDEST + 777, b)
    part, factors = Instantiated(gradients), torch.rand(b, dtype=torch.float64)
    torch.testing.assert_close(part.norms_squared(), gradients.double().square().sum(dim=1), rtol=1e-13, atol=0)
    torch.testing.assert_close(part.weighted_sum(factors), factors @ gradients.double(), rtol=1e-12, atol=1e-13)


def test_twin_float32_would_not_pass():
    gradients = rows(parts.WIDEST + 777) + 3.0
    wide, narrow = gradients.double().square().sum(dim=1), gradients.square().sum(dim=1).double()
    assert not torch.allclose(wide, narrow, rtol=1e-10, atol=0)


def test_stacked_parts_are_one_parameter():
    first, second = rows(30), Factored(torch.randn(5, 2, 4), torch.randn(5, 2, 6))
    stacked, factors = Stacked([Instantiated(first), second]), torch.rand(5, dtype=torch.float64)
    whole = Instantiated(torch.cat([first, second.instantiate()], dim=1))
    torch.testing.assert_close(stacked.instantiate(), whole.instantiate())
    torch.testing.assert_close(stacked.norms_squared(), whole.norms_squared(), rtol=1e-6, atol=0)
    torch.testing.assert_close(stacked.weighted_sum(factors), whole.weighted_sum(factors), rtol=1e-6, atol=1e-6)
    left = stacked.without(torch.tensor([True, False, False, False, False]))
    assert not left.instantiate()[0].any() and left.instantiate()[1].any()


CONVOLUTIONS = {
    "wide": nn.Conv2d(40, 64, 3, padding=1),
    "wide, strided and dilated": nn.Conv2d(40, 64, 3, stride=2, dilation=2, padding=2),
    "wide, few positions": nn.Conv2d(96, 96, 3),
    "depthwise": nn.Conv2d(40, 40, 3, padding=1, groups=40),
    "depthwise, two for one, strided": nn.Conv2d(40, 80, 5, stride=2, padding=2, groups=40, bias=False),
    "grouped": nn.Conv2d(40, 16, 3, groups=8, padding="same", dilation=2),
    "grouped, reflected": nn.Conv2d(40, 16, 3, groups=4, padding=1, padding_mode="reflect"),
    "one dimension, grouped": nn.Conv1d(40, 20, 3, groups=20, padding=1),
    "one dimension, wide": nn.Conv1d(96, 96, 3),
}


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_equal_autograd(name, b):
    layer, buffers = CONVOLUTIONS[name], layers.Buffers()
    for seed in range(2):  # the second time with buffers that are in use
        torch.manual_seed(seed)
        x = torch.randn(b * 2, layer.in_channels, *[5, 6][: len(layer.kernel_size)])
        output = layer(x)
        delta = torch.randn_like(output)
        with torch.no_grad():
            found = layers.convolution(layer, x, delta, b, buffers)
        for i in range(b):
            own = slice(2 * i, 2 * i + 2)
            expected = torch.autograd.grad((layer(x[own]) * delta[own]).sum(), list(layer.parameters()))
            for part, gradient in zip(found.values(), expected, strict=True):
                torch.testing.assert_close(part.instantiate()[i], gradient.flatten(), rtol=1e-4, atol=1e-4)
