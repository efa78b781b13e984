"""BatchNorm folded into convolutions computes the same; what cannot be folded stays."""

import pytest
import torch
from torch import fx, nn

from dpcert.models.folding import fold_norms
from dpcert.models.resnet import resnet


class Shared(nn.Module):
    """One convolution before two different norms: folding either would change the other."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.first(self.conv(x)) + self.second(self.conv(x + 1.0))


class UsedTwice(Shared):
    """The output of the convolution is used by the norm and by the sum."""

    def forward(self, x):
        inner = self.conv(x)
        return self.first(inner) + self.second(inner)


def with_statistics(model):
    generator = torch.Generator().manual_seed(0)
    for layer in model.eval().modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and layer.track_running_stats:
            layer.running_mean.normal_(0.0, 0.5, generator=generator)
            layer.running_var.uniform_(0.2, 3.0, generator=generator)
            nn.init.uniform_(layer.weight, 0.5, 2.0, generator=generator)
            nn.init.normal_(layer.bias, generator=generator)
    return model


def norms_in(module):
    kept = {node.target for node in module.graph.nodes if node.op == "call_module"}
    return [name for name in kept if isinstance(module.get_submodule(name), (nn.BatchNorm1d, nn.BatchNorm2d))]


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2)), 0),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), 1),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), 1),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), 1),
        (resnet("resnet-32", (3, 12, 12), 5), 0),
        (Shared(), 2),
        (UsedTwice(), 2),
    ],
    ids=["chain", "norm first", "after a ReLU", "no statistics", "residual", "shared convolution", "output used twice"],
)
def test_a_folded_model_computes_the_same(model, kept):
    traced = fx.symbolic_trace(with_statistics(model))
    x = torch.randn((5, 3, 12, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(x)
        folded = fold_norms(traced)(x)
    assert torch.allclose(folded, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert len(norms_in(traced)) == kept


def test_a_norm_in_training_mode_is_not_folded():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    assert norms_in(fold_norms(fx.symbolic_trace(model))) == ["1"]
