"""Compute the feature statistics of stages 1 and 2 of a packaged backbone, for ``model.stages``, from public images.

As for the last stage in ``dpcert pretrain``: means over positions, under the noise of pretraining.

    python scripts/stage_statistics.py PUBLIC.npz resnet-48
"""

import sys
from importlib import resources
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from dpcert.models.resnet import resnet
from dpcert.models.weights import load_public as load_weights
from dpcert.models.weights import read_weights
from dpcert.pretraining.images import NOISE_LAW, epoch_order, load_public, noisy_batch
from dpcert.rng import key_from_seed
from dpcert.store.durable import canonical_json, write_atomically
from dpcert.store.weights import with_sorted_header

BATCHES, ROWS = 32, 256


@torch.no_grad()
def main() -> None:
    """Write pretrained/NAME-stages.safetensors in the package."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    weights, data, key = read_weights(name), load_public(path, {}), key_from_seed(0, "stage statistics")
    model = resnet(name, data.shape, 10)
    load_weights(model, weights)
    model.stages = (1, 2)
    parts = np.array_split(epoch_order(len(data), key, 0)[: BATCHES * ROWS], BATCHES)
    features = torch.cat(
        [model.features(noisy_batch(data, part, key, step, torch.device("cpu"))) for step, part in enumerate(parts)]
    )
    width = features.shape[1] // 3
    tensors = {}
    for stage, columns in ((1, features[:, :width]), (2, features[:, width:])):
        tensors[f"stage{stage}.mean"] = columns.double().mean(dim=0).float()
        tensors[f"stage{stage}.scale"] = columns.double().std(dim=0).clamp_min(1e-3).float()
    card = {"weights_sha256": weights.sha256, "data": weights.data, "noise": NOISE_LAW, "images": len(features)}
    body = with_sorted_header(safetensors.torch.save(tensors, metadata={"dpcert_card": canonical_json(card)}))
    folder = Path(str(resources.files("dpcert.models"))) / "pretrained"
    write_atomically(folder / f"{name}-stages.safetensors", body)


if __name__ == "__main__":
    main()
