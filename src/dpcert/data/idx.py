"""A strict reader for IDX files (MNIST, Fashion-MNIST)."""

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np

from ..errors import DataError

_UNSIGNED_BYTE = 0x08
_MOST_BYTES = 1 << 27  # the largest file of a known data set has 47 million


def read_bytes(path: Path, most: int = _MOST_BYTES) -> bytes:
    """The content of a file, decompressed if it is gzip, with a limit on the decompressed size."""
    try:
        size = path.stat().st_size
        if size > most:
            raise DataError(f"{path} has {size} bytes, more than {most}; it is not a file of a known data set")
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); download it again") from error
    return unpacked(raw, str(path), most)


def unpacked(raw: bytes, name: str, most: int = _MOST_BYTES) -> bytes:
    """`raw`, decompressed if it is gzip, with a limit on the decompressed size."""
    try:
        if raw[:2] != b"\x1f\x8b":
            data = raw
        else:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
                data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} cannot be read ({error}); download it again") from error
    if len(data) > most:
        raise DataError(f"{name} unpacks to more than {most} bytes; it is not a file of a known data set")
    return data


def parse_idx(data: bytes, dimensions: int, name: str) -> np.ndarray:
    """An array of unsigned bytes with the given number of dimensions; magic number and sizes must match exactly."""
    if len(data) < 4 * (1 + dimensions):
        raise DataError(f"{name} is truncated: {len(data)} bytes are too few for an IDX header; download it again")
    zero, kind, stated = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind != _UNSIGNED_BYTE or stated != dimensions:
        raise DataError(
            f"{name} starts with {data[:4].hex()}, an IDX file of bytes with {dimensions} dimension(s) "
            f"starts with 0000080{dimensions}; check that it is the right file"
        )
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 * (1 + dimensions)])
    expected = 1
    for size in shape:
        expected *= size
    body = len(data) - 4 * (1 + dimensions)
    if expected == 0:
        raise DataError(f"{name} is empty (its sizes are {list(shape)}); download it again")
    if body != expected:
        raise DataError(
            f"{name} has {body} bytes after its header, expected {expected}; it is truncated or damaged: download it again"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=4 * (1 + dimensions)).reshape(shape)
