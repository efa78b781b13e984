"""How long work tells how far it is, without knowing who listens."""

from typing import Protocol


class Progress(Protocol):
    """Called with the number of finished units; `facts` are short texts worth showing (epsilon, ACR so far)."""

    def __call__(self, done: int, total: int, **facts: str) -> None:
        """Show `done` of `total`."""


def silent(done: int, total: int, **facts: str) -> None:
    """Show nothing."""
