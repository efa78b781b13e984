"""The paper's figures from our rows, in its layout: panels by sigma, data set or tau. A panel names what was not run."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.correlate import THRESHOLDS
from ..store.durable import write_atomically
from ..store.records import METRICS
from . import targets
from .claims import COPIES
from .published import BASELINES, CIFAR10, CIFAR10_BACKBONE, COMPARED, QUOTED, QUOTED_RADII, TITLES, VARIANTS
from .result_index import Measured, ResultIndex, Seeds
from .sample_claims import by_radius, logs, radii

COLORS = {
    "regular": "#4a4a4a",
    "dpsgd": "#b8860b",
    "psac": "#8d5fa8",
    "dp-gaussian": "#2a6fbb",
    "dp-smoothadv": "#c8553d",
    "dp-stability": "#3a8a5f",
    "dp-macer": "#d17fae",
}
_DASHES = {"": "-", "+psac": "--", "+consistency": ":"}
_SHADES = ("#0d2f5e", "#2a6fbb", "#5fa0d8", "#c8553d", "#8d5fa8")
_PANEL = (3.3, 2.7)


def _panels(rows: int, columns: int, height: float = _PANEL[1]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(_PANEL[0] * columns, 5.4), height * rows + 0.7), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _legend(figure: Any, panels: Any, columns: int = 4) -> None:
    """Draw one legend below all panels, where it covers no curve, in the order of the panel with the most lines."""
    shown: dict[str, Any] = {}
    for handles, labels in sorted((axes.get_legend_handles_labels() for axes in np.ravel(panels)), key=lambda of: -len(of[1])):
        for handle, label in zip(handles, labels, strict=True):
            shown.setdefault(label, handle)
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=columns, fontsize="small", frameon=False)


def _title(axes: Any, text: str, missing: Sequence[str], lines: int) -> None:
    """Set the panel's title; below it, name what was not run."""
    if len(missing) == lines:
        text += "\nnot run"
    elif missing:
        text += f"\nnot run: {', '.join(missing) if len(missing) <= 2 else f'{len(missing)} of {lines} lines'}"
    axes.set_title(text, fontsize="small")


def _curve(axes: Any, run: Seeds, label: str, color: str, dashes: str) -> None:
    grid = np.linspace(0.0, 3.3 * run.place.sigma, 150)
    axes.plot(grid, [100 * run.share(float(r)) for r in grid], color=color, linestyle=dashes, label=label, linewidth=1.4)


Line = tuple[str, str, str, str, str]  # method, change, label, color, dashes


