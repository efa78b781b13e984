"""D18: one, two and four ranks train alike, and the ledger does not know how many there were."""

import numpy as np
import pytest

from tests.scale import trainings
from tests.scale.group import run_ranks

TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def alone():
    return {case: trainings.train(case) for case in trainings.CASES}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    return {size: run_ranks(tmp_path_factory.mktemp("ranks"), size, trainings.all_cases) for size in (2, 4)}


def furthest(found, expected) -> float:
    return float(np.abs(found[1] - expected[1]).max())


@pytest.mark.parametrize("case", trainings.CASES)
def test_the_number_of_ranks_changes_neither_ledger_nor_weights(alone, on_ranks, case):
    for size, ranks in on_ranks.items():
        for found in ranks:
            assert found[case][0] == alone[case][0], "the ledger's bytes"
            assert np.array_equal(found[case][1], ranks[0][case][1]), "all ranks have the same weights, bit for bit"
        assert furthest(ranks[0][case], alone[case]) <= TOLERANCE, size


@pytest.mark.parametrize("name", trainings.TWINS)
def test_twins_are_told_from_the_real_step(alone, on_ranks, name):
    for case in trainings.PAPER_CASES:
        assert furthest(on_ranks[2][0][f"{case}, {name}"], alone[case]) > 100 * TOLERANCE


def test_the_evidence(alone, on_ranks, evidence):
    worst = max(furthest(ranks[0][case], alone[case]) for ranks in on_ranks.values() for case in trainings.CASES)
    twins = min(
        furthest(on_ranks[2][0][f"{case}, {name}"], alone[case]) for name in trainings.TWINS for case in trainings.PAPER_CASES
    )
    assert worst <= TOLERANCE < twins
    evidence(
        "D18",
        figure=f"1, 2 and 4 ranks: same ledger bytes, largest difference of a weight {worst:.0e}",
        trials=2 * len(trainings.CASES),
        twin=f"noise, normalization or sampling per rank: at least {twins:.0e} off",
    )
