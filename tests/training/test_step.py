"""Several steps of Algorithm 2 written out by hand, with the batch cut into parts: each step has a batch, views and noise of its own."""

import pytest
import torch
from torch import nn

import dpcert
from dpcert.privacy import noise, sampling
from dpcert.rng import Purpose, key_from_seed, normal_at_positions
from dpcert.views import SmoothAdv
from tests.conftest import blobs

STEPS, BATCH, SIZE = 3, 24, 240


def by_hand(start: nn.Module, data: dpcert.Dataset, key: bytes, noise_multiplier: float) -> torch.Tensor:
    """Poisson batch, x and two noisy copies, mean loss, clip to 0.1, sum, noise, divide by B, descend; no library of ours but rng."""
    parameters = list(start.parameters())
    for step in range(STEPS):
        batch = sampling.poisson_indices(SIZE, BATCH / SIZE, key, step)
        eta = normal_at_positions(key, Purpose.VIEWS, 0, len(batch), (2, 1, 8, 8), torch.device("cpu"), step)
        total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        for place, index in enumerate(batch):
            x, y = data.x_train[index], data.y_train[index]
            views = torch.stack([x, x + 0.25 * eta[place, 0], x + 0.25 * eta[place, 1]])
            gradients = torch.autograd.grad(nn.functional.cross_entropy(start(views), y.expand(3)), parameters)
            g = torch.cat([part.flatten() for part in gradients]).double()
            total += g / max(1.0, float(g.norm()) / 0.1)
        total += noise_multiplier * 0.1 * torch.from_numpy(noise.standard_normal(len(total), key, step))
        with torch.no_grad():
            for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
                parameter -= (0.5 * part / BATCH).view_as(parameter)
    return torch.cat([p.detach().flatten() for p in parameters])


def test_the_warm_up_of_an_attack_is_counted_in_epochs(monkeypatch):
    """q = 1/10: after three steps a warm-up of 2 epochs is at 3 / 20 of its radius, not past its end."""
    ramped, real = [], SmoothAdv.at

    def at(views, epoch):
        ramped.append(real(views, epoch))
        return ramped[-1]

    monkeypatch.setattr(SmoothAdv, "at", at)
    data = dpcert.Dataset(**blobs(0), classes=3, size=SIZE)
    method = dpcert.method("dp-smoothadv", sigma=0.25, smoothadv_warmup=2.0)
    run = dpcert.train(
        "linear", data, method, epochs=4 * BATCH / SIZE + 1e-9, batch_size=BATCH, noise_seed=5, physical_batch=10_000
    )
    assert run.plan.steps == 4
    strengths = list(dict.fromkeys(views.strength for views in ramped))  # the parts of a step have the same
    assert strengths == pytest.approx([0.0, 0.05, 0.1, 0.15])


@pytest.mark.parametrize("physical_batch", [480, 20])
def test_several_steps_by_hand(physical_batch):
    data = dpcert.Dataset(**blobs(0), classes=3, size=SIZE)
    start, trained = (dpcert.build_model("linear", input_shape=(1, 8, 8), classes=3, seed=0) for _ in range(2))
    method = dpcert.method("dp-gaussian", sigma=0.25, copies=2)
    epochs = STEPS * BATCH / SIZE + 1e-9
    options = {"learning_rate": 0.5, "momentum": 0.0, "noise_seed": 5, "physical_batch": physical_batch}
    run = dpcert.train(trained, data, method, epochs=epochs, batch_size=BATCH, **options)
    assert run.plan.steps == STEPS
    expected = by_hand(start, data, key_from_seed(5, "noise"), run.plan.noise_multiplier)
    found = torch.cat([p.detach().flatten() for p in trained.parameters()])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
