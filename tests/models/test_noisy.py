"""Models with noise after their first layer: what they compute, how they differentiate, and what they refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from dpcert.errors import ModelError
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.vmap import per_example_gradients
from dpcert.input_gradients import for_input_gradients
from dpcert.isolation import each_row_alone
from dpcert.models.check import check_model
from dpcert.models.noisy import NoisyModel, heterogeneous_scales, noise_after
from dpcert.operator_norm import operator_norm
from dpcert.privacy.clipping import CLIP_RULES
from dpcert.row_proof import reason_for_no_proof

SHAPE = (1, 8, 8)
SCALES = torch.tensor([0.1, 0.2, 0.4, 0.3])


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))


def noisy(kind: str = "convolution", **options) -> NoisyModel:
    if kind == "convolution":
        return noise_after(sequential(), "0", SCALES, SHAPE, **options)
    torch.manual_seed(0)
    return NoisyModel(nn.Linear(64, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), SCALES, SHAPE, **options)


def packed_rows(model: NoisyModel, *leading: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand((*leading, *SHAPE), generator=generator)
    return model.pack(x, torch.randn((*leading, *model.hidden_shape), generator=generator))


def loss_of_one(logits, label):
    return cross_entropy(logits, label.expand(len(logits)))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_formula(normalize):
    """rest(A x + c + scales * e), with A the kernel, divided by rms(scales) times its whitened norm if it is normalized."""
    plain, model = sequential(), noisy(normalize=normalize)
    x, e = torch.rand((3, *SHAPE)), torch.randn((3, *model.hidden_shape))
    kernel = plain[0].weight
    if normalize:
        kernel = kernel / (SCALES.square().mean().sqrt() * operator_norm(plain[0], SHAPE, SCALES).float())
    z = torch.nn.functional.conv2d(x, kernel, plain[0].bias, 2, 1)
    assert torch.allclose(model(model.pack(x, e)), plain[1:](z + SCALES.reshape(-1, 1, 1) * e), atol=1e-5)
    assert torch.equal(model(x), model(model.pack(x, torch.zeros_like(e))))
    assert torch.allclose(model.hidden(x), z, atol=1e-6)
    assert model.noise_size == e[0].numel() and model.image_size == 64


@given(st.integers(0, 1000), st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_normalized_noise_is_worth_the_root_mean_square_of_its_scales(seed, size):
    """Whatever the weights and the scales are; with equal scales the norm of A is 1."""
    torch.manual_seed(seed)
    first = nn.Conv2d(2, 3, 3, padding=1)
    first.weight.data.mul_(size)
    scales = torch.rand(3) + 0.05
    folded = NoisyModel(first, nn.Identity(), scales, (2, 7, 7)).folded()
    worth = 1.0 / float(operator_norm(folded.first, (2, 7, 7), scales).detach())
    assert worth == pytest.approx(float(scales.square().mean().sqrt()), rel=1e-6)
    equal = NoisyModel(first, nn.Identity(), 0.3, (2, 7, 7)).folded()
    assert float(operator_norm(equal.first, (2, 7, 7)).detach()) == pytest.approx(1.0, rel=1e-6)


def test_a_folded_model_is_the_same_function():
    for kind in ("convolution", "linear"):
        model = noisy(kind)
        rows = packed_rows(model, 6)
        folded = model.folded()
        assert not folded.normalize and model.normalize
        assert torch.allclose(folded(rows), model(rows), atol=1e-6)
        assert not torch.equal(folded.first.weight, model.first.weight)  # the model itself is unchanged


@pytest.mark.parametrize("kind", ["convolution", "linear"])
@pytest.mark.parametrize("normalize", [False, True])
def test_per_example_gradients_go_through_the_norm(kind, normalize):
    """The fast engine, the reference engine and autograd of one example agree; a norm taken as a constant does not."""
    model, labels = noisy(kind, normalize=normalize), torch.tensor([0, 2, 1])
    views = packed_rows(model, 3, 2)
    expected = per_example_gradients(model, loss_of_one, views, labels)
    engine = Layerwise()
    found = engine.per_example(model, loss_of_one, views, labels)
    for name, gradient in expected.items():
        assert torch.allclose(found[name].instantiate(), gradient.flatten(1), atol=1e-6 * float(gradient.abs().max()) + 1e-7)
    assert engine._trace(model, tuple(views.shape[2:])) is not None  # all rows ran together
    for place in range(3):
        model.zero_grad()
        loss_of_one(model(views[place]), labels[place]).backward()
        assert torch.allclose(model.first.weight.grad, expected["first.weight"][place], atol=1e-6)
    along = (expected["first.weight"].flatten(1) @ model.first.weight.detach().flatten()).abs().max()
    size = expected["first.weight"].norm() * model.first.weight.norm()
    assert (along < 1e-5 * size) == normalize  # a normalized model does not change if its kernel is multiplied by a number


def test_the_gradient_of_the_norm_against_finite_differences():
    model = noisy().double()
    views, label = packed_rows(model, 1, 2).double(), torch.tensor([1])
    gradient = per_example_gradients(model, loss_of_one, views, label)["first.weight"][0]
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = []
    for step in (-1e-6, 1e-6):
        moved = noisy().double()
        moved.first.weight.data += step * direction
        values.append(float(loss_of_one(moved(views[0]), label[0]).detach()))
    assert (values[1] - values[0]) / 2e-6 == pytest.approx(float((gradient * direction).sum()), rel=1e-5)


def test_no_row_sees_another():
    """A proof for images and for packed rows; and removing one example moves the clipped sum by at most C."""
    model = noisy()
    for shape in (SHAPE, (64 + model.noise_size,)):
        assert reason_for_no_proof(model, shape) is None
        assert isinstance(each_row_alone(model, shape), nn.Module)
    views, labels = packed_rows(model, 5, 2), torch.tensor([0, 1, 2, 0, 1])
    views[2, :, 3] = float("nan")
    engine, clip = choose("auto", model, loss_of_one, tuple(views.shape[2:]))[0], Clip(CLIP_RULES["flat"], 0.1)
    whole = engine(model, loss_of_one, views, labels, clip).value
    assert torch.isfinite(whole).all()
    for left_out in range(5):
        rest = [place for place in range(5) if place != left_out]
        fewer = engine(model, loss_of_one, views[rest], labels[rest], clip).value
        assert float((whole - fewer).norm()) <= 0.1


def test_it_is_a_model_like_any_other():
    """It passes the checks of training, comes back from its weights with its scales, and has input gradients."""
    model = noisy(input_scale=0.25)
    check_model(model, SHAPE, 3)
    again = noise_after(sequential(), "0", 1.0, SHAPE)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.scales, SCALES) and float(again.input_scale) == 0.25
    x = torch.rand((2, *SHAPE), requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(for_input_gradients(model)(x).square().sum(), x)
    assert torch.allclose(found, expected, atol=1e-5)
    without = NoisyModel(nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), 0.1, SHAPE)
    assert [name for name, _ in without.named_parameters()] == ["first.weight"]


def test_weights_of_the_noise():
    scales = heterogeneous_scales(0.5, [0.1, 0.2, 0.3, 0.4])
    assert torch.allclose(scales, 0.5 * torch.sqrt(4 * torch.tensor([0.1, 0.2, 0.3, 0.4])))
    assert float(scales.square().mean().sqrt()) == pytest.approx(0.5)
    assert torch.allclose(heterogeneous_scales(0.5, [0.25] * 4), torch.full((4,), 0.5))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 3)

    def forward(self, x):
        return self.head((self.conv(x) + x).flatten(1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: noise_after(sequential(), "conv7", 0.1, SHAPE), "no layer 'conv7'"),
        (lambda: noise_after(sequential(), "2", SCALES, SHAPE), "not the first of the model.*use '0'"),
        (lambda: noise_after(nn.Sequential(nn.Tanh(), nn.Flatten()), "0", 0.1, SHAPE), "Tanh is not a linear layer"),
        (lambda: noise_after(Skip(), "conv", 0.1, SHAPE), "skip connection around 'conv'"),
        (lambda: noise_after(sequential(), "0", SCALES, (3, 8, 8)), "1 input channels"),
        (lambda: NoisyModel(nn.Linear(5, 2), nn.Identity(), 0.1, SHAPE), "5 inputs"),
        (lambda: noise_after(sequential(), "0", 0.0, SHAPE), "4 positive values"),
        (lambda: noise_after(sequential(), "0", [0.1, 0.1, 0.1, float("nan")], SHAPE), "4 positive values"),
        (lambda: noise_after(sequential(), "0", [0.1, 0.1], SHAPE), "4 positive values"),
        (lambda: noise_after(sequential(), "0", 0.1, SHAPE, input_scale=-1.0), "input_scale is -1.0"),
        (lambda: heterogeneous_scales(0.5, [0.5, 0.6]), "sum to 1.1, must sum to 1"),
        (lambda: heterogeneous_scales(0.5, [1.5, -0.5]), "must be positive"),
        (lambda: heterogeneous_scales(0.5, [1.0, 0.0]), "must be positive"),
        (lambda: heterogeneous_scales(0.5, [float("nan"), 1.0]), "must be positive"),
        (lambda: heterogeneous_scales(0.0, [0.5, 0.5]), "sigma is 0.0"),
        (lambda: noisy()(torch.zeros(2, 1, 9, 9)), r"shape \[1, 9, 9\], must be \[1, 8, 8\], or \[128\]"),
        (lambda: noisy()(torch.zeros(2, 100)), r"shape \[100\]"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ModelError, match=words) as error:
        make()
    assert "\n" not in str(error.value)
