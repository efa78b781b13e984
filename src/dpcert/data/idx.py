"""IDX files (MNIST, Fashion-MNIST), read strictly."""

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
    """The content of a file, unpacked if it is gzip, with a cap on the unpacked size."""
    try:
        size = path.stat().st_size
        if size > most:
            raise DataError(f"{path} has {size} bytes, more than {most}; it is not the file it claims to be")
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from error
    return unpacked(raw, str(path), most)


def unpacked(raw: bytes, name: str, most: int = _MOST_BYTES) -> bytes:
    """`raw`, unpacked if it is gzip, with a cap on the unpacked size."""
    try:
        if raw[:2] != b"\x1f\x8b":
            data = raw
        else:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
                data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} cannot be read ({error}); fetch it again") from error
    if len(data) > most:
        raise DataError(f"{name} holds more than {most} bytes; it is not the file it claims to be")
    return data


def parse_idx(data: bytes, dimensions: int, name: str) -> np.ndarray:
    """An array of unsigned bytes with the given number of dimensions; magic and sizes must fit exactly."""
    if len(data) < 4 * (1 + dimensions):
        raise DataError(f"{name} is cut off: {len(data)} bytes hold no IDX header; fetch it again")
    zero, kind, stated = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind != _UNSIGNED_BYTE or stated != dimensions:
        raise DataError(
            f"{name} starts with {data[:4].hex()}, an IDX file of bytes with {dimensions} dimension(s) "
            f"starts with 0000080{dimensions}; is it the right file?"
        )
    shape = struct.unpack(f">{dimensions}I", data[4 : 4 * (1 + dimensions)])
    expected = 1
    for size in shape:
        expected *= size
    body = len(data) - 4 * (1 + dimensions)
    if expected == 0:
        raise DataError(f"{name} promises no data (its sizes are {list(shape)}); fetch it again")
    if body != expected:
        raise DataError(f"{name} holds {body} bytes after its header, {expected} are promised; it is cut off or damaged")
    return np.frombuffer(data, dtype=np.uint8, offset=4 * (1 + dimensions)).reshape(shape)
