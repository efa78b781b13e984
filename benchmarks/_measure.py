"""Interleaved timing: every contender runs once per round, and medians are compared."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(contenders: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each contender in each round, without the first `warm_up` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm_up + rounds):
        for name, work in contenders.items():
            began = time.perf_counter()
            work()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    low, middle, high = (statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3)[:3]
    return {"median_ms": 1e3 * middle, "low_ms": 1e3 * low, "high_ms": 1e3 * high}


def ratio(seconds: list[float], base: list[float]) -> dict[str, float]:
    """Median and quartiles of the ratio per round, so that both sides ran under the same load."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "low": low, "high": high}


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    return {
        "processor": model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds, as a smoke test")
    return parser.parse_args()


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=2) + "\n")
    return path


def bars(name: str, title: str, groups: dict[str, dict[str, float]], unit: str) -> Path:
    """Draw a bar chart with one group of contenders per case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    contenders = list(next(iter(groups.values())))
    width = 0.8 / len(contenders)
    for place, contender in enumerate(contenders):
        heights = [values[contender] for values in groups.values()]
        spots = axes.bar([x + place * width for x in range(len(groups))], heights, width, label=contender)
        axes.bar_label(spots, fmt="%.2f", fontsize="x-small")
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(groups))], list(groups))
    axes.set(title=title, ylabel=unit)
    axes.legend(fontsize="small")
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=120)
    return path
