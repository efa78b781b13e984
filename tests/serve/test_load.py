"""Ten thousand hostile requests and a minute of load on the real service (S7); `make test-serve` has ten minutes of load."""

import pytest

from tests.serve.load import is_flat, run


@pytest.mark.slow
def test_hostile_requests_and_load(evidence):
    seen = run(10_000, 1.0, 8)
    assert seen["wrong"] == [] and seen["restarts"] == seen["internal_errors"] == 0 and seen["exit_code"] == 130, seen
    assert seen["memory_is_flat"] and seen["hostile_requests"] == 10_000 and seen["load_requests"] > 100, seen
    figure = f"10,000 hostile requests, then {seen['load_requests']} under load: 0 restarts, 0 wrong answers, memory flat"
    evidence("S7", figure=figure, trials=10_000 + seen["load_requests"], twin="a radius its votes do not prove: caught")


def test_twin_a_leak_is_not_flat():
    assert is_flat([400.0, 450.0, 470.0, 471.0, 472.0, 480.0]) and not is_flat([400.0 + 10 * step for step in range(40)])
