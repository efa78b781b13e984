"""A training of eight steps in blocks of three, with a note of every gradient, learning rate and iterate."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpcert
from dpcert.training import lifecycle, loop
from dpcert.training.loop import Run
from tests.conftest import blobs

STEPS = 8
DATA = dpcert.Dataset(**blobs(0, train=24, test=12, size=4), classes=3, size=24)
METHOD = dpcert.method("dp-gaussian", sigma=0.25, copies=2)
BASE = {"epochs": STEPS / 4, "batch_size": 6, "learning_rate": 0.1, "noise_seed": 5}
FILES = ("model.safetensors", "ledger.jsonl", "config.toml", "training.tsv")


def fresh() -> nn.Module:
    return dpcert.build_model("linear", input_shape=(1, 4, 4), classes=3, seed=0)


def train(out: Path | None = None, **changes: Any) -> Run:
    return dpcert.train(fresh(), DATA, METHOD, out=out, **(BASE | changes))


def files(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in FILES}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@dataclass
class Notes:
    """What each step did."""

    gradients: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    iterates: list[Tensor] = field(default_factory=list)


@pytest.fixture
def notes(monkeypatch) -> Notes:
    noted, real = Notes(), loop.private_step

    def spy(context, step):
        noted.rates.append(context.optimizer.param_groups[0]["lr"])
        noted.gradients.append(real(context, step))
        noted.iterates.append(weights(context.model))
        return noted.gradients[-1]

    monkeypatch.setattr(loop, "private_step", spy)
    return noted


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    for module in ("dpcert.privacy.mechanism", loop.__name__, lifecycle.__name__):
        monkeypatch.setattr(f"{module}.STEPS_PER_BLOCK", 3)
