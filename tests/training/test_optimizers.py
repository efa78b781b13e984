"""Optimizers: PyTorch's, on the same noised gradients."""

import pytest
import torch

from dpcert.training.optimizers import OPTIMIZERS
from tests.training.knobs import fresh, notes, train, weights

__all__ = ["notes"]
PYTORCHS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}, {}),
    "adam": (torch.optim.Adam, {}, {}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.3}, {"weight_decay": 0.3}),
}


def replayed(kind, options, gradients):
    """A plain PyTorch loop over gradients that were noted."""
    model = fresh()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / len(gradients))
    for gradient in gradients:
        sizes = [p.numel() for p in model.parameters()]
        for parameter, part in zip(model.parameters(), gradient.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).float()
        optimizer.step()
        schedule.step()
    return weights(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_pytorchs_on_the_same_noised_gradients(name, notes):
    """Twins: no weight decay, Adam's (which goes through the moments), and any other optimizer of the table."""
    kind, options, asked = PYTORCHS[name]
    run = train(optimizer=name, schedule="linear", **asked)
    assert torch.equal(weights(run.model), replayed(kind, options, notes.gradients))
    twins = [other[:2] for key, other in PYTORCHS.items() if key != name]
    twins += [(torch.optim.AdamW, {"weight_decay": 0.0}), (torch.optim.Adam, {"weight_decay": 0.3})] if asked else []
    for twin in twins:
        assert not torch.allclose(weights(run.model), replayed(*twin, notes.gradients), atol=1e-4)


def test_adamw_decays_by_a_hundredth_unless_told_otherwise(notes):
    run = train(optimizer="adamw", schedule="linear")
    assert torch.equal(weights(run.model), replayed(torch.optim.AdamW, {}, notes.gradients))
