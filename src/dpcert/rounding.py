"""Format numbers conservatively: round lower bounds down and spent budgets up."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

_ALL_WHOLE_ABOVE = 2.0**53


def floor_text(value: float, digits: int) -> str:
    """Return `value` with `digits` decimals, rounded down in decimal (reading and writing the text again keeps its digits)."""
    return _text(value, digits, ROUND_FLOOR)


def ceil_text(value: float, digits: int) -> str:
    """Return `value` with `digits` decimals, rounded up; infinity stays infinity."""
    return _text(value, digits, ROUND_CEILING)


def _text(value: float, digits: int, rounding: str) -> str:
    shortest = repr(float(value))
    if abs(value) >= _ALL_WHOLE_ABOVE:  # also infinity: nothing to round, and Decimal has too few digits
        return shortest
    return str(Decimal(shortest).quantize(Decimal(1).scaleb(-digits), rounding=rounding))
