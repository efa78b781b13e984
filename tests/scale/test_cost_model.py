"""The cost model: its arithmetic, and its stored predictions against the stored measurements."""

import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks import cost_model
from benchmarks.cost_model import Cost, Machine, cost_of, fitted
from torch import nn

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()
STORED = json.loads((ROOT / "benchmarks" / "results" / "cost_model.json").read_text())


def test_operations_are_counted_as_on_paper():
    """conv: 2 k^2 c_in c_out per position; linear: 2 in out. A multiplication and an addition are two operations."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 10))
    network[0].requires_grad_(False)
    cost = cost_of(network, (1, 8, 8))
    assert cost == Cost(2 * 9 * 4 * 36 + 2 * 4 * 36 * 10, 10 * 145)
    assert next(network.parameters()).is_meta  # nothing was computed


def test_a_ring_sends_almost_two_copies():
    cost = Cost(1.0, 1000)
    assert cost.bytes_reduced(1) == 0 and cost.bytes_reduced(2) == 8000 and cost.bytes_reduced(8) == pytest.approx(14_000)


def test_noise_is_drawn_once_however_many_ranks():
    cost = Cost(1e6, 10**6)
    one, many = (Machine(ranks, 1e9, 1e-8).seconds_a_step(cost, 100, 3) for ranks in (1, 10**6))
    assert one == pytest.approx(0.9 + 0.01) and many == pytest.approx(0.01, rel=1e-3)


def test_a_fit_repeats_its_points():
    cost, truth = Cost(1e6, 100), Machine(2, 5e9, 2e-8, fixed=0.02)
    found = fitted((1, truth.seconds_a_step(cost, 512, 1)), (3, truth.seconds_a_step(cost, 512, 3)), cost, 512, 2, 2e-8)
    assert math.isclose(found.rate, truth.rate, rel_tol=1e-9) and math.isclose(found.fixed, truth.fixed, rel_tol=1e-9)


@pytest.mark.parametrize("name", STORED["checked"])
def test_stored_predictions_are_near_the_stored_measurements(name):
    point = STORED["checked"][name]
    assert 0.6 < point["predicted_seconds"] / point["measured_seconds"] < 1.6


def test_the_page_has_the_stored_figures():
    for name, point in STORED["checked"].items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {point['measured_seconds']:.3g} s | {point['predicted_seconds']:.3g} s |" in row, row
    for name, figures in STORED["predicted"].items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {figures['hours']:.2g} h |" in row, row
    assert f"{1e9 * STORED['seconds_a_normal']:.0f} ns" in PAGE


def test_predictions_follow_from_the_stored_rate_of_the_noise():
    assert cost_model.predicted(STORED["seconds_a_normal"]) == STORED["predicted"]


def test_packaged_models_cost_what_is_stored():
    for name, case in cost_model.CASES.items():
        cost = cost_model.cost_of_spec(*case)
        assert {"flops": cost.flops, "parameters": cost.parameters} == STORED["costs"][name]
    assert not torch.empty(0).is_meta
