"""Numbers as text that never promises more: what is proved from below is rounded down, what is spent is rounded up."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal


def floor_text(value: float, digits: int) -> str:
    """`value` with `digits` decimals, rounded down in decimal (text read and written again keeps its digits)."""
    return str(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_FLOOR))


def ceil_text(value: float, digits: int) -> str:
    """`value` with `digits` decimals, rounded up; infinity as it is."""
    if math.isinf(value):
        return str(value)
    return str(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING))
