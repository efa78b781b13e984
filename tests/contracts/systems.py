"""Tiny models of the prior systems, fresh and trained, with images to look at them with."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import dpcert
from dpcert.methods import PRIOR, Method, noise_shape
from dpcert.models.denoiser import Denoised
from dpcert.models.systems import DENOISER, as_system
from tests.conftest import blobs

SOUND = ("pixeldp", "securesgd", "dp-denoiser", "stobatch")
SHAPE, CLASSES = (1, 8, 8), 3


def method_of(name: str, **settings) -> Method:
    return dpcert.method(name, sigma=0.5, copies=2, **settings)


def network() -> nn.Sequential:
    hidden = nn.Conv2d(1, 4, 3, stride=2, padding=1)
    return nn.Sequential(hidden, nn.MaxPool2d(2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES))


def fresh(name: str) -> nn.Module:
    torch.manual_seed(1)
    system = PRIOR[name].system
    if system == DENOISER:
        frozen = network().requires_grad_(False)
        frozen[-1].requires_grad_(True)
        return Denoised(frozen, 1, depth=3, width=8)
    return as_system(system, network(), SHAPE, 0.5)


def images(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = blobs(0, train=count)
    return torch.from_numpy(arrays["x_train"]).unsqueeze(1), torch.from_numpy(arrays["y_train"])


def noise_for(method: Method, model: nn.Module, count: int, seed: int = 0) -> torch.Tensor:
    shape = (count, method.views.copies, *noise_shape(method.views, model, SHAPE))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def trained(name: str) -> nn.Module:
    """Fitted without privacy until its answers are confident: leaks that hide at initialization show here."""
    model, (x, labels) = fresh(name), images()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model


def model_of(name: str, kind: str) -> nn.Module:
    return trained(name) if kind == "trained" else fresh(name)
