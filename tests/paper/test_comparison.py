"""The paper's figures next to ours: only where it was asked the same, and only in a report that is given them."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpcert.cli.export import export
from dpcert.cli.report import report
from dpcert.paper.comparison import figures_of
from dpcert.paper.grid import Cell
from dpcert.release.files import read_public_files
from dpcert.report import words
from dpcert.report.html import render, write_report
from dpcert.report.tables import PaperFigures, read_run, summary
from tests.grid_fakes import fake_run, radius_of

RUNS = Path(__file__).parents[1] / "stored_runs"
RADII = {0.25: np.full(100, 0.1), 0.5: radius_of(0.8, 0.5), 1.0: np.full(100, 0.3)}


@pytest.fixture
def dpsgd(tmp_path):
    return fake_run(tmp_path, Cell("mnist", "dpsgd"), RADII)


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("epsilon = 3.0", "epsilon = 8.0"),
        ("delta = 1e-05", "delta = 1e-04"),
        ("copies = 2", "copies = 6"),
        ("keep_original = true", "keep_original = false"),
        ("sigma = 0.5", "sigma = 0.25"),
        ('name = "mnist"', 'name = "mnist"\npath = "mine.npz"'),
    ],
)
def test_the_papers_figures_stand_beside_a_run_of_the_same_request_only(tmp_path, written, instead):
    facts = read_run(fake_run(tmp_path, Cell("mnist", "dp-gaussian"), {0.5: RADII[0.5]}))
    assert written in facts.config and figures_of(facts, facts.main).acr == 1.246
    other = replace(facts, config=facts.config.replace(written, instead, 1))
    assert figures_of(other, facts.main) is None and "paper" not in "".join(summary([other], figures_of)[0])


@pytest.mark.parametrize("special", [{"alpha_is": "simultaneous"}, {"n": 1000}, {"skip_misclassified": True}])
def test_the_papers_figures_stand_beside_certificates_of_the_same_votes_only(dpsgd, special):
    facts = read_run(dpsgd)
    assert figures_of(facts, facts.main).acr == 0.344
    assert figures_of(facts, replace(facts.main, figures={**facts.main.figures, **special})) is None


def test_the_papers_figures_of_a_private_row_do_not_stand_beside_a_run_that_is_not_private(dpsgd):
    facts = read_run(dpsgd)
    regular = read_run(fake_run(dpsgd.parent, Cell("mnist", "regular"), {0.5: RADII[0.5]}))
    for run, printed in ((facts, None), (regular, 0.308)):  # the second never was
        leaking = {**run.metrics["privacy"], "private": False, "reason": "no noise"}
        paper = figures_of(replace(run, metrics={**run.metrics, "privacy": leaking}), run.main)
        assert (paper and paper.acr) == printed


def test_the_paper_certified_the_baselines_at_every_sigma(dpsgd):
    facts = read_run(dpsgd)
    assert [figures_of(facts, facts.certified_at(sigma)).acr for sigma in RADII] == [0.606, 0.344, 0.260]


def test_another_recipe_at_the_same_budget_is_compared(dpsgd):
    facts = read_run(dpsgd)
    tuned = replace(facts, config=facts.config.replace("learning_rate = 0.5", "learning_rate = 1.0"))
    assert tuned.config != facts.config and figures_of(tuned, tuned.main) == figures_of(facts, facts.main)


def test_the_papers_figure_stands_against_our_interval():
    facts = read_run(RUNS / "mnist-dp-gaussian")
    c = facts.certified[0]
    for interval, word in (([1.0, 1.1], "above"), ([1.3, 1.4], "below"), ([1.2, 1.3], "within")):
        other = replace(facts, certified=[replace(c, figures={**c.figures, "acr_interval": interval})])
        assert f"average certified radius of 1.246 ({word} our 95 % interval)" in words.compared(other, figures_of)
    for share, word in (([0.93, 0.946], "above"), ([0.948, 0.96], "below"), ([0.946, 0.948], "within")):
        intervals = {**c.figures["certified_accuracy_interval"], "0.25": share}
        other = replace(facts, certified=[replace(c, figures={**c.figures, "certified_accuracy_interval": intervals})])
        assert f"94.7 % certified at 0.25 ({word} our 95 % interval)" in words.compared(other, figures_of)
    other = replace(facts, metrics={**facts.metrics, "method": "dp-stability"})
    assert "another formula" in words.compared(other, figures_of) and "another formula" not in words.compared(facts, figures_of)
    assert "for this method and σ at ε = 3, δ = 1e-05 an average" in words.compared(facts, figures_of)
    unknown = replace(facts, metrics={**facts.metrics, "method": "own"})
    assert words.compared(unknown, figures_of) == "" and "Compared" not in words.in_words(unknown, figures_of)


def test_a_report_shows_what_it_is_given_and_nothing_else(tmp_path):
    """Without the function no part of a report speaks of the paper; with another one it shows that one's figures."""
    runs = [read_run(RUNS / "mnist-dp-gaussian")]
    alone = render(runs)
    assert "paper_acr" not in alone and "the paper" not in alone and "Compared" not in alone
    assert "paper" not in "".join(summary(runs)[0])

    def other(run, certified):
        return PaperFigures(12.34, 5.678, 91.0, "Somebody else prints 5.678.")

    page = render(runs, other)
    assert 'data-key="paper_acr" data-value="5.678">paper 5.678<' in page and ">paper 91.0<" in page
    assert "the paper, at radius 0.25" in page and "Somebody else prints 5.678." in page
    assert "[paper 12.34 %]" in "".join(summary(runs, other)[0]) and "[paper 5.678]" in "".join(summary(runs, other)[0])
    for folder, paper in (("ours", {}), ("theirs", {"paper": other})):
        write_report(runs, None, tmp_path / folder, **paper)
    drawn = {folder: (tmp_path / folder / "certified_accuracy.svg").read_text() for folder in ("ours", "theirs")}
    assert "the paper" in drawn["theirs"] and "the paper" not in drawn["ours"]


def test_the_commands_show_the_papers_figures(tmp_path, capsys):
    """`dpcert report` (which `dpcert run` calls) and `dpcert export` pass the function."""
    run = shutil.copytree(RUNS / "mnist-dp-gaussian", tmp_path / "run")
    report([run], html=run / "report.html")
    assert "[paper" in capsys.readouterr().out and 'data-key="paper_acr"' in (run / "report.html").read_text()
    export(run, tmp_path / "bundle.zip")
    assert b'data-key="paper_acr"' in read_public_files(tmp_path / "bundle.zip").content["report.html"]
