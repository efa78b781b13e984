"""Numbers as text that never promises more: what is proved from below is rounded down, what is spent is rounded up."""

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

_ALL_WHOLE_ABOVE = 2.0**53


def floor_text(value: float, digits: int) -> str:
    """`value` with `digits` decimals, rounded down in decimal (text read and written again keeps its digits)."""
    return _text(value, digits, ROUND_FLOOR)


def ceil_text(value: float, digits: int) -> str:
    """`value` with `digits` decimals, rounded up; infinity as it is."""
    return _text(value, digits, ROUND_CEILING)


def _text(value: float, digits: int, rounding: str) -> str:
    shortest = repr(float(value))
    if abs(value) >= _ALL_WHOLE_ABOVE:  # infinity too: there is nothing to round, and Decimal has too few digits for it
        return shortest
    return str(Decimal(shortest).quantize(Decimal(1).scaleb(-digits), rounding=rounding))
