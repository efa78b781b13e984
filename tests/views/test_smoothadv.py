"""SmoothAdv views against a plain loop over examples, their bounds, and what must not happen between examples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpcert
from dpcert.errors import ConfigError, ModelError
from dpcert.training.step import check_views
from dpcert.views import Gaussian, SmoothAdv
from tests.conftest import trained_cnn


def cnn(seed=0):
    return dpcert.build_model("cnn", input_shape=(1, 18, 18), classes=4, seed=seed)


def made(b, k, seed=0, size=18):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(b, 1, size, size, generator=g)
    return x, torch.randint(0, 4, (b,), generator=g), torch.randn(b, k, 1, size, size, generator=g)


def attack_by_hand(views, model, x, label, noise):
    """Salman et al.'s attack on one example, written as a plain loop in float64."""
    model, x, eta = copy.deepcopy(model).double(), x.double(), views.sigma * noise.double()
    moved = x.clone()
    for _ in range(views.steps):
        moved = moved.detach().requires_grad_()
        p = F.softmax(model(moved + eta), dim=1)[:, label].mean()
        (gradient,) = torch.autograd.grad(-torch.log(p), moved)
        moved = (moved + 2 * views.radius / views.steps * gradient / gradient.norm()).clamp(0, 1)
        offset = moved - x
        moved = x + offset * min(1.0, views.radius / max(float(offset.detach().norm()), 1e-30))
    return moved.detach()


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_equals_a_plain_loop_over_examples(steps, copies):
    views, model = SmoothAdv(0.25, copies, radius=0.5, steps=steps), cnn()
    x, labels, noise = made(6, copies)
    found = views(model, x, labels, noise)
    assert found.shape == (6, copies + 1, 1, 18, 18) and torch.equal(found[:, 0], x)
    for i in range(6):
        moved = attack_by_hand(views, model, x[i], int(labels[i]), noise[i])
        torch.testing.assert_close(found[i, 1:].double(), moved + 0.25 * noise[i].double(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("epoch", [2.5, 7.0])
def test_on_the_way_up_it_is_the_same_attack_with_a_smaller_radius(epoch):
    """Steps shrink with the ball: a step of the full size would leave it and slide along its surface."""
    model, (x, labels, noise) = cnn(), made(6, 2)
    found = SmoothAdv(0.25, 2, radius=2.0, steps=3, warmup=10.0).at(epoch)(model, x, labels, noise)
    smaller = SmoothAdv(0.25, 2, radius=2.0 * epoch / 10.0, steps=3)
    for i in range(6):
        moved = attack_by_hand(smaller, model, x[i], int(labels[i]), noise[i])
        torch.testing.assert_close(found[i, 1:].double(), moved + 0.25 * noise[i].double(), rtol=0, atol=1e-3)


@settings(max_examples=25)
@given(
    radius=st.floats(0.01, 5.0),
    steps=st.integers(1, 4),
    copies=st.integers(1, 3),
    epoch=st.floats(0.0, 20.0),
    seed=st.integers(0, 1000),
)
def test_stays_in_the_ball_and_in_the_pixel_range(radius, steps, copies, epoch, seed):
    x, labels, noise = made(3, copies, seed)
    views = SmoothAdv(0.25, copies, radius=radius, steps=steps).at(epoch)
    moved = views(cnn(seed), x, labels, noise)[:, 1:] - 0.25 * noise
    offset = (moved - x.unsqueeze(1)).flatten(2).norm(dim=2)
    assert float(offset.max()) <= radius * min(1.0, epoch / 10.0) * (1 + 1e-5) + 1e-5
    assert float(moved.min()) >= -1e-5 and float(moved.max()) <= 1 + 1e-5


def test_raises_the_loss_it_attacks():
    model, x, labels = trained_cnn()
    noise = torch.randn(len(x), 4, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def loss(views):
        f = F.softmax(model(views[:, 1:].flatten(0, 1)), dim=1).unflatten(0, (len(x), 4))
        return -torch.log(f.mean(dim=1).gather(1, labels[:, None])).squeeze(1)

    with torch.no_grad():
        plain = loss(Gaussian(0.5, 4)(model, x, labels, noise))
        attacked = loss(SmoothAdv(0.5, 4, radius=0.5)(model, x, labels, noise))
    assert float((attacked > plain).float().mean()) > 0.95 and float(attacked.mean()) > 1.3 * float(plain.mean())


def test_the_radius_grows_with_the_epochs():
    views = SmoothAdv(radius=0.4, warmup=10.0)
    assert [views.at(epoch).strength for epoch in (0.0, 2.5, 10.0, 40.0)] == [0.0, 0.25, 1.0, 1.0]
    assert SmoothAdv(warmup=0.0).at(0.0).strength == 1.0
    x, labels, noise = made(3, 2)
    at_the_start = views.at(0.0)(cnn(), x, labels, noise)
    torch.testing.assert_close(at_the_start, Gaussian(0.5, 2)(cnn(), x, labels, noise), rtol=0, atol=1e-6)


def test_a_zero_gradient_moves_in_a_random_direction_of_its_own():
    model = cnn()
    nn.init.zeros_(model[-1].weight)
    x, labels, noise = made(4, 2)
    moved = SmoothAdv(0.25, 2, radius=0.5)(model, x, labels, noise)[:, 1] - 0.25 * noise[:, 0]
    lengths = (moved - x).flatten(1).norm(dim=1)
    assert torch.isfinite(moved).all() and float(lengths.min()) > 0.2
    directions = F.normalize((moved - x).flatten(1))
    assert float((directions @ directions.T - torch.eye(4)).abs().max()) < 0.3


def test_tiny_gradients_keep_their_direction():
    """A saturated model: gradients of 1e-30 have squares below the smallest float."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(324, 4))
    with torch.no_grad():
        model[1].weight.mul_(1e-30)
    x, labels, noise = made(3, 2)
    views = SmoothAdv(0.25, 2, radius=0.5)
    moved = views(model, x, labels, noise)[:, 1] - 0.25 * noise[:, 0]
    with torch.no_grad():
        model[1].weight.mul_(1e27)  # 1e-3: the same softmax, and gradients that have squares
    expected = views(model, x, labels, noise)[:, 1] - 0.25 * noise[:, 0]
    cosine = F.cosine_similarity((moved - x).flatten(1), (expected - x).flatten(1))
    assert float(cosine.min()) > 0.9999


def test_same_arguments_same_views_and_no_trace():
    model = cnn()
    x, labels, noise = made(5, 2)
    weights = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    first, second = (SmoothAdv()(model, x, labels, noise) for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("b", [2, 5, 12])
def test_no_example_moves_the_view_of_another(b):
    model = cnn()
    x, labels, noise = made(b, 2)
    before = SmoothAdv()(model, x, labels, noise)
    for j in range(b):
        other, other_labels, other_noise = x.clone(), labels.clone(), noise.clone()
        other[j], other_labels[j], other_noise[j] = 1 - x[j], (labels[j] + 1) % 4, -noise[j]
        after = SmoothAdv()(model, other, other_labels, other_noise)
        rest = [i for i in range(b) if i != j]
        assert torch.equal(before[rest], after[rest]) and not torch.equal(before[j], after[j])


class Shifted(SmoothAdv):
    """The authors' fault: a row carries the perturbation made for its neighbour."""

    def __call__(self, model, x, labels, noise):
        eta = self.sigma * noise
        offset = super().__call__(model, x, labels, noise)[:, 1:] - eta - x.unsqueeze(1)
        return torch.cat([x.unsqueeze(1), x.unsqueeze(1) + offset.roll(1, dims=0) + eta], dim=1)


class AxesSwapped(Gaussian):
    """The authors' other fault: sample-major rows read view-major."""

    def __call__(self, model, x, labels, noise):
        views = super().__call__(model, x, labels, noise)
        return views.flatten(0, 1).unflatten(0, (self.count, len(x))).transpose(0, 1)


@pytest.mark.parametrize("views", [Shifted(), AxesSwapped()], ids=["shifted", "swapped"])
def test_twins_are_refused_before_training(views):
    with pytest.raises(ModelError, match="mix examples"):
        check_views(views, cnn(), (1, 18, 18))


def test_no_examples_no_views():
    x, labels, noise = made(0, 2)
    assert SmoothAdv()(cnn(), x, labels, noise).shape == (0, 3, 1, 18, 18)
    assert SmoothAdv(keep_original=False)(cnn(), x, labels, noise).shape == (0, 2, 1, 18, 18)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"copies": 0}, "at least one noisy copy"),
        ({"copies": -1}, "method.copies"),
        ({"radius": 0.0}, "smoothadv_radius"),
        ({"radius": -1.0}, "smoothadv_radius"),
        ({"radius": float("nan")}, "smoothadv_radius"),
        ({"steps": 0}, "smoothadv_steps"),
        ({"warmup": -1.0}, "smoothadv_warmup"),
        ({"sigma": 0.0}, "method.sigma"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        SmoothAdv(**changes)
