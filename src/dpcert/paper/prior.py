"""The comparison that the paper could not make: the systems it quotes, trained and certified like DP-CERT, from stored rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..rounding import ceil_text
from ..store.metrics import certification_at
from .published import CIFAR10, QUOTED_ON, TITLES, VARIANTS
from .result_index import Measured, ResultIndex

SYSTEM_TITLES = {
    "pixeldp": "PixelDP + DP-SGD",
    "securesgd": "SecureSGD",
    "dp-denoiser": "DP denoiser",
    "stobatch": "StoBatch",
    "securesgd-as-published": "SecureSGD, as published",
    "stobatch-as-published": "StoBatch, as published",
}
METHODS = (*VARIANTS, *SYSTEM_TITLES)
RADII = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
OVERVIEW = (*("system", "epsilon", "clean %", "images", "ACR", "ACR by PixelDP's bound"), *("training, min", "a vote, µs"))
NOTES = [
    "Same network, budget, votes and images for all rows; sigma is what the noise is worth at the input.",
    "Quoted columns are the published figures of the systems, for other networks and with the certificates of their authors.",
    "epsilon = inf: not private, for the reason in the statement of the run.",
]
_COLORS = ("#0d2f5e", "#8d5fa8", "#b8860b", "#4a4a4a", "#8d5fa8", "#4a4a4a")
_MARKS = {"TransDenoiser": ("#b8860b", "o"), "SecureSGD": ("#8d5fa8", "s"), "StoBatch": ("#4a4a4a", "^")}
_NOT_RUN, _ABSENT = "not run", ""


def title_of(method: str) -> str:
    """The name of a system in tables."""
    return SYSTEM_TITLES.get(method) or TITLES[method]


def by_radius(index: ResultIndex, dataset: str, sigma: float) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: certified accuracy % at each radius, a column for each of our runs and for each quoted system."""
    runs = {method: index.certified(dataset, method, sigma) for method in METHODS}
    quoted_radii, quoted = QUOTED_ON[dataset]
    headings = ("L2 radius", *map(title_of, METHODS), *(f"{name} (quoted)" for name in quoted))
    rows = []
    for radius in sorted({*RADII, *quoted_radii}):
        ours = [_NOT_RUN if run is None else f"{100 * run.share(radius):.1f}" for run in runs.values()]
        place = quoted_radii.index(radius) if radius in quoted_radii else None
        theirs = [_ABSENT if place is None else f"{values[place]:.1f}" for values in quoted.values()]
        rows.append((f"{radius:g}", *ours, *theirs))
    return headings, rows


def overview(index: ResultIndex, dataset: str, sigma: float) -> list[tuple[str, ...]]:
    """Rows of `OVERVIEW`: what each run promises, reaches and costs."""
    runs = ((method, index.certified(dataset, method, sigma)) for method in METHODS)
    return [(title_of(method), *_facts(run, sigma)) for method, run in runs]


def _facts(run: Measured | None, sigma: float) -> tuple[str, ...]:
    if run is None:
        return (_NOT_RUN, *[_ABSENT] * (len(OVERVIEW) - 2))
    metrics = run.facts.metrics
    privacy, entry = metrics["privacy"], certification_at(metrics["certification"], sigma) or {}
    bound = entry.get("pixeldp")
    seconds = metrics["timing"].get("train_seconds")
    return (
        ceil_text(privacy["epsilon"], 4) if privacy["private"] else "inf",
        _ABSENT if run.clean is None else f"{run.clean:.1f}",
        str(len(run.rows)),
        f"{run.acr:.3f} ± {run.acr_error:.3f}",
        _ABSENT if bound is None else f"{bound['acr']:.3f}",
        _ABSENT if seconds is None else f"{seconds / 60:.1f}",
        _microseconds_per_vote(run),
    )


def _microseconds_per_vote(run: Measured) -> str:
    """The time of images that got all votes, divided by them; empty if there is none."""
    voted = [row for row in run.rows if row.count is not None and row.time > 0]
    votes = sum(row.n for row in voted)
    return f"{1e6 * sum(row.time for row in voted) / votes:.0f}" if votes else _ABSENT


def figure(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """Certified accuracy by radius: our runs as lines, quoted points as marks; one panel per data set."""
    from matplotlib.figure import Figure

    places = [(dataset, sigma) for dataset in datasets for sigma in sigmas if dataset in QUOTED_ON]
    there = [place for place in places if any(index.certified(place[0], method, place[1]) for method in METHODS)]
    if not there:
        return None
    drawn = Figure(figsize=(5.4 * len(there), 4.4), layout="constrained")
    for axes, (dataset, sigma) in zip(drawn.subplots(1, len(there), squeeze=False)[0], there, strict=True):
        _panel(axes, index, dataset, sigma)
    handles, labels = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return drawn


def _panel(axes: Any, index: ResultIndex, dataset: str, sigma: float) -> None:
    from .figures import COLORS

    quoted_radii, quoted = QUOTED_ON[dataset]
    fine = np.linspace(0.0, max(quoted_radii), 91)
    for method in METHODS:
        run = index.certified(dataset, method, sigma)
        if run is not None:
            color = COLORS.get(method) or _COLORS[list(SYSTEM_TITLES).index(method)]
            dashes = ":" if method.endswith("as-published") else "-" if method in SYSTEM_TITLES else "--"
            shares = [100 * run.share(float(radius)) for radius in fine]
            axes.plot(fine, shares, color=color, linestyle=dashes, linewidth=1.4, label=title_of(method))
    for name, values in quoted.items():
        color, mark = _MARKS[name]
        axes.plot(quoted_radii, values, mark, color=color, markersize=4, fillstyle="none", label=f"{name} (quoted)")
    other = ", packaged backbone" if dataset == CIFAR10 else ""
    axes.set(xlabel="L2 radius", ylabel="certified accuracy (%)", ylim=(0, 100))
    axes.set_title(f"{TITLES[dataset]}{other}, sigma {sigma:g}")
    axes.grid(alpha=0.25)
