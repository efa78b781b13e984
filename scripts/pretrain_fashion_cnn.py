"""Pretrain the packaged classifier `fashion-cnn`: the convolutions of the paper's CNN, on Fashion-MNIST, under noise.

It is public with respect to MNIST: the frozen classifier behind MNIST's denoiser. `dpcert pretrain` refuses Fashion-MNIST,
which is a private data set elsewhere, so that is left to this script. A run on Fashion-MNIST with these weights is refused.

Usage:  python -m scripts.pretrain_fashion_cnn OUT.safetensors [EPOCHS]
"""

import sys
from pathlib import Path

import numpy as np
import torch

from dpcert.data.fingerprint import digests, sketch
from dpcert.data.registry import load_dataset
from dpcert.pretraining.images import PublicImages
from dpcert.pretraining.settings import Settings
from dpcert.pretraining.train import pretrain
from dpcert.store.durable import sha256_hex


def main(out: Path, epochs: int) -> None:
    """Train and write the weights with their card."""
    data = load_dataset("fashion-mnist")
    images = np.rint(data.x_train.numpy() * 255.0).astype(np.uint8)
    public = PublicImages(images, data.y_train.numpy(), np.zeros(len(images), np.int64), sketch(digests(images)), 0)
    about = {"data": "Fashion-MNIST (train)", "license": "MIT, Zalando", "data_sha256": sha256_hex(images.tobytes())}
    settings = Settings(model="feature-cnn", epochs=epochs, learning_rate=0.04, seed=0)
    card = pretrain(public, out, settings, about=about, progress=lambda done, total, **facts: print(done, total, end="\r"))
    print("\naccuracy on held-out images:", card["accuracy"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16)
