"""The figures of the report, drawn from rows; their style is in `theme`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..analysis.correlate import FEWEST, drawn_groups
from ..certification.metrics import certified_accuracy
from ..store.records import METRICS, AttackRow, CurveRow
from .statistics import metric_and_radius
from .tables import Certified, Paper, RunFacts, no_paper
from .theme import INK, NARROW, SERIES, SOFT, Drawing, Stroke, stroke

_BINS, _MOST_POINTS, _GRID = 24, 400, 160
Named = Sequence[tuple[str, RunFacts]]


def certified_accuracy_curve(runs: Named, paper: Paper = no_paper) -> Drawing:
    """Certified accuracy by L2 radius with its 95 % band, one line per certification, and the paper's point if it has one."""
    lines = _certifications(runs)
    papers = [(s, point) for s, run, c in lines if (point := paper(run, c)) is not None]
    legend = [s for s, *_ in lines]
    if papers:
        color = lines[0][0].color if len(lines) == 1 else INK
        models = sorted({point.model for _, point in papers if point.model is not None})
        whose = f"the paper ({', '.join(models)})" if models else "the paper"
        legend.append(Stroke(f"◆ {whose}, at radius 0.25", color, marker="D"))

    def draw(axes: Any) -> None:
        furthest = max([0.25, *(float(c.radius.max()) for *_, c in lines)]) * 1.03
        for s, _, c in lines:
            _curve(axes, s, c, furthest, band=0.16 if len(lines) <= 4 else 0.07)
        for s, point in papers:
            look = {"marker": "D", "color": s.color, "markeredgecolor": INK, "linestyle": "none", "clip_on": False}
            axes.plot([0.25], [point.certified_accuracy], **look)
        _percent(axes, "certified accuracy (%)")
        axes.set(xlabel="L2 radius (pixels in [0, 1])", xlim=(0, furthest))

    shows = "; ".join(f"{s.label}: {_spoken(c)}" for s, _, c in lines)
    return Drawing("certified_accuracy", f"Certified accuracy by L2 radius. {shows}.", draw, legend, height=330.0)


def _certifications(runs: Named) -> list[tuple[Stroke, RunFacts, Certified]]:
    """Each certification with its stroke. Several runs: one color per run, dashes for sigmas. One run: one color per sigma."""
    lines = []
    same_sigma = len({(c.figures["sigma"], c.mark) for _, run in runs for c in run.of_test}) == 1
    for place, (name, run) in enumerate(runs):
        for other, c in enumerate(run.of_test):
            sigma = f"σ = {c.figures['sigma']:g}{c.mark}"
            s = (
                stroke(sigma, other)
                if len(runs) == 1
                else stroke(name if same_sigma else f"{name}, {sigma}", place, dash=other)
            )
            lines.append((s, run, c))
    return lines


def _curve(axes: Any, s: Stroke, c: Certified, furthest: float, band: float) -> None:
    radius, correct = c.radius, c.correct
    estimates = [certified_accuracy(radius, correct, float(r)) for r in np.linspace(0.0, furthest, _GRID)]
    grid = np.linspace(0.0, furthest, _GRID)
    axes.fill_between(
        grid, [100 * e.low for e in estimates], [100 * e.high for e in estimates], color=s.color, alpha=band, linewidth=0
    )
    axes.plot(grid, [100 * e.value for e in estimates], **s.line)


def _spoken(c: Certified) -> str:
    shares = c.figures["certified_accuracy"]
    chosen = [r for r in ("0.00", "0.25", "0.50", "1.00", "1.50") if r in shares]
    return ", ".join(f"{100 * shares[r]:.1f} % at {r}" for r in chosen)


def radii(runs: Named) -> Drawing | None:
    """The distribution of the certified radii, and how many images got no answer."""
    return _distribution(runs, "radii", "certified L2 radius", lambda c: c.radius, 0.0, None)


def p_lower(runs: Named) -> Drawing | None:
    """The lower bounds of p_A: how clear the votes were. The axis spaces 0.9, 0.99, 0.999, ... evenly."""
    nines = {-np.log10(1 - p): f"{p:g}" for p in (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)}
    return _distribution(
        runs, "p_lower", "lower bound of the leading class’s share of votes",
        lambda c: -np.log10(np.maximum(1.0 - np.array([row.p_lower for row in c.rows]), 1e-9)), min(nines), nines,
    )  # fmt: skip


