"""Progress reporting for long tasks, independent of the display."""

from typing import Protocol


class Progress(Protocol):
    """Called with the number of finished units; `facts` are short texts to show (epsilon, ACR so far)."""

    def __call__(self, done: int, total: int, **facts: str) -> None:
        """Show `done` of `total`."""


class EventHandler(Protocol):
    """Called with each event; `passing` marks a status line that the next one replaces."""

    def __call__(self, text: str, *, passing: bool = False) -> None:
        """Show it."""


def silent(done: int, total: int, **facts: str) -> None:
    """Show nothing."""


def shifted(progress: Progress, before: int, of_all: int) -> Progress:
    """Return a progress that reports part of a task: `before` units came earlier, `of_all` is the whole task."""

    def report(done: int, total: int, **facts: str) -> None:
        progress(before + done, of_all, **facts)

    return report
