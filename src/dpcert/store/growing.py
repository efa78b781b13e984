"""Files of rows that grow: each row is appended as soon as it is computed, so interrupted work can resume."""

import contextlib
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic

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

    def one_by_one(todo: list[list[Key]]) -> Generator[list[tuple[int, AnyRow]]]:
        rows = make(todo[0])
        yield from ([(0, row)] for row in rows)

    return append_missing_rows_to_all(kind, [(path, wanted)], one_by_one, progress, mean_of=mean_of, order=order)[0]


def append_missing_rows_to_all(
    kind: type[AnyRow],
    files: Sequence[tuple[Path, Sequence[Hashable]]],
    make: Callable[[list[list[Key]]], Generator[list[tuple[int, AnyRow]]]],
    progress: Progress,
    *,
    mean_of: tuple[str, Callable[[AnyRow], float]] | None = None,
    order: Callable[[Key], Any] = _itself,
) -> list[list[AnyRow]]:
    """Like `append_missing_rows` for several files at once, each with its own wanted keys.

    `make` gets the keys that are missing in each file. For every key that is missing somewhere, it yields the rows of that key,
    each with the place of its file.
    """
    done: list[dict[Key, AnyRow]] = [rows_so_far(kind, path) for path, _ in files]
    for (path, _), held in zip(files, done, strict=True):
        _write_sorted(kind, path, held, order)  # drops a half-written last line
    todo = [[key for key in wanted if key not in held] for (_, wanted), held in zip(files, done, strict=True)]
    if any(todo):
        keys, missing = {key for _, wanted in files for key in wanted}, {key for each in todo for key in each}
        earned = (
            None
            if mean_of is None
            else [_Mean(mean_of[1], wanted, held) for (_, wanted), held in zip(files, done, strict=True)]
        )
        with contextlib.ExitStack() as stack:
            appended = [stack.enter_context(Appender(path, _SECONDS_BETWEEN_SYNCS)) for path, _ in files]
            groups = stack.enter_context(contextlib.closing(make(todo)))
            for position, group in enumerate(groups, start=len(keys) - len(missing) + 1):
                for place, row in group:
                    text = text_of(row)
                    appended[place].add(text)
                    done[place][row.key] = written = row_of(kind, text)  # as written (rounded), so that reports match the file
                    if earned is not None:
                        earned[place].add(written)
                facts = {} if mean_of is None or earned is None else {mean_of[0]: " / ".join(map(str, earned))}
                progress(position, len(keys), **facts)
        for (path, _), held in zip(files, done, strict=True):
            _write_sorted(kind, path, held, order)
    return [[held[key] for key in wanted] for (_, wanted), held in zip(files, done, strict=True)]


class _Mean(Generic[AnyRow]):
    """The running mean of a figure of the wanted rows."""

    def __init__(self, of: Callable[[AnyRow], float], wanted: Sequence[Hashable], held: dict[Key, AnyRow]) -> None:
        present = set(wanted) & held.keys()
        self._of, self._count, self._total = of, len(present), sum(of(held[key]) for key in present)

    def add(self, row: AnyRow) -> None:
        self._count, self._total = self._count + 1, self._total + self._of(row)

    def __str__(self) -> str:
        return f"{self._total / self._count:.4g}" if self._count else "-"


def rows_so_far(kind: type[AnyRow], path: Path) -> dict[Key, AnyRow]:
    """The complete rows of a possibly truncated file, by key; empty if there is no file."""
    return {row.key: row for row in read_rows(kind, path, allow_torn_end=True)} if path.exists() else {}


def drop(kind: type[AnyRow], path: Path, keys: Iterable[Key], order: Callable[[Key], Any] = _itself) -> None:
    """Remove rows from a file, so that `append_missing_rows` computes them again."""
    dropped = set(keys)
    _write_sorted(kind, path, {key: row for key, row in rows_so_far(kind, path).items() if key not in dropped}, order)


def _write_sorted(kind: type[AnyRow], path: Path, rows: dict[Key, AnyRow], order: Callable[[Key], Any]) -> None:
    """Write `rows` to `path` in order, unless the file already has exactly this content."""
    lines = [header(kind), *(text_of(rows[key]) for key in sorted(rows, key=order))]
    data = ("\n".join(lines) + "\n").encode()
    if not path.exists() or read_file(path) != data:
        write_atomically(path, data)
