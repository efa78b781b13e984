"""The records of a map-style dataset as rows of images: read by number when they are used, checked once before.

The check reads every record, so bad ones are refused before a ledger opens. It notes a digest of each record (16 bytes),
because later reads must give the same record: a step that is repeated after a crash must be the same release. A record that
cannot be read again, or has changed, is NaN in a training step, where it contributes zero; everywhere else it is an error.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._validate import integer_in
from ..errors import DataError
from ..progress import Progress, silent
from .digests import DIGEST_BYTES, digest_of
from .hashes import record_hashes
from .images import Known, as_float
from .reading import OneThread, Processes, Reader, Record, in_one_line

MOST_WORKERS = 256
_PIECE_BYTES, _PIECE_ROWS = 4 << 20, 64
_READ_TWICE = 16  # records that the check reads a second time
MOST_FAILURES = 64  # in a row: then the storage is gone, whatever the records are


class RowsOfItems:
    """Rows of a map-style dataset, with what the check of all of them noted."""

    def __init__(self, reader: Reader, name: str, shape: tuple[int, ...], dtype: np.dtype, known: Known) -> None:
        self._reader, self._name, self.shape, self._dtype, self.known = reader, name, shape, dtype, known
        self.readers = reader.parallel
        self._failures = 0

    def take(self, indices: np.ndarray) -> Tensor:
        """The rows; an error names the record that cannot be read again or has changed."""
        rows, failed = self._read(indices)
        if failed:
            raise DataError(f"{self._name} record {int(indices[min(failed)])}: {failed[min(failed)]}")
        return torch.from_numpy(rows)

    def take_in_step(self, indices: np.ndarray) -> Tensor:
        """The rows; those that cannot be read again or have changed are NaN."""
        rows, failed = self._read(indices)
        self._count(len(indices), failed)
        if not failed:
            return torch.from_numpy(rows)
        floats = as_float(torch.from_numpy(rows))
        floats[list(failed)] = torch.nan
        return floats

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """The rows, and by place the reason why a row is missing."""
        numbers = [int(index) for index in indices]
        rows, failed = np.zeros((len(numbers), *self.shape[1:]), dtype=self._dtype), {}
        for place, record in enumerate(self._reader.read(numbers)):
            if isinstance(record, str):
                failed[place] = f"{record}, though it could be read when it was checked"
            elif record[0].dtype != self._dtype or digest_of(*record) != self.known.digests[numbers[place]].tobytes():
                failed[place] = "it has changed since it was checked; __getitem__ must always return the same record"
            else:
                rows[place] = record[0]
        return rows, failed

    def _count(self, read: int, failed: dict[int, str]) -> None:
        """Stop if nothing can be read any more, instead of spending the budget on nothing."""
        self._failures = self._failures + len(failed) if len(failed) == read else 0
        if self._failures >= MOST_FAILURES:
            self._failures = 0
            raise DataError(
                f"{self._name}: none of the last {MOST_FAILURES} records can be read any more, or all have changed; "
                "restore the data and rerun the command: it resumes"
            )


def check_items(name: str, dataset: Any, workers: int, progress: Progress = silent) -> tuple[RowsOfItems, np.ndarray]:
    """Read every record of `dataset` once and return its rows and labels; an error names the first bad record."""
    integer_in("workers", workers, 0, MOST_WORKERS, remedy="0 reads in one thread", error=DataError)
    count = length_of(name, dataset)
    reader = Processes(dataset, workers, name) if workers else OneThread(dataset)
    first, _ = _good(name, 0, reader.read([0])[0], None)
    size = max(1, min(_PIECE_ROWS, _PIECE_BYTES // first.nbytes))
    labels, known = np.empty(count, np.int64), Known(np.empty((count, DIGEST_BYTES), np.uint8), np.empty(count, np.uint64))
    pieces = (range(start, min(start + size, count)) for start in range(0, count, size))
    for piece, records in _in_order(reader, pieces):
        good = [_good(name, number, record, first) for number, record in zip(piece, records, strict=True)]
        here = slice(piece.start, piece.stop)
        labels[here] = [label for _, label in good]
        known.digests[here] = [np.frombuffer(digest_of(*record), np.uint8) for record in good]
        known.hashes[here] = record_hashes(as_float(torch.from_numpy(np.stack([pixels for pixels, _ in good]))))
        progress(piece.stop, count)
    rows = RowsOfItems(reader, name, (count, *first.shape), first.dtype, known)
    rows.take(np.unique(np.linspace(0, count - 1, _READ_TWICE, dtype=np.int64)))  # random augmentation shows here
    return rows, labels


def length_of(name: str, dataset: Any) -> int:
    """The number of records of a map-style dataset."""
    kind = type(dataset)
    if not (callable(getattr(kind, "__len__", None)) and callable(getattr(kind, "__getitem__", None))):
        raise DataError(f"{name} is a {kind.__name__}, must have __len__ and __getitem__(index) -> (image, label)")
    try:
        count = len(dataset)
    except Exception as error:  # a custom dataset may raise anything
        raise DataError(f"{name} has no length: its __len__ raises {in_one_line(error)}") from error
    return integer_in(f"the length of {name}", count, 1, error=DataError)


def _in_order(reader: Reader, pieces: Iterator[range]) -> Iterator[tuple[range, list[Record]]]:
    """Read pieces in order, a few ahead of the one in use."""
    with ThreadPoolExecutor(reader.parallel, "dpcert-check") as threads:
        waiting: deque[tuple[range, Future[list[Record]]]] = deque()
        try:
            for piece in pieces:
                waiting.append((piece, threads.submit(reader.read, piece)))
                if len(waiting) > 2 * reader.parallel:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _good(name: str, number: int, record: Record, first: np.ndarray | None) -> tuple[np.ndarray, int]:
    if isinstance(record, str):
        raise DataError(f"{name} record {number}: {record}")
    pixels, _ = record
    if first is not None and (pixels.shape, pixels.dtype) != (first.shape, first.dtype):
        raise DataError(
            f"{name} record {number}: its image is {_kind(pixels)}, that of record 0 is {_kind(first)}; all must be alike"
        )
    return record


def _kind(pixels: np.ndarray) -> str:
    return f"{pixels.dtype} {list(pixels.shape)}"
