"""Tables, page and figures: their numbers are those of the rows, the same rows give the same bytes, what is missing is said."""

import re

import pytest

from dpcert.cli._reproduce import _places
from dpcert.paper import reproduction
from dpcert.paper.grid import ALL_DATASETS, DATASETS, TARGETS, Cell, needs_of
from dpcert.paper.published import NEEDS_CROSSVIT, OTHER_FORMULA, TABLE_1
from dpcert.paper.reproduction import TargetRequest
from dpcert.paper.result_index import ResultIndex
from dpcert.paper.verdicts import RULES
from tests.grid_fakes import fake_run, radius_of, whole_grid

NEEDS = needs_of(list(TARGETS.values()), ALL_DATASETS)


def sections(results, names, *, with_figures=False, datasets=ALL_DATASETS):
    index = ResultIndex(_places(NEEDS, results))
    found = []
    for name in names:
        target = TARGETS[name]
        asked = TargetRequest(name, target.paper, target.covered(datasets), target.sigmas, target.cifar10)
        found.append(reproduction.section(index, asked, with_figures=with_figures))
    return found


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    whole_grid(folder)
    return folder


def test_table_1_shows_rows_and_differences(tmp_path):
    radius = radius_of(1.2, 0.5)
    fake_run(tmp_path, Cell("mnist", "dp-gaussian"), {0.5: radius}, clean=0.9702)
    (part,) = sections(tmp_path, ["table1"], datasets=["mnist"])
    (table,) = part.tables
    assert len(table.rows) == 21
    row = next(row for row in table.rows if row[:2] == ("0.5", "DP-Gaussian"))
    acr, quarter = radius.mean(), 100 * (radius >= 0.25).mean()
    assert row[2] == "1 x 100"
    assert row[3:5] == ("97.02 / 97.74 (-0.72)", "agrees")
    assert re.fullmatch(rf"{acr:.3f} ± 0\.\d+ / 1\.246 \({100 * (acr / 1.246 - 1):+.1f} %\)", row[5])
    assert re.fullmatch(rf"{quarter:.1f} ± \d\.\d / 94\.7 \({re.escape(f'{quarter - 94.7:+.1f}')}\)", row[7])
    assert row[8] == "agrees" and row[9] == ""
    others = [row for row in table.rows if row[:2] != ("0.5", "DP-Gaussian")]
    assert {row[place] for row in others for place in (4, 6, 8)} == {"not run"}


def test_seeds_are_joined_in_one_row(tmp_path):
    for seed, clean in enumerate((0.95, 0.96, 0.97)):
        fake_run(tmp_path, Cell("mnist", "dp-gaussian", seed=seed), {0.5: radius_of(1.2, 0.5, seed=seed)}, clean=clean)
    (part,) = sections(tmp_path, ["table1"], datasets=["mnist"])
    row = next(row for row in part.tables[0].rows if row[:2] == ("0.5", "DP-Gaussian"))
    assert row[2] == "3 x 100" and row[3].startswith("96.00 / 97.74")
    assert re.fullmatch(r"clean 95\.00 to 97\.00; ACR 1\.\d{3} to 1\.\d{3}; at 0\.25 \d+\.\d to \d+\.\d", row[9])


def test_the_rules_and_the_largest_budget_stand_under_the_table(tmp_path):
    for method, epsilon in (("dpsgd", 9.0), ("psac", 10.0)):
        fake_run(tmp_path, Cell("mnist", method), {0.5: radius_of(0.3, 0.5)}, epsilon=epsilon)
    (part,) = sections(tmp_path, ["table1"], datasets=["mnist"])
    assert "Private rows: at most (epsilon 10.0000, delta 1e-05). Regular is not private." in part.notes
    assert set(RULES) < set(part.notes)


def test_sections_on_one_seed_say_so(grid):
    parts = sections(grid, ["figure-metric-histograms", "figure-fgsm", "figure-radii"])
    assert ["seed 0" in " ".join(part.notes) for part in parts] == [True, True, False]


def test_cifar_is_not_run(grid):
    (part,) = sections(grid, ["table1"])
    assert [table.title for table in part.tables] == ["MNIST", "Fashion-MNIST", "CIFAR-10"]
    assert {row[6] for row in part.tables[2].rows} == {"not run"}
    assert sum(len(table.rows) for table in part.tables) == len(TABLE_1)


def test_rows_without_weights_are_shown_and_said(tmp_path):
    fake_run(tmp_path, Cell("mnist", "dpsgd"), {0.5: radius_of(0.3, 0.5)}, weights=False)
    (part,) = sections(tmp_path, ["table1"], datasets=["mnist"])
    assert any("Rows without weights" in note and "mnist-dpsgd" in note for note in part.notes)


