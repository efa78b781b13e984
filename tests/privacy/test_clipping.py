"""Clip rules: the bound they keep, and the formulas of the paper."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpcert.privacy.clipping import CLIP_RULES, Automatic, Flat, NoClip, Psac
from dpcert.privacy.unbounded import UNBOUNDED

RULES = [Flat(), Psac(), Psac(r=1e-9), Automatic(), Automatic(gamma=1e-9)]
NORMS = st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, 5e-324, 1e-40, 1e-12, 0.1, 0.1 * (1 + 2**-52), 1e38, 1.7e308]))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(norm=NORMS, clip_norm=st.floats(1e-6, 1e6))
def test_the_clipped_norm_is_at_most_the_sensitivity(rule, norm, clip_norm):
    factor = float(rule.factors(torch.tensor([norm], dtype=torch.float64), clip_norm)[0])
    assert math.isfinite(factor) and factor >= 0
    assert factor * norm <= rule.sensitivity(clip_norm)


@pytest.mark.parametrize("rule", [*RULES, NoClip()], ids=repr)
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_gets_nothing(rule, norm):
    assert float(rule.factors(torch.tensor([norm], dtype=torch.float64), 0.1)[0]) == 0.0


def test_formulas_of_the_paper():
    n = torch.tensor([1e-4, 0.01, 0.05, 0.2, 3.0], dtype=torch.float64)
    close = {"rtol": 2e-6, "atol": 0.0}
    torch.testing.assert_close(Flat().factors(n, 0.1), 1 / torch.clamp(n / 0.1, min=1.0), **close)
    torch.testing.assert_close(Psac(0.01).factors(n, 0.1), 0.1 / (n + 0.01 / (n + 0.01)), **close)
    torch.testing.assert_close(Automatic(0.01).factors(n, 0.1), 0.1 / (n + 0.01), **close)


@pytest.mark.parametrize("value", [1e-4, 0.3, 7.0])
def test_a_rule_uses_the_parameter_it_was_given(value):
    n = torch.tensor([1e-4, 0.01, 0.2, 3.0], dtype=torch.float64)
    close = {"rtol": 2e-6, "atol": 0.0}
    torch.testing.assert_close(Psac(r=value).factors(n, 0.1), 0.1 / (n + value / (n + value)), **close)
    torch.testing.assert_close(Automatic(gamma=value).factors(n, 0.1), 0.1 / (n + value), **close)


def test_psac_is_not_the_authors_released_factor():
    """Their C / (n + r/n + r) weighs small gradients down up to ten times; the paper's formula does not."""
    n = torch.tensor([0.005], dtype=torch.float64)
    released = 0.1 / (n + 0.01 / n + 0.01)
    assert float(Psac(0.01).factors(n, 0.1) / released) > 2.5


def test_flat_leaves_short_gradients_alone():
    assert float(Flat().factors(torch.tensor([0.05], dtype=torch.float64), 0.1)[0]) == 1.0


def test_no_clip_has_no_bound():
    without = {name for name, rule in CLIP_RULES.items() if math.isinf(rule.sensitivity(0.1))}
    assert without == {NoClip.name, "batchmean", "unperturbed"} and without < set(UNBOUNDED)
    assert set(CLIP_RULES) - set(UNBOUNDED) == {"flat", "psac", "automatic"}


@pytest.mark.parametrize("make", [lambda: Psac(r=0.0), lambda: Automatic(gamma=-1.0), lambda: Psac(r=math.nan)])
def test_parameters_that_break_the_bound_are_refused(make):
    with pytest.raises(ValueError, match="must be a number"):
        make()
