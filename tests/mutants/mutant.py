"""What a hand-made fault is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """In `file` (below src/dpcert) the text `old`, which occurs once, becomes `new`; then one of `tests` must fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
