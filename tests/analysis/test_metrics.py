"""The three per-sample metrics against oracles: dense Hessians, closed forms, another batch size; and twins that must fail."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import hessian

import dpcert
from dpcert.analysis import input_hessian
from dpcert.analysis.examples import Analyst, losses_of_labels
from dpcert.analysis.input_gradient import gradient_norm
from dpcert.analysis.input_hessian import Lanczos, spectral_norm
from dpcert.analysis.layers import feature_layer, features_of
from dpcert.analysis.lipschitz import BallSearch, local_lipschitz
from dpcert.errors import ModelError
from dpcert.rng import key_from_seed
from tests.conftest import trained_cnn

KEY = key_from_seed(0, "analyze")


@pytest.fixture
def small():
    """Numbers that depend on the test alone, not on the tests before it."""
    return torch.Generator().manual_seed(0)


def small_model(size=10, classes=4, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1, 6, 4, stride=2, padding=1), nn.MaxPool2d(2, 1), nn.Tanh(), nn.Flatten()]
        width = nn.Sequential(*layers)(torch.zeros(1, 1, size, size)).shape[1]
        model = nn.Sequential(*layers, nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, classes))
        for parameter in model.parameters():
            parameter.data *= 2  # curved enough that both ends of the spectrum matter
    return model


def analyst(model, x, layer=None, **search):
    return Analyst(model, x[0], KEY, layer, Lanczos(), BallSearch(**search))


def dense_norms(model, x, y):
    """Largest |eigenvalue| of the whole Hessian, in float64."""

    def loss(image, label):
        return nn.functional.cross_entropy(model(image[None]), label[None])

    found, model = [], copy.deepcopy(model).double().eval().requires_grad_(False)
    for image, label in zip(x.double(), y, strict=True):
        whole = hessian(loss)(image, label).reshape(image.numel(), image.numel())
        found.append(torch.linalg.eigvalsh(whole).abs().max())
    return torch.stack(found)


def inputs(count, size=10, classes=4):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 1, size, size, generator=generator), torch.arange(count) % classes


def worst(found, dense):
    return float(((found - dense).abs() / dense).max())


def test_hessian_norm_is_the_dense_one_on_50_examples(small):
    model, (x, y) = small_model(), inputs(50)
    found = analyst(model, x)(x, y, range(50))
    dense = dense_norms(model, x, y)
    assert worst(found.hessian_norm, dense) < 0.01 and found.hessian_residual.max() <= 1e-3
    precise = copy.deepcopy(model).double()
    one_product = Lanczos(tolerance=1e-3, most_products=1)  # the twin: a random direction is not an eigenvector

    def losses(images, labels):
        return losses_of_labels(precise(images), labels)

    norm, residual = spectral_norm(
        losses, x.double(), y, torch.randn(x.shape, dtype=torch.float64, generator=small), one_product
    )
    assert worst(norm, dense) > 0.01 and residual.min() > 0.01


def test_hessian_norm_is_the_dense_one_on_trained_mnist():
    model, x, y = trained_cnn(3)
    found = analyst(model, x)(x, y, range(3))
    assert worst(found.hessian_norm, dense_norms(model, x, y)) < 0.01


def quadratic(matrices):
    """Losses x'Ax/2 whose Hessians are known; the label says which A."""
    return lambda x, labels: 0.5 * torch.einsum("bi,bij,bj->b", x.flatten(1), matrices[labels], x.flatten(1))


def test_eigenvalues_of_equal_size_and_opposite_sign(small):
    """Power iteration would turn between the two for ever."""
    q, _ = torch.linalg.qr(torch.randn(30, 30, dtype=torch.float64, generator=small))
    spectrum = torch.linspace(-3, 3, 30, dtype=torch.float64)
    matrices = torch.stack([q @ torch.diag(scale * spectrum) @ q.T for scale in (1.0, 1e-9, 1e6)])
    start = torch.randn(3, 30, dtype=torch.float64, generator=small)
    norm, residual = spectral_norm(quadratic(matrices), torch.zeros(3, 30).double(), torch.arange(3), start)
    assert torch.allclose(norm, 3 * torch.tensor([1.0, 1e-9, 1e6]).double(), rtol=1e-5) and residual.max() < 1e-3