def _curves_figure(index: ResultIndex, lines: Sequence[Line], datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """Certified accuracy by radius: data sets below each other, sigmas side by side (one sigma: data sets side by side)."""
    grid = [[(dataset, sigma) for sigma in sigmas] for dataset in datasets]
    if len(sigmas) == 1:
        grid = [[(dataset, sigmas[0]) for dataset in datasets]]
    figure, panels = _panels(len(grid), len(grid[0]))
    drawn = 0
    for (dataset, sigma), axes in zip([place for row in grid for place in row], panels.ravel(), strict=True):
        missing = []
        for method, change, label, color, dashes in lines:
            run = index.seeds(dataset, method, sigma, change)
            if run is None:
                missing.append(label)
                continue
            _curve(axes, run, label, color, dashes)
            drawn += 1
        axes.set(xlim=(0, 3.3 * sigma), ylim=(0, 100), xlabel="L2 radius")
        axes.grid(alpha=0.25)
        _title(axes, f"{TITLES[dataset]}, sigma = {sigma:g}", missing, len(lines))
    for row in panels:
        row[0].set_ylabel("certified accuracy (%)")
    _legend(figure, panels, 4 if len(grid[0]) > 2 else 3)
    return figure if drawn else None


_METHOD_LINES: list[Line] = [(name, "", TITLES[name], COLORS[name], "-") for name in COMPARED]
_PART_LINES: list[Line] = [
    (f"{base}{part}", "", TITLES[f"{base}{part}"], COLORS[base], dashes)
    for base in VARIANTS[:2]
    for part, dashes in _DASHES.items()
]
_COPY_LINES: list[Line] = [
    ("dp-gaussian", change, f"K = {line}" + (" (original replaced)" if line == "0" else ""), color, "-")
    for (line, change), color in zip(COPIES.items(), _SHADES, strict=True)
] + [("dpsgd", "", "DPSGD (no augmentation)", COLORS["dpsgd"], "--")]


def certified_accuracy(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """Certified accuracy of the methods by radius, one panel per sigma."""
    return _curves_figure(index, _METHOD_LINES, datasets, sigmas)


def consistency_and_psac(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """DP-Gaussian and DP-SmoothAdv, with consistency, with PSAC."""
    return _curves_figure(index, _PART_LINES, datasets, sigmas)


def augmentations(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """DP-Gaussian by its number of augmentations."""
    return _curves_figure(index, _COPY_LINES, datasets, sigmas)


def cifar10_comparison(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """Quoted points, and our variants as lines: absolute and relative to TransDenoiser, one row for each sigma we have."""
    there = [sigma for sigma in sigmas if any(index.seeds(CIFAR10, name, sigma) for name in VARIANTS)]
    rows: list[float | None] = [*there] or [None]
    figure, panels = _panels(len(rows), 2, 3.0)
    for row, sigma in zip(panels, rows, strict=True):
        for (name, values), (color, marker) in zip(QUOTED.items(), _QUOTED_MARKS, strict=True):
            for axes, points in zip(row, (values, _relative(values)), strict=True):
                axes.plot(QUOTED_RADII, points, marker=marker, markersize=4, color=color, label=f"{name} (published)",
                          linestyle=":" if there else "-", linewidth=1.0)  # fmt: skip
        missing = [] if sigma is None else _our_lines(row, index, sigma)
        row[0].set(ylabel="certified accuracy (%)", ylim=(0, None))
        row[1].set(ylabel="against TransDenoiser (%)")
        for axes in row:
            axes.set(xlabel="L2 radius")
            axes.grid(alpha=0.25)
        title = "CIFAR-10 (DP-CERT: not run)" if sigma is None else f"CIFAR-10, ours at sigma = {sigma:g}"
        _title(row[0], title, missing, len(VARIANTS))
        _title(row[1], "relative to TransDenoiser", (), 3)
    _legend(figure, panels, 3 if not there else 4)
    return figure


_QUOTED_MARKS = (("#4a4a4a", "o"), ("#b8860b", "s"), ("#8d5fa8", "^"))


def _relative(values: Sequence[float]) -> list[float]:
    return [100 * (value / best - 1) for value, best in zip(values, QUOTED["TransDenoiser"], strict=True)]


def _our_lines(row: Any, index: ResultIndex, sigma: float) -> list[str]:
    """Draw the variants of DP-CERT into both panels; return those that were not run."""
    missing = []
    for method in VARIANTS:
        run = index.seeds(CIFAR10, method, sigma)
        if run is None:
            missing.append(TITLES[method])
            continue
        fine = np.linspace(0.0, QUOTED_RADII[-1], 71)
        row[0].plot(fine, [100 * run.share(float(r)) for r in fine], color=COLORS[method], label=TITLES[method], linewidth=1.4)
        ours = _relative([100 * run.share(r) for r in QUOTED_RADII])
        row[1].plot(QUOTED_RADII, ours, color=COLORS[method], label=TITLES[method], linewidth=1.4)
    return missing


def _analyzed(index: ResultIndex, dataset: str, methods: Sequence[str], sigma: float) -> tuple[list[Measured], list[str]]:
    """The runs with per-sample metrics, and the names of those without."""
    runs = [run for name in methods if (run := index.certified(dataset, name, sigma)) is not None and run.samples]
    there = {run.place.method for run in runs}
    return runs, [TITLES[name] for name in methods if name not in there]


def _metric_panels(
    index: ResultIndex,
    dataset: str,
    groups: Sequence[Sequence[str]],
    sigma: float,
    draw: Callable[[Any, list[Measured], str], None],
) -> Any | None:
    figure, panels = _panels(len(groups), len(METRICS))
    drawn = 0
    for methods, row in zip(groups, panels, strict=True):
        for metric, axes in zip(METRICS, row, strict=True):
            runs, missing = _analyzed(index, dataset, methods, sigma)
            if runs:
                draw(axes, runs, metric)
                drawn += 1
            axes.grid(alpha=0.25)
            _title(axes, METRICS[metric], missing, len(methods))
    figure.suptitle(f"{TITLES[dataset]}, sigma = {sigma:g}", fontsize="medium")
    _legend(figure, panels)
    return figure if drawn else None


def _histogram(axes: Any, values: np.ndarray, method: str, edges: np.ndarray, of: int) -> None:
    """Percent of `of` images, as an outline with a light fill, so that four of them stay distinguishable."""
    share = np.full(len(values), 100 / of)
    axes.hist(values, edges, weights=share, histtype="stepfilled", color=COLORS[method], alpha=0.12)
    axes.hist(values, edges, weights=share, histtype="step", color=COLORS[method], label=TITLES[method], linewidth=1.2)


def _edges(runs: Sequence[Measured], metric: str) -> np.ndarray:
    """The same bins for all runs, so that their heights can be compared."""
    return np.histogram_bin_edges(np.concatenate([logs(run, metric) for run in runs]), 30)


def metric_histograms(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> dict[str, Any]:
    """The three metrics: baselines and DP-Gaussian above, the variants of DP-CERT below."""
    groups = ((*BASELINES, "dp-gaussian"), VARIANTS)

    def draw(axes: Any, runs: list[Measured], metric: str) -> None:
        for run in runs:
            _histogram(axes, logs(run, metric), run.place.method, _edges(runs, metric), len(run.samples))
        axes.set(xlabel=f"log10 {METRICS[metric]}", ylabel="images (%)")

    figures = {}
    for dataset in datasets:
        for sigma in sigmas:
            key = "" if len(datasets) * len(sigmas) == 1 else f"-{dataset}-sigma{sigma:.2f}"
            figures[key] = _metric_panels(index, dataset, groups, sigma, draw)
    return figures


def metrics_by_radius(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """The log of the mean metric of images grouped by radius."""
    sigma = sigmas[0]

    def draw(axes: Any, runs: list[Measured], metric: str) -> None:
        for run in runs:
            middles, values = by_radius(run, metric, sigma)
            method = run.place.method
            axes.plot(middles, values, marker="o", markersize=3, color=COLORS[method], label=TITLES[method], linewidth=1.2)
        axes.set(xlabel="certified radius", ylabel="log10 of the mean")

    return _metric_panels(index, datasets[0], [COMPARED], sigma, draw)


def metrics_split(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> dict[str, Any]:
    """For each metric: images above tau and below it, baselines and then variants."""
    return {f"-{metric.split('_')[0]}": _split(index, datasets[0], sigmas[0], metric) for metric in METRICS}


def _split(index: ResultIndex, dataset: str, sigma: float, metric: str) -> Any | None:
    figure, panels = _panels(4, len(THRESHOLDS), 1.9)
    drawn = 0
    for block, methods in enumerate(((*BASELINES, "dp-gaussian"), VARIANTS)):
        runs, missing = _analyzed(index, dataset, methods, sigma)
        for column, tau in enumerate(THRESHOLDS):
            for above, axes in zip((True, False), panels[2 * block : 2 * block + 2, column], strict=True):
                for run in runs:
                    chosen = logs(run, metric)[(radii(run) >= tau) == above]
                    _histogram(axes, chosen, run.place.method, _edges(runs, metric), len(run.samples))
                    drawn += 1
                side = "at least" if above else "below"
                _title(axes, f"radius {side} {tau:g}", missing, len(methods))
                axes.grid(alpha=0.25)
                axes.set(ylabel="images (%)" if column == 0 else "")
    for axes in panels[-1]:
        axes.set(xlabel=f"log10 {METRICS[metric]}")
    figure.suptitle(f"{METRICS[metric]}, {TITLES[dataset]}, sigma = {sigma:g}", fontsize="medium")
    _legend(figure, panels)
    return figure if drawn else None


def certified_radii(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """Distribution of radii; wrong and undecided images count as 0."""
    figure, panels = _panels(1, 1, 3.4)
    axes, sigma, missing = panels[0][0], sigmas[0], []
    for method in (*BASELINES, "dp-gaussian"):
        run = index.seeds(datasets[0], method, sigma)
        if run is None:
            missing.append(TITLES[method])
            continue
        _histogram(axes, run.earned, method, np.linspace(0, 3.3 * sigma, 34), len(run.earned))
    axes.set(xlabel="certified radius (0: wrong or abstained)", ylabel="images (%)")
    _title(axes, f"{TITLES[datasets[0]]}, sigma = {sigma:g}", missing, 4)
    axes.grid(alpha=0.25)
    _legend(figure, panels, 4)
    return figure if len(missing) < 4 else None


def fgsm(index: ResultIndex, datasets: Sequence[str], sigmas: Sequence[float]) -> Any | None:
    """Accuracy of the base models under FGSM by strength, with 95 % intervals."""
    figure, panels = _panels(len(datasets), len(sigmas))
    drawn = 0
    for dataset, row in zip(datasets, panels, strict=True):
        for sigma, axes in zip(sigmas, row, strict=True):
            missing = []
            for method in COMPARED:
                run = index.get(dataset, method, sigma)
                if run is None or not run.fgsm:
                    missing.append(TITLES[method])
                    continue
                rows = [run.fgsm[strength] for strength in sorted(run.fgsm)]
                strengths = range(len(rows))  # evenly spaced, since 0.0005 to 1 does not fit on a linear axis
                axes.plot(strengths, [100 * r.accuracy for r in rows], marker="o", markersize=3, color=COLORS[method],
                          label=TITLES[method], linewidth=1.2)  # fmt: skip
                axes.fill_between(strengths, [100 * r.low for r in rows], [100 * r.high for r in rows],
                                  color=COLORS[method], alpha=0.12, linewidth=0)  # fmt: skip
                axes.set_xticks(strengths, [f"{r.strength:g}" for r in rows])
                drawn += 1
            axes.set(ylim=(0, 101))
            axes.grid(alpha=0.25)
            _title(axes, f"{TITLES[dataset]}, sigma = {sigma:g}", missing, len(COMPARED))
        row[0].set_ylabel("accuracy (%)")
    for axes in panels[-1]:
        axes.set_xlabel("L-inf strength of FGSM")
    _legend(figure, panels)
    return figure if drawn else None


FIGURES: dict[str, Callable[[ResultIndex, Sequence[str], Sequence[float]], Any]] = {
    targets.CERTIFIED_ACCURACY: certified_accuracy,
    targets.CIFAR10_COMPARISON: cifar10_comparison,
    targets.CONSISTENCY_PSAC: consistency_and_psac,
    targets.CONSISTENCY_PSAC_FULL: consistency_and_psac,
    targets.AUGMENTATIONS: augmentations,
    targets.AUGMENTATIONS_FULL: augmentations,
    targets.METRIC_HISTOGRAMS: metric_histograms,
    targets.METRIC_HISTOGRAMS_FULL: metric_histograms,
    targets.METRICS_BY_RADIUS: metrics_by_radius,
    targets.METRICS_SPLIT: metrics_split,
    targets.RADII: certified_radii,
    targets.FGSM: fgsm,
}


def draw(index: ResultIndex, target: str, datasets: Sequence[str], sigmas: Sequence[float]) -> dict[str, Any]:
    """The figures of a target by file name (without extension); none if no run exists.

    CIFAR-10 has figures of its own, since its models are not the paper's: each of them says so.
    """
    if target not in FIGURES:
        return {}
    drawn = FIGURES[target](index, datasets, sigmas)
    by_name = drawn if isinstance(drawn, dict) else {"": drawn}
    kept = {name: figure for name, figure in by_name.items() if figure is not None}
    if CIFAR10 not in datasets:
        return {f"{target}{name}": figure for name, figure in kept.items()}
    own = "" if target == targets.CIFAR10_COMPARISON else f"-{CIFAR10}"
    for figure in kept.values():
        figure.suptitle(_other_backbone(figure, index), fontsize="medium")
    return {f"{target}{own}{name}": figure for name, figure in kept.items()}


def _other_backbone(figure: Any, index: ResultIndex) -> str:
    title, ours = figure.get_suptitle(), " and ".join(index.models(CIFAR10)) or "another backbone"
    note = f"ours: {ours}, not the paper's {CIFAR10_BACKBONE}"
    return f"{title} ({note})" if title else f"{TITLES[CIFAR10]} ({note})"


def save(figure: Any, folder: Path, name: str) -> None:
    """Write a figure as SVG and PNG; the same rows give the same bytes."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "dpcert", "svg.fonttype": "none"}):
        for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 130, "metadata": {"Software": None}})):
            data = io.BytesIO()
            figure.savefig(data, format=ending, **options)
            write_atomically(folder / f"{name}.{ending}", data.getvalue(), real_folder=True)
