"""The norm of a linear layer is an upper bound, and a tight one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpcert.errors import ModelError
from dpcert.operator_norm import geometry_of, norm_gradient, norm_of_weight, operator_norm


def norm(layer: nn.Module, shape: tuple[int, ...], scale: torch.Tensor | None = None) -> float:
    return float(operator_norm(layer, shape, scale).detach())


def materialized(layer: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """The matrix of the layer, column by column."""
    count = int(torch.tensor(shape).prod())
    with torch.no_grad():
        basis = torch.eye(count, dtype=torch.float64).reshape(count, *shape)
        zero = layer.double()(torch.zeros((1, *shape), dtype=torch.float64))
        return (layer(basis) - zero).flatten(1).T


def power_iteration(layer: nn.Module, shape: tuple[int, ...], steps: int = 12) -> float:
    """A lower bound on the norm."""
    layer = layer.double()
    x = torch.randn((1, *shape), dtype=torch.float64)

    def linear(x):
        return layer(x) - layer(torch.zeros_like(x))

    for _ in range(steps):
        x = x / x.norm()
        _, x = torch.autograd.functional.vjp(linear, x, linear(x).detach())
    with torch.no_grad():
        return float(linear(x / x.norm()).norm())


def random_layer(seed: int) -> tuple[nn.Conv2d, tuple[int, int, int]]:
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    groups, height, width = one_of(1, 1, 2), one_of(5, 8, 11), one_of(5, 8, 11)
    kernel, stride, dilation = one_of(1, 2, 3, 5), (one_of(1, 2, 3), one_of(1, 2)), one_of(1, 1, 2)
    if dilation * (kernel - 1) + 1 > min(height, width):
        dilation, kernel = 1, 3
    torch.manual_seed(seed)
    layer = nn.Conv2d(2 * groups, 3 * groups, kernel, stride, one_of(0, 1, 2, 3), dilation, groups)
    with torch.no_grad():
        layer.weight.mul_(one_of(1e-3, 1.0, 50.0))
        if one_of(True, False):
            layer.weight.abs_()  # a low-pass filter: the norm is at frequency 0
    return layer, (2 * groups, height, width)


@pytest.mark.parametrize("block", range(10))
def test_the_bound_is_never_below_power_iteration(block):
    """1,000 random layers: strides, paddings, dilations, groups."""
    for seed in range(100 * block, 100 * block + 100):
        layer, shape = random_layer(seed)
        assert norm(layer, shape) >= power_iteration(layer, shape)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size"),
    [(3, 1, 1, 15), (3, 1, 0, 16), (5, 1, 2, 25), (3, 2, 1, 16), (4, 2, 1, 20), (5, 2, 2, 25), (3, 3, 0, 15), (1, 1, 0, 6)],
)
@pytest.mark.parametrize("positive", [False, True])
def test_within_five_percent_of_the_exact_norm_on_large_inputs(kernel, stride, padding, size, positive):
    """Where the input is at least five times as wide as the kernel."""
    torch.manual_seed(kernel + stride)
    layer = nn.Conv2d(1, 4, kernel, stride, padding)
    if positive:
        layer.weight.data.abs_()
    exact = float(torch.linalg.matrix_norm(materialized(layer, (1, size, size)), ord=2))
    assert exact <= norm(layer, (1, size, size)) <= 1.05 * exact


def test_padding_called_same_counts_the_dilation():
    torch.manual_seed(0)
    same, explicit = nn.Conv2d(1, 2, 3, padding="same", dilation=2), nn.Conv2d(1, 2, 3, padding=2, dilation=2)
    explicit.load_state_dict(same.state_dict())
    exact = float(torch.linalg.matrix_norm(materialized(explicit, (1, 6, 6)), ord=2))
    assert exact <= norm(same, (1, 6, 6)) == norm(explicit, (1, 6, 6))


def test_the_bound_of_stride_one_is_too_large_for_a_stride():
    """The twin: without the polyphase form the bound holds too, but it is far from tight."""
    torch.manual_seed(0)
    strided, dense = nn.Conv2d(1, 8, 5, 2, 2), nn.Conv2d(1, 8, 5, 1, 2)
    dense.load_state_dict(strided.state_dict())
    exact = float(torch.linalg.matrix_norm(materialized(strided, (1, 25, 25)), ord=2))
    assert norm(strided, (1, 25, 25)) < 1.05 * exact < 1.4 * exact < norm(dense, (1, 25, 25))


def test_a_grid_without_room_for_the_kernel_is_not_a_bound():
    """The twin: a circular convolution on a grid of the input's own size mixes opposite borders and can be too small."""
    layer = nn.Conv2d(1, 1, 3, padding=2, bias=False)
    layer.weight.data = torch.tensor([[1.0, -1.0, 0.5], [-1.0, 1.0, -0.5], [0.5, -0.5, 0.2]]).reshape(1, 1, 3, 3)
    exact = float(torch.linalg.matrix_norm(materialized(layer, (1, 3, 3)), ord=2))
    circular = float(torch.fft.fft2(layer.weight.detach()[0, 0], s=(3, 3)).abs().max())
    assert circular < exact <= norm(layer, (1, 3, 3))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_linear_layer_has_its_largest_singular_value(inputs, outputs, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs)
    exact = float(torch.linalg.matrix_norm(layer.weight.detach().double(), ord=2))
    assert exact <= norm(layer, (inputs,)) <= exact * (1 + 1e-9) + 1e-9