def test_zero_linear_and_negative_hessians(small):
    start = torch.randn(2, 5, dtype=torch.float64, generator=small)
    x, y = torch.rand(2, 5, dtype=torch.float64, generator=small), torch.arange(2)
    matrices = torch.stack([torch.zeros(5, 5), -2 * torch.eye(5)]).double()
    norm, residual = spectral_norm(quadratic(matrices), x, y, start)
    assert norm.tolist() == pytest.approx([0.0, 2.0]) and residual.max() < 1e-9
    norm, residual = spectral_norm(lambda x, labels: x.sum(dim=1), x, y, start)  # no curvature, no graph
    assert norm.tolist() == [0.0, 0.0] and residual.tolist() == [0.0, 0.0]


def test_one_bad_example_spoils_no_other(small):
    matrices = torch.stack([torch.eye(4), torch.full((4, 4), torch.nan), 3 * torch.eye(4)]).double()
    start = torch.randn(3, 4, dtype=torch.float64, generator=small)
    norm, residual = spectral_norm(quadratic(matrices), torch.rand(3, 4).double(), torch.arange(3), start)
    assert norm[[0, 2]].tolist() == pytest.approx([1.0, 3.0]) and norm[1].isnan() and residual[1].isnan()


def test_figures_do_not_depend_on_the_batch():
    """Examples stop at different numbers of products; a batch that stops together would show here."""
    model, x, y = trained_cnn(24)
    measure = analyst(model, x)
    together = measure(x, y, range(24))
    for size in (1, 7):
        parts = [measure(x[i : i + size], y[i : i + size], range(24)[i : i + size]) for i in range(0, 24, size)]
        for name in ("predict", "gradient_norm", "hessian_norm", "lipschitz"):
            whole, apart = getattr(together, name), torch.cat([getattr(part, name) for part in parts])
            assert torch.allclose(apart.double(), whole.double(), rtol=1e-7, atol=0.0), name
    moved = measure(x[[3]], y[[3]], [4])  # the twin: another index draws other numbers
    assert moved.lipschitz != together.lipschitz[3]


def test_products_are_taken_only_as_long_as_they_are_needed(monkeypatch, small):
    taken = []
    real = input_hessian._hessian_products

    def counted(losses, x, labels):
        product = real(losses, x, labels)
        return lambda vectors: taken.append(len(vectors)) or product(vectors)

    monkeypatch.setattr(input_hessian, "_hessian_products", counted)
    easy, hard = torch.diag(torch.linspace(0, 1, 60).pow(40)), torch.diag(torch.linspace(-1, 1, 60))
    matrices = torch.stack([*[easy] * 9, hard]).double()
    start = torch.randn(10, 60, dtype=torch.float64, generator=small)
    norm, residual = spectral_norm(quadratic(matrices), torch.zeros(10, 60).double(), torch.arange(10), start)
    assert torch.allclose(norm, torch.ones(10).double(), rtol=1e-2) and residual.max() <= 1e-3
    assert taken[0] == 10 and sum(taken) < 10 * len(taken)


def test_gradient_norm_against_finite_differences():
    model, (x, y) = small_model().double(), inputs(6)
    x = x.double()

    def losses(images, labels):
        return losses_of_labels(model(images), labels)

    found = gradient_norm(losses, x, y)
    slopes = torch.zeros(6, 100, dtype=torch.float64)
    with torch.no_grad():
        for place in range(100):
            shift = torch.zeros(100, dtype=torch.float64)
            shift[place] = 1e-6
            up, down = (losses(x + sign * shift.view(1, 1, 10, 10), y) for sign in (1, -1))
            slopes[:, place] = (up - down) / 2e-6
    assert torch.allclose(found, slopes.norm(dim=1), rtol=1e-5)


