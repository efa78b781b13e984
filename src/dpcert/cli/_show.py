"""Progress bars and tables for a terminal; plain lines where there is none."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence

from ..progress import Progress

_SECONDS_BETWEEN_LINES = 30.0


@contextlib.contextmanager
def progress_bar(label: str, unit: str) -> Iterator[Progress]:
    """A bar with facts, throughput and time left; a line every half minute when stderr is not a terminal."""
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
    began: list[tuple[float, int]] = []

    def show(done: int, total: int, **facts: str) -> None:
        if not began:  # nothing is drawn for work that turns out to be none
            began.append((time.monotonic(), done))
            bar.add_task(label, facts="")
            bar.start()
        bar.update(bar.task_ids[0], completed=done, total=total, facts=_facts(facts, done, began[0], unit))

    try:
        yield show
    finally:
        bar.stop()


def _lines(label: str, unit: str) -> Progress:
    began: list[tuple[float, int]] = []
    due = [0.0]

    def show(done: int, total: int, **facts: str) -> None:
        now = time.monotonic()
        began.append((now, done)) if not began else None
        if now >= due[0] or done == total:
            due[0] = now + _SECONDS_BETWEEN_LINES
            speed, left = _speed(done, began[0]), ""
            if speed > 0 and done < total:
                left = f", {(total - done) / speed / 60:.1f} min left"
            print(f"{label} {done}/{total} {_facts(facts, done, began[0], unit)}{left}", file=sys.stderr, flush=True)

    return show


def _speed(done: int, began: tuple[float, int]) -> float:
    elapsed = time.monotonic() - began[0]
    return (done - began[1]) / elapsed if elapsed > 0 else 0.0


def _facts(facts: dict[str, str], done: int, began: tuple[float, int], unit: str) -> str:
    words = [f"{name} {value}" for name, value in facts.items() if value]
    speed = _speed(done, began)
    return "  ".join([*words, f"{speed:.3g} {unit}/s"] if speed else words)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """A table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)  # cells hold brackets of their own
    if not console.is_terminal:
        console.width = 200
    if console.width < 20 * len(headings) and len(headings) > 5:  # too narrow for so many columns: a block for each row
        for row in rows:
            console.print("\n".join(f"{heading:>20}  {cell}" for heading, cell in zip(headings, row, strict=True)))
        return
    console.print(table)