def test_a_scale_per_channel_whitens_the_output():
    torch.manual_seed(0)
    layer, scale = nn.Conv2d(2, 3, 3, padding=1), torch.tensor([0.5, 1.0, 2.0])
    matrix = materialized(layer, (2, 15, 15)) / scale.double().repeat_interleave(225)[:, None]
    exact = float(torch.linalg.matrix_norm(matrix, ord=2))
    assert exact <= norm(layer, (2, 15, 15), scale) <= 1.05 * exact


def test_the_norm_is_differentiable():
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 2, 3)
    operator_norm(layer, (1, 8, 8)).backward()
    gradient, step = layer.weight.grad, 1e-3
    before = norm(layer, (1, 8, 8))
    with torch.no_grad():
        layer.weight += step * gradient / gradient.norm()
    assert norm(layer, (1, 8, 8)) - before == pytest.approx(step * float(gradient.norm()), rel=0.05)


@pytest.mark.parametrize(
    ("layer", "shape", "scale", "words"),
    [
        (nn.ReLU(), (1, 8, 8), None, "ReLU is not a linear layer"),
        (nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (1, 8, 8), None, "padding mode"),
        (nn.Conv2d(3, 2, 3), (1, 8, 8), None, "3 input channels"),
        (nn.Conv2d(1, 2, 3), (1, 8, 8), torch.tensor([1.0, 0.0]), "positive"),
        (nn.Conv2d(1, 2, 3), (1, 8, 8), torch.tensor([1.0, float("nan")]), "positive"),
        (nn.Conv2d(1, 2, 3), (1, 8, 8), torch.ones(3), "2 positive values"),
    ],
)
def test_what_has_no_norm_is_refused(layer, shape, scale, words):
    with pytest.raises(ModelError, match=words):
        operator_norm(layer, shape, scale)


def whitened_power_iteration(layer: nn.Module, shape: tuple[int, ...], scale: torch.Tensor, steps: int = 12) -> float:
    bare = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
        False,
    )
    bare.weight.data = layer.weight.detach().double() / scale.double().reshape(-1, 1, 1, 1)
    return power_iteration(bare, shape, steps)


@pytest.mark.parametrize("block", range(10))
def test_the_whitened_bound_is_never_below_power_iteration(block, evidence):
    """1,000 random layers with noise of another scale in each channel."""
    for seed in range(100 * block, 100 * block + 100):
        layer, shape = random_layer(seed)
        scale = torch.rand(layer.out_channels, generator=torch.Generator().manual_seed(seed)) + 0.05
        assert norm(layer, shape, scale) >= whitened_power_iteration(layer, shape, scale, steps=4)
    if block == 9:
        evidence(
            "C8", figure="1,000 random layers: the FFT norm is never below power iteration, plain and whitened", trials=2000
        )


def test_norms_of_published_code_are_not_bounds():
    """The twins: power iteration with few steps, and the flattened kernel without the factor for overlapping windows."""
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 8, 5, 1, 2)
    layer.weight.data.abs_()
    exact = float(torch.linalg.matrix_norm(materialized(layer, (1, 25, 25)), ord=2))
    flat = float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), ord=2))
    assert power_iteration(layer, (1, 25, 25), steps=1) < exact and 3.6 < exact / flat < 5.0
    assert norm(layer.float(), (1, 25, 25)) >= exact


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_the_gradient_of_the_norm_is_that_of_autograd_and_gives_its_value(seed):
    layer, shape = random_layer(seed)
    scale = torch.rand(layer.out_channels, generator=torch.Generator().manual_seed(seed)) + 0.1
    layer.double()
    value = operator_norm(layer, shape, scale)
    value.backward()
    gradient = norm_gradient(layer.weight, scale, geometry_of(layer, shape))
    assert float((gradient * layer.weight.detach()).sum()) == pytest.approx(float(value.detach()), rel=1e-9)
    assert (gradient - layer.weight.grad).norm() <= 1e-6 * layer.weight.grad.norm()


def test_the_gradient_of_a_linear_layer():
    torch.manual_seed(0)
    layer, scale = nn.Linear(7, 4).double(), torch.tensor([0.5, 1.0, 2.0, 0.1])
    value = operator_norm(layer, (7,), scale)
    value.backward()
    assert torch.allclose(norm_gradient(layer.weight, scale, ()), layer.weight.grad, atol=1e-9)


def test_weights_that_are_not_finite_give_nan_and_no_error():
    """Training that diverges goes on, as with any other layer."""
    layer = nn.Conv2d(1, 2, 3)
    for value in (float("nan"), float("inf")):
        layer.weight.data[0, 0, 0, 0] = value
        assert operator_norm(layer, (1, 8, 8)).isnan()
        assert norm_gradient(layer.weight, torch.ones(2), geometry_of(layer, (1, 8, 8))).isnan().all()


def test_a_weight_of_another_shape_than_the_geometry_is_refused():
    """A convolution that passes for a linear layer would have a far smaller norm."""
    with pytest.raises(ModelError, match="does not fit the geometry"):
        norm_of_weight(nn.Conv2d(1, 2, 3).weight, ())
