"""Progress reporting for long tasks, independent of the display."""

from typing import Protocol


class Progress(Protocol):
    """Called with the number of finished units; `facts` are short texts to show (epsilon, ACR so far)."""

    def __call__(self, done: int, total: int, **facts: str) -> None:
        """Show `done` of `total`."""


def silent(done: int, total: int, **facts: str) -> None:
    """Show nothing."""
