"""C8: an attack on the vote of a trained model with noise inside; inside the certificates it changes no class."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcert
from dpcert.certification import smooth
from dpcert.certification.sweep import SmoothedClassifier
from dpcert.models.noisy import NoisyModel

STEPS, DRAWS, ALPHA, VOTES = 8, 8, 1e-6, 500


def trained(input_scale: float) -> tuple[NoisyModel, torch.Tensor]:
    """A small model, trained with its noise on 2,000 digits, and test images. About a second."""
    data = dpcert.load_dataset("mnist")
    torch.manual_seed(0)
    rest = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    model = NoisyModel(nn.Conv2d(1, 8, 5, 2, 2), rest, 0.3, (1, 28, 28), input_scale=input_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x, y = data.x_train[:2000], data.y_train[:2000]
    for _ in range(120):
        rows = torch.randint(len(x), (64,))
        loss = F.cross_entropy(model(noisy_rows(model, x[rows])), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False), data.x_test[:30]


def noisy_rows(model: NoisyModel, x: torch.Tensor) -> torch.Tensor:
    inner = torch.randn((len(x), *model.hidden_shape))
    return model.pack(x + model.input_scale * torch.randn_like(x), inner)


def attacked(model: NoisyModel, x: torch.Tensor, classes: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Ascent on -log of the mean softmax over noises, projected to L2 balls; nothing is clamped to [0, 1]."""
    shift, r = torch.zeros_like(x), radius.float().view(-1, 1, 1, 1)
    for _ in range(STEPS):
        shift.requires_grad_(True)
        many = (x + shift).repeat(DRAWS, 1, 1, 1)
        share = F.softmax(model(noisy_rows(model, many)), dim=1).unflatten(0, (DRAWS, len(x))).mean(dim=0)
        (gradient,) = torch.autograd.grad(-share.gather(1, classes[:, None]).clamp(min=1e-12).log().sum(), shift)
        norms = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1).clamp(min=1e-12)
        shift = shift.detach() + 2.5 / STEPS * r * gradient / norms
        shift = shift * (r / shift.flatten(1).norm(dim=1).view(-1, 1, 1, 1).clamp(min=1e-12)).clamp(max=1.0)
    return x + shift


@pytest.mark.parametrize("input_scale", [0.0, 0.2])
def test_no_attack_inside_a_certificate_changes_the_class(input_scale, evidence):
    model, x = trained(input_scale)
    classifier = SmoothedClassifier(model)
    found = classifier.certify(x, n=VOTES, seed=0)
    sure = found.predict >= 0
    x, classes, radius = x[sure], found.predict[sure], found.radius[sure]
    assert len(x) >= 20

    def changed(factor: float) -> int:
        answers = classifier.predict(attacked(model, x, classes, factor * radius), n=VOTES, alpha=ALPHA)
        return int(((answers != classes) & (answers != smooth.ABSTAIN)).sum())

    assert changed(0.999) == 0
    broken = changed(4.0)
    assert broken > 0
    evidence(
        "C8",
        figure=f"input noise {input_scale:g}: 0 class changes on {len(x)} certified points attacked inside 0.999 r",
        trials=len(x),
        twin=f"radii times 4: {broken} changed",
    )
