"""Ours beside foolbox 3.3.4 on the published MNIST model: the same FGSM, a PGD that is no weaker."""

import pytest
import torch

from dpcert.attacks.kinds import attack
from dpcert.attacks.measure import Images, base_right, perturbed
from dpcert.rng import key_from_seed
from tests.conftest import trained_cnn

foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed: pip install '.[dev]'")
KEY = key_from_seed(0, "attack")


def setting(count):
    model, x, y = trained_cnn(10_000)
    chosen = list(range(0, 10_000, 10_000 // count))
    model = model.eval()
    return model, Images(x[chosen], y[chosen], chosen), foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")


def test_fgsm_gives_the_same_images_and_the_same_accuracy():
    model, images, theirs = setting(500)
    strengths = [0.0005, 0.01, 0.1, 0.5, 1.0]
    _, clipped, success = foolbox.attacks.LinfFastGradientAttack()(theirs, images.x, images.labels, epsilons=strengths)
    for strength, moved, fooled in zip(strengths, clipped, success, strict=True):
        ours = perturbed(model, images, attack("fgsm"), strength, KEY)
        same = torch.isclose(ours, moved, atol=1e-6).double().mean()
        assert same > 0.999  # the sign of a gradient that is 0 but for rounding may differ
        accuracy = base_right(model, images, attack("fgsm"), strength, KEY).double().mean()
        assert abs(float(accuracy) - float((~fooled).double().mean())) <= 1 / 500


@pytest.mark.parametrize(
    ("name", "theirs_of", "strengths"),
    [
        ("pgd-linf", lambda: foolbox.attacks.LinfPGD(steps=40), [0.05, 0.1, 0.2]),
        ("pgd-l2", lambda: foolbox.attacks.L2PGD(steps=50), [0.5, 1.5, 2.5]),
    ],
)
def test_pgd_is_at_least_as_strong_within_a_point(name, theirs_of, strengths):
    model, images, theirs = setting(100)
    torch.manual_seed(0)
    _, _, success = theirs_of()(theirs, images.x, images.labels, epsilons=strengths)
    for strength, fooled in zip(strengths, success, strict=True):
        ours = float(base_right(model, images, attack(name), strength, KEY).double().mean())
        assert ours <= float((~fooled).double().mean()) + 0.01, (strength, ours)
