"""List the images of a public set that nearly repeat an image of CIFAR-10, so that `dpcert pretrain` can leave them out.

    python scripts/near_duplicates.py PUBLIC.npz cifar-10-batches-bin src/dpcert/pretraining/near_duplicates.txt

Run once, on the published CIFAR-10; the list is committed and never recomputed by the product. A public image is listed if
its pixels, or those of its mirror image, correlate above `THRESHOLD` with one of the 60,000 CIFAR-10 images. Every pair is
first compared at 8 x 8 pixels; the best candidates are compared again at 32 x 32. The list has the first 16 hex digits of the
SHA-256 of each public image's bytes (uint8, channels first).
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpcert.data.fingerprint import digest

THRESHOLD = 0.90
CANDIDATE = 0.85  # of the 8 x 8 pixels: well below what a pair above THRESHOLD can reach
CANDIDATES = 8
BLOCK = 2_000


def unit(images: Tensor, size: int) -> Tensor:
    """Images as unit vectors with mean 0, reduced to `size` x `size` pixels: their products are correlations."""
    reduced = torch.nn.functional.adaptive_avg_pool2d(images.float(), size).flatten(1)
    return torch.nn.functional.normalize(reduced - reduced.mean(dim=1, keepdim=True))


def correlations(public: Tensor, reference: Tensor) -> Tensor:
    """The largest correlation of each public image, or its mirror image, with a reference image."""
    coarse_reference = unit(reference, 8)
    largest = torch.zeros(len(public))
    for start in range(0, len(public), BLOCK):
        for images in (public[start : start + BLOCK], public[start : start + BLOCK].flip(3)):
            coarse, candidates = (unit(images, 8) @ coarse_reference.T).topk(CANDIDATES)
            for row in (coarse[:, 0] > CANDIDATE).nonzero().flatten().tolist():
                fine = unit(images[row : row + 1], 32) @ unit(reference[candidates[row]], 32).T
                largest[start + row] = max(largest[start + row], fine.max())
        print(f"\r{start + len(images)} of {len(public)}", end="", file=sys.stderr)
    return largest


def main() -> None:
    """Compare the public images with CIFAR-10 and write the list."""
    public_file, cifar_folder, out = map(Path, sys.argv[1:4])
    with np.load(public_file) as archive:
        public = archive["x"]
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in sorted(cifar_folder.glob("*.bin"))])
    reference = records[:, 1:].reshape(-1, 3, 32, 32)
    largest = correlations(torch.from_numpy(public), torch.from_numpy(reference)).numpy()
    if len(sys.argv) > 4:
        np.save(sys.argv[4], largest)
    listed = sorted({digest(public[index]) for index in np.flatnonzero(largest > THRESHOLD)})
    what = f"{len(listed)} of {len(public)} public images correlate above {THRESHOLD} with a CIFAR-10 image"
    lines = [f"# {what}; scripts/near_duplicates.py", *listed]
    out.write_text("\n".join(lines) + "\n")
    print(f"\n{len(listed)} near-duplicates: {out}")


if __name__ == "__main__":
    main()
