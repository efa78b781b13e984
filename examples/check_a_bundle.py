"""Share a run as one file, check it without secrets, and detect a forged radius."""

import sys
import zipfile
from pathlib import Path

import numpy as np

from dpcert.cli import main


def dpcert(*words: str) -> int:
    """Run one command as in a terminal and return its exit code."""
    print(f"\n$ dpcert {' '.join(words)}", flush=True)
    try:
        main(list(words))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def write_data(path: Path) -> None:
    """Write small images of two classes: dark in the upper half, or in the lower half."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 1200)
    images = generator.uniform(0.5, 1.0, (1200, 8, 8)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        image[4 * label : 4 * label + 4] -= 0.5
    np.savez(path, x_train=images[:1000], y_train=labels[:1000], x_test=images[1000:], y_test=labels[1000:])


def forge(bundle: Path, forged: Path) -> None:
    """Copy the bundle with a larger radius in the first certificate."""
    with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(forged, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "certificates-sigma0.50.tsv":
                head, first, *others = content.decode().splitlines()
                cells = first.split("\t")
                cells[head.split("\t").index("radius")] = "9.0"
                content = "\n".join([head, "\t".join(cells), *others, ""]).encode()
            target.writestr(name, content)


write_data(Path("images.npz"))
settings = ["data.path=images.npz", "data.classes=2", "model.name=linear", "train.epochs=3", "train.batch_size=50"]
dpcert("train", *(word for setting in settings for word in ("--set", setting)), "--out", "runs/shared")
dpcert("certify", "runs/shared", "--examples", "20")

# 1. The owner exports the run. The bundle contains no key, no checkpoint and no data.
Path("model.zip").unlink(missing_ok=True)  # export never overwrites a file
dpcert("export", "runs/shared", "model.zip")

# 2. Anyone can check it: verify recomputes epsilon from the ledger and each radius from its votes.
if dpcert("verify", "model.zip") != 0:
    sys.exit("the bundle should pass")

# 3. A forged certificate is detected: verify names the file and exits with code 2.
forge(Path("model.zip"), Path("forged.zip"))
if dpcert("verify", "forged.zip") != 2:
    sys.exit("the forgery should be detected")
