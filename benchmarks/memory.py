"""Does memory grow with the views or the logical batch? Peak resident memory of a fresh process over ten steps."""

import argparse
import json
import resource
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from benchmarks._measure import save

CASES = [(0, 512), (2, 512), (4, 512), (8, 512), (2, 1024), (2, 2048), (2, 4096)]


def one(copies: int, batch: int, engine: str) -> float:
    """Peak memory of ten private steps, in megabytes."""
    from benchmarks import training_step as t

    t.BATCH = batch
    data = t.load_dataset("mnist")
    step = t.private(data, copies, engine)
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, type=int, metavar=("K", "B"))
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one, "layerwise")))
        return
    table = Table(title="peak memory of a fresh process (data set included)")
    for heading in ("K", "logical batch", "MB", "to K = 2, B = 512"):
        table.add_column(heading)
    peaks = {}
    for copies, batch in CASES:
        command = [sys.executable, "-m", "benchmarks.memory", "--one", str(copies), str(batch)]
        peaks[copies, batch] = float(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
    for (copies, batch), peak in peaks.items():
        table.add_row(str(copies), str(batch), f"{peak:.0f}", f"{peak / peaks[2, 512]:.2f}")
    Console().print(table)
    print(save("memory", {"megabytes": {f"K={k}, B={b}": peak for (k, b), peak in peaks.items()}}))


if __name__ == "__main__":
    main()
