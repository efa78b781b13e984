"""Checks of single values with uniform messages: name, value, bound, remedy."""

import difflib
import math
from collections.abc import Collection
from typing import Any

from .errors import ConfigError, DpcertError

_LONGEST_SHOWN = 200


def shown(value: Any) -> str:
    """Return the repr of a value, on one line of bounded length."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or deeply nested lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def finite_in(
    name: str,
    value: float,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
    remedy: str = "",
    error: type[DpcertError] = ConfigError,
) -> float:
    """Return `value` if it is a finite number between the bounds; raise `error` otherwise."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)
    inside = number and (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    if not inside:
        bound = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise error(f"{name} is {shown(value)}, must be a number in {bound}" + (f"; {remedy}" if remedy else ""))
    return float(value)


def integer_in(
    name: str, value: int, low: int, high: int | None = None, *, remedy: str = "", error: type[DpcertError] = ConfigError
) -> int:
    """Return `value` if it is an integer of at least `low` (and at most `high`); raise `error` otherwise."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise error(f"{name} is {shown(value)}, must be a whole number {bound}" + (f"; {remedy}" if remedy else ""))
    return value


def one_of(name: str, value: str, known: Collection[str], *, error: type[DpcertError] = ConfigError) -> str:
    """Return `value` if it is a known name; otherwise raise `error` with the list of known names."""
    if value not in known:
        raise error(f"{name} {shown(value)} is unknown; {meant(value, known)}choose one of: {', '.join(known)}")
    return value


def meant(value: str, known: Collection[str]) -> str:
    """Return ``did you mean ...? `` for a typo, or an empty string if no known name is similar."""
    near = difflib.get_close_matches(value[:_LONGEST_SHOWN], known, 1)
    return f"did you mean {near[0]}? " if near else ""