def test_sweeps_show_the_presets_run_at_its_value(grid):
    for name, count in (("ablation-learning-rate", 9), ("ablation-clip-norm", 15)):
        (part,) = sections(grid, [name])
        rows = part.tables[0].rows
        assert len(rows) == count and [row[3] for row in rows if row[0] == "CIFAR-10"] == [NEEDS_CROSSVIT] * (count // 3)
        assert not any(row[3] == "not run" for row in rows if row[0] != "CIFAR-10")
        best = {row[0]: row[1] for row in rows if row[2].startswith("96.9")}  # the fakes' preset is 1 point above the others
        assert best == ({"MNIST": "0.5", "Fashion-MNIST": "4"} if "rate" in name else {"MNIST": "0.1", "Fashion-MNIST": "0.1"})


def test_the_page_is_the_same_twice_and_holds_the_reading(grid, tmp_path):
    names = ["table1", "ablation-clip-norm", "figure-cifar10-comparison", "figure-radii"]
    pages = []
    for folder in ("a", "b"):
        page, figures = tmp_path / folder / "docs" / "results.md", tmp_path / folder / "results" / "figures"
        page.parent.mkdir(parents=True)
        page.with_name("results_reading.md").write_text("## Reading\n\nWe agree.\n")
        parts = sections(grid, names, with_figures=True)
        reproduction.save_figures(parts, figures)
        reproduction.write_markdown(parts, page, figures, "dpcert reproduce this")
        pages.append({path.name: path.read_bytes() for path in (page, *sorted(figures.iterdir()))})
    assert pages[0] == pages[1]
    text = pages[0]["results.md"].decode()
    assert (
        "by `dpcert reproduce this`" in text
        and "We agree." in text
        and "![figure-radii](../results/figures/figure-radii.png)" in text
    )
    assert set(pages[0]) == {
        "results.md",
        *(f"figure-{n}.{e}" for n in ("radii", "cifar10-comparison") for e in ("png", "svg")),
    }
    for row in [row for part in parts for table in part.tables for row in table.rows]:
        assert " | ".join(row) in text


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.in_all and not name.startswith("table")])
def test_every_figure_draws_all_lines_with_a_legend_outside(grid, name):
    (part,) = sections(grid, [name], with_figures=True)
    if name in ("ablation-learning-rate", "ablation-clip-norm"):
        assert part.figures == {}
        return
    assert part.figures
    for figure in part.figures.values():
        (legend,) = figure.legends
        assert all(axes.get_legend() is None for axes in figure.axes)
        shown = {text.get_text() for text in legend.get_texts()}
        lines = 3 if "cifar" in name else 4 if "radii" in name else 6 if "ablation" in name else 7
        assert len(shown) == lines
        assert not any("not run" in axes.get_title() for axes in figure.axes) or "cifar" in name


def test_a_figure_says_what_was_not_run(tmp_path):
    for method in ("dp-gaussian", "dp-smoothadv", "dp-stability", "dp-macer", "dpsgd"):
        fake_run(tmp_path, Cell("mnist", method), {0.5: radius_of(1.2, 0.5)})
    (part,) = sections(tmp_path, ["figure-certified-accuracy"], with_figures=True, datasets=["mnist"])
    titles = [axes.get_title() for axes in part.figures["figure-certified-accuracy"].axes]
    assert [title.split("\n")[-1] for title in titles][1] == "not run: Regular, PSAC"
    assert titles[2].endswith("not run") and part.figures
    (empty,) = sections(tmp_path / "nowhere", ["figure-certified-accuracy"], with_figures=True)
    assert empty.figures == {}


def test_the_legend_keeps_its_order_where_the_first_panel_lacks_lines(tmp_path):
    fake_run(tmp_path, Cell("mnist", "dp-gaussian"), {0.5: radius_of(1.2, 0.5)})
    for method in ("dpsgd", "dp-gaussian", "dp-macer"):
        fake_run(tmp_path, Cell("fashion-mnist", method), {0.5: radius_of(0.9, 0.5)})
    (part,) = sections(tmp_path, ["figure-certified-accuracy"], with_figures=True)
    (legend,) = part.figures["figure-certified-accuracy"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["DPSGD", "DP-Gaussian", "DP-MACER"]


def test_summary_counts_apart_what_cannot_be_compared(grid):
    line = reproduction.summary(sections(grid, ["table1", "figure-cifar10-comparison"]))
    verdicts, apart, claims = line.split("; ")
    counts = [sum(int(count) for count in re.findall(r"(\d+) [a-z]", part)) for part in (verdicts, apart)]
    compared = [place for place in TABLE_1 if place[0] in DATASETS and place[1] in OTHER_FORMULA]
    assert apart.startswith("not comparable: ") and counts == [3 * (len(TABLE_1) - len(compared)), 3 * len(compared)]
    of_table, of_comparison = 3 + 3 + 3 + 1 + 3 + 3 + 3 + 3, 3 + 3 + 3  # about CIFAR-10, of which there is no run
    assert "1 does not hold" in claims and f"{of_table + of_comparison} not run" in claims
