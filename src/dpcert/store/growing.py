"""Files of rows that grow: each row is appended as soon as it is computed, so interrupted work can resume."""

import contextlib
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..progress import Progress
from .durable import Appender, read_file, write_atomically
from .records import AnyRow, header, read_rows, row_of, text_of

_SECONDS_BETWEEN_SYNCS = 2.0
Key = Any  # what identifies a row; hashable


def _itself(key: Key) -> Any:
    return key


def append_missing_rows(
    kind: type[AnyRow],
    path: Path,
    wanted: Sequence[Hashable],
    make: Callable[[list[Key]], Iterator[AnyRow]],
    progress: Progress,
    *,
    mean_of: tuple[str, Callable[[AnyRow], float]] | None = None,
    order: Callable[[Key], Any] = _itself,
) -> list[AnyRow]:
    """Return the rows with the keys `wanted`: those already in `path`, and those that `make` computes for the missing keys.

    `mean_of` names a figure whose running mean is shown as progress. The finished file is sorted by `order`.
    """
    done: dict[Key, AnyRow] = rows_so_far(kind, path)
    _write_sorted(kind, path, done, order)  # drops a half-written last line
    todo = [key for key in wanted if key not in done]
    if todo:
        before = len(wanted) - len(todo)
        total = 0.0 if mean_of is None else sum(mean_of[1](done[key]) for key in set(wanted) & done.keys())
        with contextlib.closing(_appended(kind, path, make(todo))) as rows:
            for position, row in enumerate(rows, start=1):
                done[row.key] = row
                facts = {}
                if mean_of is not None:
                    total += mean_of[1](row)
                    facts = {mean_of[0]: f"{total / (before + position):.4g}"}
                progress(before + position, len(wanted), **facts)
        _write_sorted(kind, path, done, order)
    return [done[key] for key in wanted]


def rows_so_far(kind: type[AnyRow], path: Path) -> dict[Key, AnyRow]:
    """The complete rows of a possibly truncated file, by key; empty if there is no file."""
    return {row.key: row for row in read_rows(kind, path, allow_torn_end=True)} if path.exists() else {}


def drop(kind: type[AnyRow], path: Path, keys: Iterable[Key], order: Callable[[Key], Any] = _itself) -> None:
    """Remove rows from a file, so that `append_missing_rows` computes them again."""
    dropped = set(keys)
    _write_sorted(kind, path, {key: row for key, row in rows_so_far(kind, path).items() if key not in dropped}, order)


def _appended(kind: type[AnyRow], path: Path, rows: Iterator[AnyRow]) -> Generator[AnyRow]:
    """Append rows as they arrive; yield them as written (rounded), so that reports match the file."""
    with Appender(path, _SECONDS_BETWEEN_SYNCS) as file:
        for row in rows:
            text = text_of(row)
            file.add(text)
            yield row_of(kind, text)


def _write_sorted(kind: type[AnyRow], path: Path, rows: dict[Key, AnyRow], order: Callable[[Key], Any]) -> None:
    """Write `rows` to `path` in order, unless the file already has exactly this content."""
    lines = [header(kind), *(text_of(rows[key]) for key in sorted(rows, key=order))]
    data = ("\n".join(lines) + "\n").encode()
    if not path.exists() or read_file(path) != data:
        write_atomically(path, data)
