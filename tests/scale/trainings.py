"""Small trainings that run on any number of ranks, and broken steps that they must tell from the real one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import dpcert
from dpcert.models.spec import ModelSpec
from dpcert.models.systems import as_system
from dpcert.rng import key_from_seed
from dpcert.scale.world import join
from dpcert.training import loop, step
from dpcert.training.step import StepContext
from tests.conftest import blobs

STEPS = 50
DATA = dpcert.Dataset(**blobs(0), classes=3, size=240)
BASE = {"epochs": STEPS / 10 + 1e-9, "batch_size": 24, "learning_rate": 0.5, "clip_norm": 0.1, "noise_seed": 5}
HEAD = {"steps": 20, "learning_rate": 0.5, "clip_norm": 0.3, "copies": 3, "budget": 0.4, "averaging": "tail"}
GAUSSIAN = dpcert.method("dp-gaussian", sigma=0.25, copies=2)
SMOOTHADV = dpcert.method("dp-smoothadv", sigma=0.25, copies=2, smoothadv_warmup=1.0)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp-gaussian": (GAUSSIAN, {}),
    "dp-smoothadv": (SMOOTHADV, {}),
    # three examples at a time: as many parts as in a large batch, shared out among the ranks
    "many parts": (GAUSSIAN, {"physical_batch": 9}),
    "empty shares": (GAUSSIAN, {"batch_size": 1, "epochs": 0.2}),
    "adam, averaged": (GAUSSIAN, {"optimizer": "adam", "learning_rate": 0.01, "momentum": 0.0, "averaging": "ema"}),
    "head on all records, then all": (GAUSSIAN, {"head": HEAD, "epochs": 1}),
    "noise inside": (dpcert.method("pixeldp", sigma=0.25), {"system": "pixeldp"}),
    "noise inside, charged weights": (dpcert.method("securesgd", sigma=0.25), {"system": "charged"}),
    "head on sampled records": (GAUSSIAN, {"head": HEAD | {"batch_size": 60}, "epochs": 1}),
}


PAPER_CASES = ("dp-gaussian", "dp-smoothadv")


def network(system: str | None = None) -> nn.Module:
    torch.manual_seed(3)
    if system is not None:
        trunk = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
        if system == "charged":
            spec = ModelSpec("own", system="securesgd", noise=0.25, noise_weights="charged")
            return spec.build((1, 8, 8), 3, factory=lambda *_: trunk)
        return as_system(system, trunk, (1, 8, 8), 0.25)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(case: str, **more: Any) -> tuple[bytes, np.ndarray]:
    """Return the ledger and the weights."""
    method, changes = CASES[case]
    with mock.patch("dpcert.privacy.accounting.calibrate", return_value=1.1):  # takes seconds, and is not what is tested
        keys = BASE | changes | more
        run = dpcert.train(network(keys.pop("system", None)), DATA, method, **keys)
    return run.ledger.as_bytes(), weights(run.model).numpy()


def noise_per_rank(context: StepContext, number: int) -> Tensor:
    """Each rank adds noise to its own sum."""
    batch = torch.from_numpy(context.mechanism.sample(len(context.labels), number))
    share = step.clipped_sum(context, batch, number, context.physical_batch)
    noisy = replace(share, value=context.mechanism.release(share, number))
    gradient = context.world.sum(noisy).value
    step._descend(context, gradient)
    return gradient


def normalization_per_rank(context: StepContext, number: int) -> Tensor:
    """Each rank divides by the size of its share, and the means are averaged."""
    batch = torch.from_numpy(context.mechanism.sample(len(context.labels), number))
    share = step.clipped_sum(context, batch, number, context.physical_batch)
    mean = context.world.sum(replace(share, value=share.value / max(1, len(share.norms)))).value / context.world.size
    noisy = context.mechanism.release(replace(share, value=mean * context.batch_size), number)
    step._descend(context, noisy)
    return noisy


def sampling_per_rank(context: StepContext, number: int) -> Tensor:
    """Each rank draws its batch from its own stream."""
    own = replace(context.mechanism, key=key_from_seed(context.world.rank, "twin"))
    return step.private_step(replace(context, mechanism=own), number)


TWINS: dict[str, Callable[[StepContext, int], Tensor]] = {
    "noise per rank": noise_per_rank,
    "normalization per rank": normalization_per_rank,
    "sampling per rank": sampling_per_rank,
}


def all_cases() -> dict[str, tuple[bytes, np.ndarray]]:
    """Run on a rank: every case; with two ranks also every twin on the first two cases."""
    found = {case: train(case) for case in CASES}
    for name, twin in TWINS.items() if join().size == 2 else ():
        for case in PAPER_CASES:
            with mock.patch.object(loop, "private_step", twin):
                found[f"{case}, {name}"] = train(case)
    return found
