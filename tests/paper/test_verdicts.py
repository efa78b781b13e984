"""The words for differences: exact at their limits, and a looser twin is caught."""

import math

import numpy as np
import pytest

from dpcert.paper.grid import Cell
from dpcert.paper.published import OTHER_FORMULA
from dpcert.paper.result_index import Place, ResultIndex
from dpcert.paper.verdicts import (
    Figure,
    accuracy_verdict,
    acr_of,
    acr_verdict,
    certified_of,
    certified_verdict,
    clean_of,
    marked,
    verdict,
)
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


def _seeds(tmp_path, means):
    cells = [Cell("mnist", "dpsgd", seed=seed) for seed in range(len(means))]
    for cell, mean in zip(cells, means, strict=True):
        fake_run(tmp_path, cell, {0.5: radius_of(mean, 0.5, seed=1)}, clean=mean)
    places = {Place("mnist", "dpsgd", 0.5, cell.seed): tmp_path / cell.name for cell in cells}
    return ResultIndex(places).seeds("mnist", "dpsgd", 0.5)


def test_one_seed_has_the_error_of_its_images(tmp_path):
    seeds = _seeds(tmp_path, [0.7])
    earned = radius_of(0.7, 0.5, seed=1)
    found = acr_of(seeds)
    assert found.spread is None
    assert found.value == pytest.approx(earned.mean(), abs=1e-6)  # rows keep six digits
    assert found.error == pytest.approx(earned.std(ddof=1) / math.sqrt(len(earned)), rel=1e-4)
    assert clean_of(seeds) == Figure(pytest.approx(70.0), 0.0, (pytest.approx(70.0),))


def test_several_seeds_have_a_spread_beside_the_error(tmp_path):
    seeds = _seeds(tmp_path, [0.5, 0.7, 0.9])
    values = [run.acr for run in seeds.runs]
    found = acr_of(seeds)
    assert found.value == pytest.approx(np.mean(values)) == seeds.acr and found.each == tuple(values)
    assert found.spread == pytest.approx(np.std(values, ddof=1))
    assert found.error == pytest.approx(np.mean([run.acr_error for run in seeds.runs]))
    clean = clean_of(seeds)
    assert clean is not None and clean.value == pytest.approx(70.0) and clean.spread == pytest.approx(20.0)


def test_certified_accuracy_has_the_error_of_a_share(tmp_path):
    seeds = _seeds(tmp_path, [0.3])
    share = float((radius_of(0.3, 0.5, seed=1) >= 0.25).mean())
    found = certified_of(seeds, 0.25)
    assert found.value == pytest.approx(100 * share)
    assert found.error == pytest.approx(100 * math.sqrt(share * (1 - share) / 99))


@pytest.mark.parametrize(
    ("ours", "error", "each", "word"),
    [
        (53.0, 0.1, (), "agrees"),
        (46.9, 0.1, (), "worse"),
        (53.1, 0.1, (), "better"),
        (40.0, 5.0, (), "agrees"),
        (40.0, 1.0, (36.0, 44.0), "agrees (spread)"),
        (40.0, 1.0, (39.0, 41.0), "worse"),
    ],
)
def test_verdicts_of_certified_accuracy(ours, error, each, word):
    assert certified_verdict(Figure(ours, error, each), 50.0) == word


def test_agreement_by_the_seeds_alone_is_another_word():
    assert acr_verdict(Figure(0.9, 0.01, (0.8, 1.0)), 1.0) == "agrees (spread)"
    assert acr_verdict(Figure(0.98, 0.01, (0.8, 1.16)), 1.0) == "agrees"
    assert acr_verdict(Figure(0.9, 0.01, (0.89, 0.91)), 1.0) == "worse"
    assert marked("psac", "agrees (spread)") == "agrees (spread) (not comparable)"
