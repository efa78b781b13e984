"""The words for differences: exact at their limits, and a looser twin is caught."""

import math

import numpy as np
import pytest

from dpcert.experiment.grid import Cell
from dpcert.report.paper import OTHER_FORMULA
from dpcert.report.shelf import Place, Shelf
from dpcert.report.verdicts import Figure, accuracy_verdict, acr_of, acr_verdict, clean_of, marked, verdict
from tests.grid_fakes import fake_run, radius_of

CASES = [  # ours, its error, the paper's, the word
    (1.04, 0.0, 1.0, "agrees"),
    (0.96, 0.0, 1.0, "agrees"),
    (1.10, 0.0, 1.0, "better"),
    (0.90, 0.0, 1.0, "worse"),  # a miss of 10 %
    (0.90, 0.06, 1.0, "agrees"),  # within two standard errors
    (0.90, 0.04, 1.0, "worse"),
    (0.30, 0.02, 0.344, "worse"),
    (0.31, 0.02, 0.344, "agrees"),
]


def misjudged(rule) -> int:
    return sum(rule(Figure(ours, error), paper) != word for ours, error, paper, word in CASES)


def test_verdicts_of_acr():
    assert misjudged(acr_verdict) == 0


def test_a_looser_rule_is_caught():
    """The twin: one that calls a miss of 10 % an agreement."""
    assert misjudged(lambda ours, paper: verdict(ours.value, paper, max(0.11 * paper, 2 * ours.error))) > 0
    assert misjudged(lambda ours, paper: verdict(ours.value, paper, max(0.05 * paper, 4 * ours.error))) > 0


@pytest.mark.parametrize(
    ("ours", "word"), [(98.0, "agrees"), (97.0, "agrees"), (96.99, "worse"), (99.0, "agrees"), (99.01, "better")]
)
def test_verdicts_of_accuracy(ours, word):
    assert accuracy_verdict(ours, 98.0) == word


def test_figures_of_other_formulas_are_marked():
    assert marked("dp-gaussian", "worse") == "worse"
    assert marked("dp-macer", "worse") == "worse (not comparable)"
    assert marked("dp-macer", "not run") == "not run"
    assert frozenset(("psac", "dp-smoothadv", "dp-stability", "dp-macer")) == OTHER_FORMULA


def _runs(tmp_path, means):
    cells = [Cell("mnist", "dpsgd", seed=seed) for seed in range(len(means))]
    for cell, mean in zip(cells, means, strict=True):
        fake_run(tmp_path, cell, {0.5: radius_of(mean, 0.5, seed=1)}, clean=mean)
    places = {Place("mnist", "dpsgd", 0.5, cell.seed): tmp_path / cell.name for cell in cells}
    return Shelf(places).seeds("mnist", "dpsgd", 0.5)


def test_one_seed_has_the_error_of_its_images(tmp_path):
    runs = _runs(tmp_path, [0.7])
    earned = radius_of(0.7, 0.5, seed=1)
    found = acr_of(runs)
    assert found.spread is None
    assert found.value == pytest.approx(earned.mean(), abs=1e-6)  # rows keep six digits
    assert found.error == pytest.approx(earned.std(ddof=1) / math.sqrt(len(earned)), rel=1e-4)
    assert clean_of(runs) == Figure(pytest.approx(70.0), 0.0, None)


def test_several_seeds_join_both_spreads(tmp_path):
    means = [0.5, 0.7, 0.9]
    runs = _runs(tmp_path, means)
    values = [run.acr for run in runs]
    found = acr_of(runs)
    assert found.value == pytest.approx(np.mean(values))
    assert found.spread == pytest.approx(np.std(values, ddof=1))
    assert found.error == pytest.approx(math.hypot(found.spread, np.mean([run.acr_error for run in runs])))
    clean = clean_of(runs)
    assert clean is not None and clean.value == pytest.approx(70.0) and clean.spread == pytest.approx(20.0)
