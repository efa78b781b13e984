"""CIFAR-10 in its official *binary* layout (never the pickled one): records of a label byte and 3,072 pixel bytes."""

import tarfile
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath
from typing import Protocol

import numpy as np

from ..errors import DataError

RECORD_BYTES = 1 + 3 * 32 * 32
BATCH_RECORDS = 10_000
_PADDING_BYTES = 1 << 16
CLASSES = 10
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)


def parse_batch(data: bytes, name: str, records: int | None = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Images ``[n, 3, 32, 32]`` and labels ``[n]`` of one batch file."""
    if len(data) == 0 or len(data) % RECORD_BYTES:
        raise DataError(f"{name} has {len(data)} bytes, not a whole number of {RECORD_BYTES}-byte records; it is damaged")
    table = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    if records is not None and len(table) != records:
        raise DataError(f"{name} has {len(table)} records, expected {records}; it is damaged")
    labels = table[:, 0]
    if labels.max() >= CLASSES:
        raise DataError(f"{name} contains the label {labels.max()}, CIFAR-10 has labels 0..{CLASSES - 1}; it is damaged")
    return table[:, 1:].reshape(-1, 3, 32, 32), labels


class Stream(Protocol):
    """A readable stream of bytes."""

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; empty at the end."""


class _Capped:
    """A stream that raises an error if it yields more bytes than a valid archive can contain."""

    def __init__(self, file: Stream, most: int) -> None:
        self._file, self._left = file, most

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise DataError("it unpacks to more bytes than its files have")
        return data


def archive_members(unpacked: Stream, folder: str, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Stream the batch files of the official archive (a decompressed tar); nothing is extracted to disk.

    A wanted name that is not a regular file of the right size in `folder`, or that occurs twice, is refused; other members
    are skipped. The size of the whole stream is limited, including headers.
    """
    size, seen = BATCH_RECORDS * RECORD_BYTES, set()
    capped = _Capped(unpacked, (len(names) + 1) * size + _PADDING_BYTES)
    with tarfile.open(fileobj=capped, mode="r|") as tar:  # type: ignore[call-overload]
        for member in tar:
            name = PurePosixPath(member.name).name
            if name not in names:
                continue
            if member.name != f"{folder}/{name}" or member.type not in _REGULAR or member.size != size or name in seen:
                raise DataError(f"its member {member.name[:120]!r} is not the expected file, or occurs twice")
            seen.add(name)
            file = tar.extractfile(member)
            assert file is not None
            yield name, file.read(size)
    if seen != set(names):
        raise DataError(f"it lacks {min(set(names) - seen)}")
