"""Does memory grow with the views or the logical batch, and what do large models need? Peak memory of a fresh process.

The paper's CNN takes ten private steps. The residual backbone (1.6 million parameters) computes the clipped sum of 32 examples
twice; its peak is given without that of a process that has only loaded the libraries, the model and the examples.
"""

import argparse
import json
import resource
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from benchmarks._measure import save

BACKBONE = {  # engine, checkpointing
    "nothing": ("", False),
    "vmap": ("vmap", False),
    "layerwise": ("layerwise", False),
    "layerwise, checkpointing": ("layerwise", True),
}
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


def backbone(case: str, examples: int = 32, copies: int = 2) -> float:
    """Peak memory of two clipped sums on the backbone, in megabytes."""
    import torch

    from benchmarks import backbone_step as t

    engine, checkpointing = BACKBONE[case]
    model, data = t.backbone(), t.images(examples)
    views = t.views_of(data.x_train, copies, slice(0, examples), 0)
    with torch.no_grad():
        model(views[0])
    if engine:
        run = t.clipped_sum if engine == "vmap" else t.Layerwise(checkpointing)
        for _ in range(2):
            run(model, t.cross_entropy, views, data.y_train, t.Clip(t.Flat(), 0.1))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_fresh_process(*arguments: str) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, type=int, metavar=("K", "B"))
    parser.add_argument("--backbone", choices=BACKBONE)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.backbone:
        print(json.dumps(backbone(options.backbone)))
        return
    if options.one:
        print(json.dumps(one(*options.one, "layerwise")))
        return
    table = Table(title="peak memory of a fresh process (data set included)")
    for heading in ("K", "logical batch", "MB", "to K = 2, B = 512"):
        table.add_column(heading)
    peaks = {}
    for copies, batch in CASES:
        peaks[copies, batch] = in_fresh_process("--one", str(copies), str(batch))
    for (copies, batch), peak in peaks.items():
        table.add_row(str(copies), str(batch), f"{peak:.0f}", f"{peak / peaks[2, 512]:.2f}")
    Console().print(table)
    base, *others = ((case, in_fresh_process("--backbone", case)) for case in BACKBONE)
    large = {case: peak - base[1] for case, peak in others}
    second = Table(title="residual backbone, clipped sum of 32 examples with 3 views each")
    for heading in ("engine", "MB more than the model alone"):
        second.add_column(heading)
    for case, peak in large.items():
        second.add_row(case, f"{peak:.0f}")
    Console().print(second)
    by_case = {f"K={k}, B={b}": peak for (k, b), peak in peaks.items()}
    print(save("memory", {"megabytes": by_case, "backbone, additional megabytes": large}))


if __name__ == "__main__":
    main()
