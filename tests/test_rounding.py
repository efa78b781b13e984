"""Rounding never promises more, whatever the number, and text read and written again is the same."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcert.rounding import ceil_text, floor_text

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(NUMBERS, st.integers(0, 9))
def test_down_is_never_above_and_up_is_never_below(value, digits):
    exact, unit = Fraction(repr(value)), Fraction(1, 10**digits)
    down, up = Fraction(floor_text(value, digits)), Fraction(ceil_text(value, digits))
    assert exact - unit < down <= exact <= up < exact + unit


@given(NUMBERS, st.integers(0, 9), st.sampled_from((floor_text, ceil_text)))
def test_text_read_and_written_again_is_the_same(value, digits, text):
    once = text(value, digits)
    assert text(float(once), digits) == once


@pytest.mark.parametrize("text", [floor_text, ceil_text])
def test_infinity_and_the_largest_numbers_stay_what_they_are(text):
    for value in (math.inf, -math.inf, 1e308, -1e308, 2.0**53, 1e28):
        assert float(text(value, 6)) == value


def test_no_more_decimals_than_asked_for():
    assert (floor_text(2.0**41 + 0.125, 2), ceil_text(2.0**41 + 0.125, 2)) == ("2199023255552.12", "2199023255552.13")


def test_the_twin_that_rounds_to_the_nearest_is_caught():
    assert f"{2.00004:.4f}" == "2.0000" != ceil_text(2.00004, 4) and f"{0.99996:.4f}" == "1.0000" != floor_text(0.99996, 4)
