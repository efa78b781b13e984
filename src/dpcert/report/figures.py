"""Figures as SVG text and PNG bytes."""

import io
from typing import Any

import numpy as np

from ..certification.metrics import certified_accuracy
from .tables import RunFacts

_COLOURS = ("#2a6fbb", "#c8553d", "#3a8a5f", "#8d5fa8", "#b8860b", "#4a4a4a")


def certified_accuracy_curve(runs: list[RunFacts]) -> Any:
    """Certified accuracy by L2 radius with its 95 % band, a line for each certification; the paper's point where it has one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, (run, certified) in enumerate((r, c) for r in runs for c in r.certified):
        colour, sigma = _COLOURS[index % len(_COLOURS)], certified.figures["sigma"]
        radius = np.array([row.radius for row in certified.rows])
        correct = np.array([bool(row.correct) for row in certified.rows])
        grid = np.linspace(0.0, max(radius.max() * 1.02, 0.25), 200)
        estimates = [certified_accuracy(radius, correct, float(r)) for r in grid]
        label = f"{run.title}, sigma {sigma:g}{certified.mark}, ACR {certified.figures['acr']:.3f}"
        axes.plot(grid, [100 * e.value for e in estimates], color=colour, label=label)
        axes.fill_between(
            grid, [100 * e.low for e in estimates], [100 * e.high for e in estimates], color=colour, alpha=0.15, linewidth=0
        )
        paper = run.paper(sigma)
        if paper:
            axes.plot(
                [0.25],
                [paper[2]],
                marker="D",
                color=colour,
                markeredgecolor="black",
                linestyle="none",
                label=f"paper at r = 0.25: {paper[2]:.1f} %",
            )
    axes.set(xlabel="L2 radius (pixels in [0, 1])", ylabel="certified accuracy (%)", ylim=(0, 100.5))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    if runs and any(run.certified for run in runs):
        axes.legend(loc="lower left", fontsize="small", framealpha=0.9)
    return figure


def as_svg(figure: Any) -> str:
    """The figure as an SVG element, without the XML header."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "dpcert", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def as_png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()
