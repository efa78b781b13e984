"""Figures as files: each a picture with a telling name, and a legend that never lies on the curves."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from dpcert.paper.comparison import figures_of
from dpcert.report.html import _drawings, render, write_report
from dpcert.report.tables import read_run
from dpcert.report.theme import SERIES, stroke
from tests.report.conftest import RUNS

NAMES = {
    "membership", "certified_accuracy", "radii", "p_lower", "attacks_l2", "attacks_linf", "training_accuracy", "training_gradient_norm",
    "training_epsilon", *(f"{kind}_{metric}" for kind in ("samples", "radius_by") for metric in ("gradient_norm", "hessian_norm", "lipschitz")),
}  # fmt: skip


def test_each_figure_is_a_vector_file_and_a_picture(complete, tmp_path):
    write_report([read_run(complete)], None, tmp_path / "new" / "figures")
    files = {file.name for file in (tmp_path / "new" / "figures").iterdir()}
    assert files == {f"{name}.{kind}" for name in NAMES for kind in ("svg", "png")}
    from PIL import Image

    for name in NAMES:
        root = ElementTree.parse(tmp_path / "new" / "figures" / f"{name}.svg").getroot()
        assert root.tag.endswith("svg") and len(list(root.iter())) > 30
        assert "var(--" not in (tmp_path / "new" / "figures" / f"{name}.svg").read_text()  # a file stands alone
        picture = np.asarray(Image.open(tmp_path / "new" / "figures" / f"{name}.png").convert("L"))
        assert picture.shape[1] >= 600 and picture.std() > 5


def overlaps(figure) -> bool:
    """Whether the legend lies on the axes."""
    figure.draw_without_rendering()
    legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    return bool(legend.overlaps(axes))


def test_the_legend_is_below_the_curves_however_many_runs(complete):
    facts = read_run(complete)
    for count in (1, 13):
        named = [(f"a run with a long name, number {place}", replace(facts)) for place in range(count)]
        for drawing in _drawings(named).values():
            if drawing.has_legend:
                figure = drawing.figure(legend=True)
                assert not overlaps(figure), (drawing.name, count)
                assert figure.axes[0].get_window_extent().height > 100
    figure = drawing.figure(legend=False)
    figure.axes[0].plot([1, 2], [1, 2], label="twin")
    figure.legends.append(figure.axes[0].legend(loc="lower left"))
    assert overlaps(figure)  # the twin: a legend inside is seen


def test_a_single_attack_is_named_and_a_single_training_curve_is_not(complete):
    """Which attack it was is nowhere else on the page; which run it was is."""
    facts = read_run(complete)
    fgsm = replace(facts, attacks=[row for row in facts.attacks if row.attack == "fgsm"])
    assert "</svg>fgsm on the base model, 500 images</li>" in render([fgsm])
    assert not _drawings([("run", facts)])["training_accuracy"].has_legend


def test_many_runs_have_strokes_of_their_own():
    strokes = [stroke("", place) for place in range(4 * len(SERIES))]
    assert len({(s.color, s.dash) for s in strokes}) == len(strokes)


def test_the_certified_curve_is_drawn_from_the_rows():
    """The line of the figure against counts of the rows, at the radii it is drawn at."""
    facts = read_run(RUNS / "mnist-dp-gaussian")
    figure = _drawings([("run", facts)], figures_of)["certified_accuracy"].figure(legend=False)
    line = figure.axes[0].lines[0]
    rows = facts.certified[0].rows
    for x, y in zip(*line.get_data(), strict=True):
        assert y == pytest.approx(100 * sum(row.correct == 1 and row.radius >= x for row in rows) / len(rows))
    paper = figure.axes[0].lines[-1].get_data()
    assert (paper[0][0], paper[1][0]) == (0.25, 94.7)


def test_bars_add_up_to_all_images():
    facts = read_run(RUNS / "mnist-dp-gaussian")
    for name in ("radii", "p_lower"):
        axes = _drawings([("run", facts)])[name].figure(legend=False).axes[0]
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(100.0)


def test_the_words_of_a_figure_name_its_figures(complete):
    drawings = _drawings([("run", read_run(complete))])
    assert "92.6 % at 0.25" in drawings["certified_accuracy"].shows and "10 of 500 without an answer" in drawings["radii"].shows
    assert "77.0 % at 0.5" in drawings["attacks_linf"].shows
