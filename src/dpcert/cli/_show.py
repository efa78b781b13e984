"""Progress bars and tables for a terminal, or plain lines if there is none."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..progress import EventHandler, Progress, silent
from ..scale.environment import writes_output

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_STATUS_LINES = 60.0


@contextlib.contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Progress]:
    """A progress bar with facts, throughput and time left; a line every 30 seconds if stderr is not a terminal.

    Of several ranks, only rank 0 shows one.
    """
    if not writes_output():
        yield silent
        return
    if not sys.stderr.isatty():
        yield _lines(label, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bar = Bar(*columns, console=Console(stderr=True))
    start: list[tuple[float, int]] = []

    def show(done: int, total: int, **facts: str) -> None:
        if not start:  # draw nothing until there is work to show
            start.append((time.monotonic(), done))
            bar.add_task(label, facts="")
            bar.start()
        start[0] = _since(start[0], done)
        bar.update(bar.task_ids[0], completed=done, total=total, facts=_facts(facts, done, start[0], unit))

    try:
        yield show
    finally:
        bar.stop()


@contextlib.contextmanager
def event_printer() -> Iterator[EventHandler]:
    """Print each event as a line. Progress is one line that updates in place, or a line per minute without a terminal."""
    due = [0.0]

    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False)
        with console.status("") as status:

            def live(text: str, *, passing: bool = False) -> None:
                status.update(text) if passing else console.print(text)

            yield live
        return

    def lines(text: str, *, passing: bool = False) -> None:
        if not passing or time.monotonic() >= due[0]:
            due[0] = time.monotonic() + _SECONDS_BETWEEN_STATUS_LINES if passing else due[0]
            print(text, file=sys.stderr, flush=True)

    yield lines


def _lines(label: str, unit: str) -> Progress:
    start: list[tuple[float, int]] = []
    due = [0.0]

    def show(done: int, total: int, **facts: str) -> None:
        now = time.monotonic()
        start[:] = [_since(start[0], done) if start else (now, done)]
        if now >= due[0] or done == total:
            due[0] = now + _SECONDS_BETWEEN_LINES
            speed, left = _speed(done, start[0]), ""
            if speed > 0 and done < total:
                left = f", {(total - done) / speed / 60:.1f} min left"
            print(f"{label} {done}/{total} {_facts(facts, done, start[0], unit)}{left}", file=sys.stderr, flush=True)

    return show


def _since(start: tuple[float, int], done: int) -> tuple[float, int]:
    """Measure speed from the first progress on: preparations, such as computing features, do not count."""
    return (time.monotonic(), done) if done <= start[1] else start


def _speed(done: int, start: tuple[float, int]) -> float:
    elapsed = time.monotonic() - start[0]
    return (done - start[1]) / elapsed if elapsed > 0 else 0.0


def _facts(facts: dict[str, str], done: int, start: tuple[float, int], unit: str) -> str:
    words = [f"{name} {value}" for name, value in facts.items() if value]
    speed = _speed(done, start)
    return "  ".join([*words, f"{speed:.3g} {unit}/s"] if speed else words)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table, or one block per row if the table would have to break words such as names and URLs."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)  # cells contain literal brackets
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200
    columns = list(zip(headings, *rows, strict=True))
    widths = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    spare = console.width - sum(widths) - 3 * len(columns) - 1
    if spare < 0 or (len(headings) > 5 and console.width < 20 * len(headings)):
        _print_blocks(console, headings, rows, title)
        return
    wanted = [max(map(len, column)) - width for column, width in zip(columns, widths, strict=True)]
    # Narrow columns first; wide ones share the rest.
    for done, place in enumerate(sorted(range(len(columns)), key=wanted.__getitem__)):
        given = min(wanted[place], spare // (len(columns) - done))
        widths[place], spare = widths[place] + given, spare - given
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(heading, width=width)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_blocks(console: "Console", headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    """Print the first cell of each row and the others below it. The terminal wraps long lines, so that they can be copied."""
    if title is not None:
        console.print(title, soft_wrap=True)
    width = max(len(heading) for heading in headings[1:])
    for first, *others in rows:
        console.print(first, soft_wrap=True)
        for heading, cell in zip(headings[1:], others, strict=True):
            if cell:
                console.print(f"  {heading:<{width}}  {cell}", soft_wrap=True)