def _distribution(
    runs: Named, name: str, label: str, values_of: Callable[[Certified], np.ndarray], low: float, ticks: dict[float, str] | None
) -> Drawing | None:
    """One run: correct and wrong answers stacked. Several: one outline each. No answer is a separate mark on the left."""
    mains = [(place, name_, run.main.voted) for place, (name_, run) in enumerate(runs) if run.main and run.main.voted.rows]
    if not mains:
        return None
    high = max(float(values_of(c).max()) for *_, c in mains)
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    width = edges[1] - edges[0]
    aside = low - 2.0 * width
    alone = len(mains) == 1
    legend = (
        [
            Stroke("correct", SERIES[0], filled=True),
            Stroke("wrong", SERIES[1], filled=True),
            Stroke("no answer", SOFT, filled=True),
        ]
        if alone
        else [stroke(run_name, place) for place, run_name, _ in mains]
    )

    def shares(c: Certified, keep: np.ndarray) -> np.ndarray:
        inside = np.clip(values_of(c)[keep], edges[0], edges[-1])
        counts: np.ndarray = 100.0 * np.histogram(inside, edges)[0] / len(c.rows)
        return counts

    def draw(axes: Any) -> None:
        for place, run_name, c in mains:
            answered = ~c.abstained
            silent = 100.0 * float(c.abstained.mean())
            if alone:
                right, wrong = shares(c, answered & c.correct), shares(c, answered & ~c.correct)
                axes.bar(edges[:-1], right, width, align="edge", color=SERIES[0], alpha=0.75, linewidth=0)
                axes.bar(edges[:-1], wrong, width, bottom=right, align="edge", color=SERIES[1], alpha=0.85, linewidth=0)
                axes.bar([aside], [silent], width * 1.4, color=SOFT, alpha=0.75, linewidth=0)
            else:
                s = stroke(run_name, place)
                axes.stairs(shares(c, answered), edges, color=s.color, linestyle=s.line["linestyle"], linewidth=1.5)
                axes.plot([aside], [silent], marker="o", color=s.color, markersize=4.5, clip_on=False)
        axes.set(xlabel=label, ylabel="share of images (%)", xlim=(aside - 1.6 * width, edges[-1] + 0.3 * width))
        labels = {float(t): f"{t:.4g}" for t in axes.get_xticks()} if ticks is None else ticks
        labels = {aside: "no\nanswer"} | {t: text for t, text in labels.items() if low <= t <= edges[-1] + 1e-9}
        axes.set_xticks(list(labels), list(labels.values()))
        axes.set_ylim(0, 1.05 * max(axes.dataLim.ymax, 1.0))
        axes.grid(axis="x", visible=False)

    counts = "; ".join(
        f"{run_name}: {int(c.correct.sum())} correct, {int((~c.correct & ~c.abstained).sum())} wrong, "
        f"{int(c.abstained.sum())} of {len(c.rows)} without an answer"
        for _, run_name, c in mains
    )
    return Drawing(name, f"Distribution of the {label}. {counts}.", draw, legend, height=270.0)


def training_curves(runs: Named) -> list[Drawing]:
    """Test accuracy, norm of the noised gradient (where there is noise), and epsilon by epoch; no training loss."""
    # Rows of older versions may contain the norm of a gradient without noise: never draw it.
    noised = [(name, run if run.metrics["privacy"].get("noise_multiplier") else replace(run, curve=[])) for name, run in runs]
    drawings = [
        _by_epoch(runs, "training_accuracy", "test accuracy (%)", _accuracy_in_percent),
        _by_epoch(noised, "training_gradient_norm", "norm of the noised gradient", _noised_norm),
        _by_epoch(runs, "training_epsilon", "ε spent so far", lambda row: row.epsilon),
    ]
    return [drawing for drawing in drawings if drawing.legend]


def _accuracy_in_percent(row: CurveRow) -> float:
    return 100 * _or_nan(row.test_accuracy)


