"""The ablation table of ``<dataset>/best``: the recipe, and the recipe without each of its ingredients, from rows.

    python scripts/ablation.py fashion-mnist --results results/best --commands    # what to run; each line resumes
    python scripts/ablation.py fashion-mnist --results results/best               # the table, from the runs that are there

Each run is a directory <results>/<dataset>-<variant>-seed<N>, trained on all records and certified on test images.
"""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpcert.runs.config import Config
from dpcert.runs.resolve import resolve
from dpcert.store.durable import write_atomically
from dpcert.store.metrics import certification_at, read_metrics
from dpcert.store.runs import METRICS
from dpcert.tuning.space import Space

WHOLE = "best"
SIGMA, EXAMPLES, SEEDS = 0.5, 1000, (0, 1)
_OF_METHOD = {"sigma-scale": "sigma_scale", "copies": "copies", "noisy-only": "keep_original", "radius": "smoothadv_radius"}


def variants(dataset: str, sigma: float = SIGMA, epochs: float | None = None) -> dict[str, Config]:
    """The recipe, and the recipe with one ingredient set back to the value of the paper's preset.

    With `epochs`, all of them are trained for that long.
    """
    shared = {"method.sigma": sigma, **({} if epochs is None else {"train.epochs": epochs})}
    best = resolve(f"{dataset}/best", shared)
    paper = resolve(f"{dataset}/{best.method.name}", shared)
    found = {WHOLE: best}
    for name, setting in _without(best, paper):
        found[f"without-{name}"] = Space({key: [] for key in setting}, f"{dataset}/best").apply(best, setting)
    return found


def _without(best: Config, paper: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    if (best.model.name, best.model.width) != (paper.model.name, paper.model.width):
        yield "model", {"model.name": paper.model.name, "model.width": None, "model.norm": None}
    if best.model.stages is not None:
        yield "stages", {"model.stages": None}
    views, _, regulariser = best.method.name.partition("+")
    if views == "dp-smoothadv":
        yield "smoothadv", {"method.name": "+".join(["dp-gaussian", *([regulariser] if regulariser else [])])}
    if regulariser:
        yield regulariser, {"method.name": views}
    if views == "dp-stability":
        yield "stability", {"method.name": "dp-gaussian"}
    for name, key in _OF_METHOD.items():
        if getattr(best.method, key) != getattr(paper.method, key):
            yield name, {f"method.{key}": getattr(paper.method, key)}
    if best.head.copies != paper.head.copies:
        yield "head-copies", {"head.copies": paper.head.copies}
    if best.train.batch_size != paper.train.batch_size:  # the learning rate grows with the batch
        yield "batch", {"train.batch_size": paper.train.batch_size, "train.learning_rate": paper.train.learning_rate}
    if best.train.epochs != paper.train.epochs:
        yield "epochs", {"train.epochs": paper.train.epochs}
    if best.train.schedule != paper.train.schedule:
        yield "schedule", {"train.schedule": paper.train.schedule}
    if best.train.averaging != paper.train.averaging:
        yield "averaging", {"train.averaging": paper.train.averaging}


def commands(
    dataset: str, results: Path, epochs: float | None = None, seeds: tuple[int, ...] = SEEDS, examples: int = EXAMPLES
) -> list[str]:
    """Write the config of each variant and return the commands that make the rows."""
    lines = []
    for name, config in variants(dataset, epochs=epochs).items():
        file = results / f"{dataset}-{name}.toml"
        write_atomically(file, config.to_toml().encode())
        for seed in seeds:
            out = results / f"{dataset}-{name}-seed{seed}"
            words = ["dpcert", "run", file, "--seed", seed, "--examples", examples, "--out", out]
            lines.append(shlex.join(map(str, words)))
    return lines


def table(dataset: str, results: Path, epochs: float | None = None, sigma: float = SIGMA) -> list[str]:
    """The table as Markdown: mean ACR over the seeds that have rows, their range, and the difference to the recipe."""
    lines = ["| variant | ACR | range over seeds | change | certified at 0.25 | seeds |", "|---|---|---|---|---|---|"]
    whole: float | None = None
    for name in variants(dataset, sigma, epochs):
        entries = list(_entries(results, f"{dataset}-{name}-seed", sigma))
        if not entries:
            lines.append(f"| {name} | not run | | | | 0 |")
            continue
        acrs = [entry["acr"] for entry in entries]
        mean = sum(acrs) / len(acrs)
        whole = mean if name == WHOLE else whole
        change = "" if whole is None or name == WHOLE else f"{100 * (mean / whole - 1):+.1f} %"
        quarter = sum(entry["certified_accuracy"]["0.25"] for entry in entries) / len(entries)
        spread = f"{min(acrs):.3f} to {max(acrs):.3f}"
        lines.append(f"| {name} | {mean:.3f} | {spread} | {change} | {100 * quarter:.1f} % | {len(acrs)} |")
    return lines


def _entries(results: Path, start: str, sigma: float) -> Iterator[dict[str, Any]]:
    for path in sorted(results.glob(f"{start}*/{METRICS}")):
        entry = certification_at(read_metrics(path)["certification"], sigma)
        if entry is not None:
            yield entry


def main() -> None:
    """Print the commands or the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--results", type=Path, default=Path("results/best"))
    parser.add_argument("--commands", action="store_true")
    parser.add_argument("--epochs", type=float, help="train all variants for this long, the recipe too (a shorter ablation)")
    chosen = parser.parse_args()
    chosen.results.mkdir(parents=True, exist_ok=True)
    print("\n".join((commands if chosen.commands else table)(chosen.dataset, chosen.results, chosen.epochs)))


if __name__ == "__main__":
    main()
