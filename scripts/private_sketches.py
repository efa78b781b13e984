"""Write the sketches that `dpcert pretrain` uses to recognize images of the registered private data sets.

    DPCERT_DATA=... python scripts/private_sketches.py src/dpcert/data/private_sketches.txt

A line has the name of a data set and the smallest digests of its training and test images (`dpcert.data.fingerprint`).
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