def _noised_norm(row: CurveRow) -> float:
    return _or_nan(row.gradient_norm)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _by_epoch(runs: Named, name: str, label: str, value: Callable[[CurveRow], float]) -> Drawing:
    lines = []
    for place, (run_name, run) in enumerate(runs):
        points = [(row.epoch, value(row)) for row in run.curve]
        points = [(x, y) for x, y in points if np.isfinite(y)]
        if points:
            lines.append((stroke(run_name, place), points))

    def draw(axes: Any) -> None:
        for s, points in lines:
            axes.plot([x for x, _ in points], [y for _, y in points], **s.line)
        axes.set(xlabel="epoch", ylabel=label)
        axes.set_xlim(left=0)
        if label.endswith("(%)"):
            axes.set_ylim(top=min(100.5, axes.get_ylim()[1]))
        else:
            axes.set_ylim(bottom=0)

    ends = "; ".join(f"{s.label}: {points[0][1]:.4g} at first, {points[-1][1]:.4g} at the end" for s, points in lines)
    return Drawing(name, f"By epoch: {label}. {ends}.", draw, [s for s, _ in lines], 230.0, NARROW)


def sample_histograms(runs: Named) -> list[Drawing]:
    """The distribution of each per-sample metric, on a log scale."""
    return [_histogram(runs, metric) for metric in METRICS]


def _histogram(runs: Named, metric: str) -> Drawing:
    series = [(stroke(name, place), _values(run, metric)) for place, (name, run) in enumerate(runs) if run.samples]
    positive = np.concatenate([values[values > 0] for _, values in series])
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
    edges = np.geomspace(low, high * 1.0001 if high > low else low * 10, _BINS + 5)

    def draw(axes: Any) -> None:
        for s, values in series:
            shares = 100.0 * np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / len(values)
            axes.stairs(shares, edges, color=s.color, fill=True, alpha=0.55 if len(series) == 1 else 0.08, linewidth=0)
            axes.stairs(shares, edges, color=s.color, linestyle=s.line["linestyle"], linewidth=1.5)
        axes.set(xlabel=METRICS[metric], ylabel="share of images (%)")
        axes.set_ylim(bottom=0)
        _log_scale(axes, "x", [low, high])

    medians = "; ".join(f"{s.label}: median {np.median(values):.4g}" for s, values in series)
    return Drawing(
        f"samples_{metric}", f"Distribution of the {METRICS[metric]}. {medians}.", draw, [s for s, _ in series], 220.0, NARROW
    )


def metrics_by_radius(runs: Named) -> list[Drawing]:
    """Each per-sample metric against the certified radius of the true label, with the mean of each group, as in the paper."""
    return [_by_radius(runs, metric) for metric in METRICS]


