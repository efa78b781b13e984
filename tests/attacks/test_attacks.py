"""FGSM and PGD against a linear model whose worst case is known, their balls, and the smoothed classifier's own radius."""

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn

from dpcert.attacks import measure
from dpcert.attacks.kinds import attack
from dpcert.attacks.measure import Images, SmoothedTarget, base_right, perturbed, smoothed_right
from dpcert.attacks.norms import L2, Linf
from dpcert.rng import key_from_seed
from tests.conftest import trained_cnn

KEY = key_from_seed(0, "attack")
SIZE = 36


class Halves(nn.Module):
    """Two classes by a linear function w'x + b: the distance to the border is known in every norm."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(SIZE, generator=generator) / 6)
        self.b = nn.Parameter(-0.5 * self.w.detach().sum())

    def forward(self, x):
        z = x.flatten(1) @ self.w + self.b
        return torch.stack([z, -z], dim=1)

    def margin(self, x):
        return (x.flatten(1) @ self.w + self.b).detach()


MODEL = Halves()


def images(count=200, near=0.3):
    """Points in the middle of [0, 1], so that no pixel range is in the way."""
    x = 0.5 + near * (torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(1)) - 0.5)
    return Images(x, (MODEL.margin(x) < 0).long(), range(count))


def distance(points, norm):
    dual = MODEL.w.norm() if norm == "l2" else MODEL.w.abs().sum()
    return (MODEL.margin(points.x).abs() / dual).detach()


@pytest.mark.parametrize("name", ["fgsm", "pgd-linf", "pgd-l2"])
def test_a_linear_model_falls_exactly_where_it_must(name):
    points, how = images(), attack(name)
    away = distance(points, how.norm)
    strength = float(away.median())
    right = base_right(MODEL, points, how, strength, KEY)
    clear = (away - strength).abs() > 0.02 * strength
    assert clear.sum() > 150 and torch.equal(right[clear], (away > strength)[clear])
    assert base_right(MODEL, points, how, 0.0, KEY).all()


@pytest.mark.parametrize("name", ["fgsm", "pgd-linf", "pgd-l2"])
@pytest.mark.parametrize("strength", [0.0, 0.01, 0.7, 5.0])
def test_images_stay_in_the_ball_and_in_the_pixel_range(name, strength):
    model, x, y = trained_cnn(12)
    points, how = Images(x, y, range(12)), attack(name, None if name == "fgsm" else 4)
    moved = perturbed(model, points, how, strength, KEY)
    offset = (moved - x).flatten(1)
    size = offset.norm(dim=1) if how.norm == "l2" else offset.abs().amax(dim=1)
    assert moved.min() >= -1e-7 and moved.max() <= 1 + 1e-7 and (size <= strength * (1 + 1e-5) + 1e-7).all()
    assert strength == 0 or (size > 0.5 * min(strength, 1)).all()


def test_fgsm_by_hand():
    model, x, y = trained_cnn(20)
    leaf = x.clone().requires_grad_()
    nn.functional.cross_entropy(model.eval()(leaf), y, reduction="sum").backward()
    by_hand = torch.clamp(x + 0.1 * leaf.grad.sign(), 0, 1)
    moved = perturbed(model, Images(x, y, range(20)), attack("fgsm"), 0.1, KEY)
    assert (torch.isclose(moved, by_hand, atol=1e-6)).double().mean() > 0.999
    downhill = torch.clamp(x - 0.1 * leaf.grad.sign(), 0, 1)  # the twin
    assert (torch.isclose(moved, downhill, atol=1e-6)).double().mean() < 0.8


def test_what_happens_to_an_image_does_not_depend_on_its_batch():
    model, x, y = trained_cnn(30)
    points, how = Images(x, y, range(30)), attack("pgd-l2", 5)
    whole = perturbed(model, points, how, 1.0, KEY)
    apart = torch.cat([perturbed(model, points[i : i + 7], how, 1.0, KEY) for i in range(0, 30, 7)])
    assert torch.allclose(apart, whole, atol=2e-3)
    assert not torch.allclose(perturbed(model, points, how, 1.0, KEY, start=1), whole, atol=2e-3)  # another start
    assert torch.equal(base_right(model, points, how, 2.0, KEY, batch=7), base_right(model, points, how, 2.0, KEY, batch=30))


def test_more_starts_and_more_strength_never_help_the_model():
    model, x, y = trained_cnn(60)
    points = Images(x, y, range(60))
    shares = [base_right(model, points, attack("pgd-linf", 8), s, KEY).double().mean() for s in (0.0, 0.05, 0.15, 0.3)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.9 and shares[-1] < 0.5
    one, three = (base_right(model, points, attack("pgd-linf", 8, starts), 0.15, KEY) for starts in (1, 3))
    assert not (three & ~one).any()


def test_the_random_start_is_tried_too():
    """A model that is wrong only where the gradient does not lead: the start is in the way, every step leads out of it."""

    class Trap(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            far = (x - 0.5).flatten(1)[:, 0] * self.w
            return torch.stack([far.abs() < 0.001, far.abs() >= 0.001], dim=1).float() + 0.0 * far[:, None]

    points = Images(torch.full((8, 1, 6, 6), 0.5), torch.zeros(8, dtype=torch.long), range(8))
    assert not base_right(Trap(), points, attack("pgd-linf", 1, 1), 0.2, KEY).any()
    assert base_right(Trap(), points, attack("fgsm"), 0.2, KEY).all()  # its one point is where the sign of 0 leads: the image


def test_right_is_what_the_end_of_the_ascent_says():
    """The points that foolbox is compared with are those the verdict is made from."""
    model, x, y = trained_cnn(40)
    points, how = Images(x, y, range(40)), attack("pgd-l2", 5, 1)
    moved = perturbed(model, points, how, 1.5, KEY)
    with torch.no_grad():
        stays = (model.eval()(moved).argmax(1) == y) & (model.eval()(x).argmax(1) == y)
    right = base_right(model, points, how, 1.5, KEY)
    assert torch.equal(right, stays) and 0 < right.sum() < 40


def test_random_starts_are_uniform_in_their_balls():
    """Kolmogorov-Smirnov accepts the law and rejects that of a start on the surface or of a normal one."""
    x, draws = torch.full((1, 2, 2), 0.5), range(2000)
    cube = torch.stack([Linf().random(KEY, x, i, 0, 0.25) - x for i in draws]).flatten(1) / 0.25
    assert kstest(cube[:, 1].numpy(), "uniform", args=(-1, 2)).pvalue > 1e-3 and cube.abs().max() <= 1
    ball = torch.stack([L2().random(KEY, x, i, 0, 0.25) - x for i in draws]).flatten(1) / 0.25
    lengths = ball.norm(dim=1).numpy()
    assert kstest(lengths**4, "uniform").pvalue > 1e-3 and lengths.max() <= 1 + 1e-5
    assert kstest(lengths, "uniform").pvalue < 1e-6  # the twin: a uniform radius crowds the centre
    assert abs(np.corrcoef(ball[:, 0], ball[:, 1])[0, 1]) < 0.1


def test_the_smoothed_linear_model_falls_at_its_own_radius():
    """The smoothed class of a linear model is its own class: the border does not move, and the attack must find it."""
    points, how, smoothing = images(60, near=0.8), attack("pgd-l2", 8, 1), SmoothedTarget(0.1, draws=8, votes=400)
    away = distance(points, "l2")
    strength = float(away.median())
    right = smoothed_right(MODEL, points, how, strength, KEY, smoothing)
    clear = (away - strength).abs() > 0.05  # half a sigma: 400 votes are then all but sure
    assert clear.sum() > 15 and torch.equal(right[clear], (away > strength)[clear])


def test_the_verdict_on_the_smoothed_model_uses_noise():
    """A model that is right without noise and wrong with it is wrong: the twin would look at the image alone."""

    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            rough = (x[:, :, 1:] - x[:, :, :-1]).abs().flatten(1).mean(dim=1) * self.scale
            return torch.stack([0.05 - rough, rough - 0.05], dim=1)

    points = Images(torch.full((5, 1, 6, 6), 0.5), torch.zeros(5, dtype=torch.long), range(5))
    assert base_right(Fragile(), points, attack("pgd-l2", 2), 0.0, KEY).all()
    assert not smoothed_right(Fragile(), points, attack("pgd-l2", 2), 0.0, KEY, SmoothedTarget(0.25, 4, 100)).any()


def test_a_tie_is_not_right():
    """A model whose classes are always even has no smoothed class: no vote is cast for the label, and none against it."""

    class Even(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return 0.0 * self.w * x.flatten(1)[:, :3]

    points = Images(torch.full((4, 1, 6, 6), 0.5), torch.arange(4) % 3, range(4))
    for name in ("fgsm", "pgd-l2"):
        how = attack(name, None if name == "fgsm" else 2)
        assert not smoothed_right(Even(), points, how, 0.1, KEY, SmoothedTarget(0.25, 4, 50)).any()


def test_every_step_of_every_start_sees_noises_of_its_own(monkeypatch):
    seen, real = [], measure._noises

    def spy(*arguments):
        seen.append(real(*arguments))
        return seen[-1]

    monkeypatch.setattr(measure, "_noises", spy)
    smoothed_right(MODEL, images(2), attack("pgd-l2", 3, 2), 0.1, KEY, SmoothedTarget(0.25, 4, 50))
    drawn = [noise.numpy().tobytes() for noises in seen for example in noises for noise in example]
    assert len(set(drawn)) == len(drawn) == 2 * 3 * 2 * 4  # starts, steps, images, draws


def test_a_nan_is_wrong():
    class Nan(Halves):
        def forward(self, x):
            return super().forward(x) * torch.nan

    assert not base_right(Nan(), images(4), attack("pgd-l2", 2), 0.1, KEY).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: attack("deepfool"), "attack 'deepfool' is unknown; choose one of: fgsm, pgd-linf, pgd-l2"),
        (lambda: attack("fgsm", steps=3), "fgsm takes one step"),
        (lambda: attack("pgd-l2", steps=0), "--steps is 0"),
        (lambda: attack("pgd-l2", starts=0), "--starts is 0"),
        (lambda: SmoothedTarget(0.0), "sigma is 0.0"),
        (lambda: SmoothedTarget(0.5, votes=0), "--n is 0"),
    ],
)
def test_bad_settings(make, words):
    with pytest.raises(ValueError, match=words):
        make()
