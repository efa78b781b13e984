"""Writes the sketches by which `dpcert pretrain` recognizes images of the registered private sets.

    DPCERT_DATA=... python scripts/private_sketches.py src/dpcert/data/private_sketches.txt

A line is the name of a set and the smallest digests of its images, training and test together (`dpcert.data.fingerprint`).
"""

import sys
from pathlib import Path

from dpcert.data.fingerprint import digests, sketch
from dpcert.data.registry import SOURCES, load_dataset


def main() -> None:
    """Write the file named on the command line."""
    lines = []
    for name in SOURCES:
        data = load_dataset(name)
        lines.append(" ".join([name, *sketch([*digests(data.x_train.numpy()), *digests(data.x_test.numpy())])]))
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