def _by_radius(runs: Named, metric: str) -> Drawing:
    series = []
    for place, (name, run) in enumerate(runs):
        rows, main = run.analyzed, run.main
        if rows and main is not None:
            values, radius = metric_and_radius(rows, metric)
            series.append((stroke(name, place, marker="o"), radius, values, float(main.figures["sigma"])))

    def draw(axes: Any) -> None:
        for s, radius, values, sigma in series:
            if len(series) == 1:
                some = slice(None, None, -(-len(radius) // _MOST_POINTS))
                axes.plot(radius[some], values[some], "o", color=SOFT, alpha=0.3, markersize=3.2, markeredgewidth=0)
            groups = drawn_groups(values, radius, sigma)
            axes.plot([group.middle for group in groups], [group.mean for group in groups], **s.line)
        axes.set(xlabel="certified L2 radius", ylabel=METRICS[metric])
        _log_scale(axes, "y", [float(v) for _, _, values, _ in series for v in values if v > 0])

    counts = "; ".join(f"{s.label}: {len(radius)} images" for s, radius, *_ in series)
    shows = (
        f"{METRICS[metric].capitalize()} by certified radius, with its mean in groups of at least {FEWEST} images. {counts}."
    )
    return Drawing(f"radius_by_{metric}", shows, draw, [s for s, *_ in series], 240.0, NARROW)


def attack_l2(runs: Named) -> Drawing | None:
    """Accuracy under PGD in L2; for attacks on a smoothed model, also its certified accuracy at the same sigma."""
    lines = _attack_lines(runs, ("pgd-l2",))
    proved = []
    for place, (name, run) in enumerate(runs):
        sigmas = sorted({row.sigma for row in run.attacks if row.attack == "pgd-l2" and row.sigma is not None})
        for other, c in enumerate(c for sigma in sigmas if (c := run.certified_at(sigma)) is not None):
            word = f"certified, σ = {c.figures['sigma']:g}, {len(c.rows)} images"
            s = stroke(word, 0, dash=other) if len(runs) == 1 else stroke(f"{name}: {word}", place, dash=other)
            proved.append((s, c))
    furthest = max(
        [float(row.strength) for _, rows in lines for row in rows] + [float(c.radius.max()) for _, c in proved] + [0.1]
    )

    def draw(axes: Any) -> None:
        for s, c in proved:
            _curve(axes, s, c, furthest * 1.03, band=0.14 if len(proved) <= 4 else 0.06)
        _plot_attacks(axes, lines)
        _percent(axes, "accuracy (%)")
        axes.set(xlabel="L2 radius, or size of the attack", xlim=(0, furthest * 1.03))

    legend = [s for s, _ in proved] + [s for s, _ in lines]
    also = " and certified accuracy" if proved else ""
    shows = f"Accuracy under PGD attacks in L2{also}. {_spoken_attacks(lines)}."
    return Drawing("attacks_l2", shows, draw, legend, height=290.0, names_its_only_line=True) if lines else None


def attack_linf(runs: Named) -> Drawing | None:
    """Accuracy under FGSM and PGD in L-inf, by the size of the attack (log scale)."""
    lines = _attack_lines(runs, ("fgsm", "pgd-linf"))
    lines = [(s, [row for row in rows if row.strength > 0]) for s, rows in lines]
    lines = [(s, rows) for s, rows in lines if rows]

    def draw(axes: Any) -> None:
        _plot_attacks(axes, lines)
        _percent(axes, "accuracy (%)")
        axes.set(xlabel="L-inf size of the attack (log scale)")
        _log_scale(axes, "x", [row.strength for _, rows in lines for row in rows])

    shows = f"Accuracy under FGSM and PGD attacks in L-inf. {_spoken_attacks(lines)}."
    legend = [s for s, _ in lines]
    return Drawing("attacks_linf", shows, draw, legend, height=290.0, names_its_only_line=True) if lines else None


def _attack_lines(runs: Named, attacks: tuple[str, ...]) -> list[tuple[Stroke, list[AttackRow]]]:
    """The rows of each (attack, target, sigma), by strength. One run: one color per line; several: one color per run."""
    lines = []
    for place, (name, run) in enumerate(runs):
        rows = sorted((row for row in run.attacks if row.attack in attacks), key=lambda row: row.strength)
        kinds = sorted({(row.attack, row.target, row.sigma or 0.0) for row in rows})
        for other, (attack, target, sigma) in enumerate(kinds):
            of_kind = [row for row in rows if (row.attack, row.target, row.sigma or 0.0) == (attack, target, sigma)]
            words = f"{attack} on the {target} model" + (f", σ = {sigma:g}" if sigma else "")
            words += f", {' or '.join(str(count) for count in sorted({row.examples for row in of_kind}))} images"
            marker = "s" if target == "smoothed" else "o"
            alone = len(runs) == 1
            s = stroke(words, other + 1, marker=marker) if alone else stroke(f"{name}: {words}", place, other + 1, marker)
            lines.append((s, of_kind))
    return lines


def _plot_attacks(axes: Any, lines: list[tuple[Stroke, list[AttackRow]]]) -> None:
    for s, rows in lines:
        x, y = [row.strength for row in rows], [100 * row.accuracy for row in rows]
        axes.vlines(
            x, [100 * row.low for row in rows], [100 * row.high for row in rows], color=s.color, alpha=0.5, linewidth=1.5
        )
        axes.plot(x, y, clip_on=False, **s.line)


def _spoken_attacks(lines: list[tuple[Stroke, list[AttackRow]]]) -> str:
    return "; ".join(
        f"{s.label}: {', '.join(f'{100 * r.accuracy:.1f} % at {r.strength:g}' for r in rows)}" for s, rows in lines
    )


def _values(run: RunFacts, metric: str) -> np.ndarray:
    return np.array([getattr(row, metric) for row in run.analyzed or run.samples])


def _percent(axes: Any, label: str) -> None:
    axes.set(ylabel=label, ylim=(0, 101))
    axes.set_yticks(range(0, 101, 20))


def _log_scale(axes: Any, which: str, values: Sequence[float]) -> None:
    """A log axis with plain numbers (0.01, 1, 100), also if the values span less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    wide = bool(values) and max(values) > 300 * min(values)
    axis.set_major_locator(LogLocator(base=10, subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