def test_the_loss_is_cross_entropy_and_exact_when_it_is_tiny(small):
    logits = torch.randn(20, 5, dtype=torch.float64, generator=small) * 8
    labels = torch.arange(20) % 5
    assert torch.allclose(losses_of_labels(logits, labels), nn.functional.cross_entropy(logits, labels, reduction="none"))
    certain = torch.tensor([[60.0, 0.0]], requires_grad=True)
    losses_of_labels(certain, torch.tensor([0])).sum().backward()
    assert certain.grad[0, 0] == pytest.approx(-np.exp(-60.0), rel=1e-5)
    usual = torch.tensor([[60.0, 0.0]], requires_grad=True)  # the twin: p_y - 1 is rounding here
    nn.functional.cross_entropy(usual, torch.tensor([0])).backward()
    assert usual.grad[0, 0] == 0.0


def test_lipschitz_of_a_linear_map_is_its_norm_from_linf_to_l1(small):
    """max over signs s of ||W s||_1; inputs in the middle of [0, 1], so that the whole ball is reachable."""
    weight = torch.randn(3, 8, dtype=torch.float64, generator=small)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 8).double()
    truth = (corners @ weight.T).abs().sum(dim=1).max()
    x = torch.full((128, 8), 0.5, dtype=torch.float64)  # so many starts that some ascent reaches the best corner's side
    start = torch.rand(128, 8, dtype=torch.float64, generator=small) * 2 - 1
    found = local_lipschitz(lambda x: x @ weight.T, x, start)
    assert (found <= truth * (1 + 1e-9)).all() and found.max() > 0.95 * truth
    no_ascent = local_lipschitz(lambda x: x @ weight.T, x[:16], start[:16], BallSearch(steps=0))
    assert (no_ascent <= found[:16]).all() and no_ascent.max() < 0.85 * truth  # the twin: random points find less


def test_lipschitz_stays_in_the_ball_and_in_the_pixel_range():
    seen = []

    def features(x):
        seen.append(x.detach().clone())
        return x.pow(2)

    x = torch.tensor([[0.0, 1.0, 0.5, 0.005]], dtype=torch.float64)
    local_lipschitz(features, x, torch.ones_like(x))
    assert len(seen) == 12 and all(((s - x).abs() <= 0.01 + 1e-12).all() and 0 <= s.min() <= s.max() <= 1 for s in seen)
    assert local_lipschitz(lambda x: 0 * x, x, torch.zeros_like(x)).item() == 0.0  # never left x
    assert local_lipschitz(lambda x: x * torch.nan, x, torch.ones_like(x)).isnan().all()


def test_the_layer_is_what_feeds_the_last_linear_one_or_the_one_named():
    model, (x, _) = small_model(), inputs(2)
    layer = feature_layer(model, x[0])
    assert layer == "input of 6" and feature_layer(model, x[0], "5") == "5"
    with torch.no_grad():
        assert torch.equal(features_of(small_model(), layer)(x), model[:6](x))
        assert torch.equal(features_of(small_model(), "2")(x), model[:3](x))
    with pytest.raises(ModelError, match="--layer 'head' is not a layer.*choose one of: 0, 1, 2"):
        feature_layer(model, x[0], "head")
    with pytest.raises(ModelError, match="no nn.Linear layer.*--layer: 0"):
        feature_layer(nn.Sequential(nn.Flatten()), x[0])
    assert feature_layer(dpcert.build_model("linear", input_shape=(1, 10, 10), classes=4), x[0]) == "input of 1"


def test_the_last_linear_layer_is_the_last_that_runs():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(5, 2), nn.Linear(4, 5)

        def forward(self, x):
            return self.head(self.body(x).tanh())

    assert feature_layer(Backwards(), torch.zeros(4)) == "input of head"


def test_the_model_is_left_alone():
    model, (x, y) = small_model(), inputs(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    analyst(model, x)(x, y, range(4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (
        model.training
        and all(p.requires_grad and p.grad is None for p in model.parameters())
        and not model[6]._forward_pre_hooks
    )


@pytest.mark.parametrize("wrong", [{"radius": 0.0}, {"step": -1.0}, {"steps": -1}, {"radius": float("nan")}])
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=f"lipschitz {next(iter(wrong))} is"):
        BallSearch(**wrong)
