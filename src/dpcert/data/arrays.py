"""Strict readers for NumPy's .npy and .npz: plain numbers only, and the data must match the header.

An .npz is a zip archive. It is read member by member and never extracted. A suspicious member (a path, a link, a duplicate
name, a password, an unusual compression) makes the whole file invalid. Pickles are never read, and memory is never allocated
based on a header alone.

An array that is too large for memory stays in its file (`ArrayOnDisk`) and is read by offset. It is never memory-mapped:
truncating a mapped file kills the process, whereas a short read is an error.
"""

import contextlib
import io
import math
import os
import stat
import struct
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import DataError
from ..progress import Progress, silent

LARGEST_ARCHIVE_BYTES = 8 << 30
LARGEST_ARRAY_FILE_BYTES = 1 << 30
_LARGEST_HEADER_CHARACTERS = 2000
_MOST_DIMENSIONS = 8
_MOST_MEMBERS = 64
_BOMB_BYTES, _BOMB_RATIO = 256 << 20, 100  # images compress about 10 to 1, a zip bomb about 1000 to 1
_ENCRYPTED = 0x1
_CHUNK = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature, ..., length of the name, length of the extra field


@dataclass(frozen=True)
class Limits:
    """Limits in bytes: an uncompressed array larger than `array` stays on disk, all others must fit in `memory`."""

    array: int
    memory: int


def read_npy(path: Path) -> np.ndarray:
    """The array of an .npy file."""
    try:
        size = path.stat().st_size
        if size > LARGEST_ARRAY_FILE_BYTES:
            raise DataError(f"{path} has {size} bytes, more than {LARGEST_ARRAY_FILE_BYTES}; split it")
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    return parse_npy(data, str(path))


def parse_npy(data: bytearray, name: str) -> np.ndarray:
    """The array in the bytes of an .npy file: unsigned or signed integers or floats, nothing else. Shares its memory."""
    header = _header(data, name)
    header.require_bytes(len(data) - header.start, name)
    return np.frombuffer(data, header.dtype, offset=header.start).reshape(header.shape, order="F" if header.fortran else "C")


@dataclass(frozen=True)
class Header:
    """The header of an .npy file, and the offset where the data starts."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    start: int

    def require_bytes(self, actual: int, name: str) -> None:
        """Refuse a file whose length does not match the header."""
        expected = math.prod(self.shape) * self.dtype.itemsize
        if expected != actual:
            raise DataError(
                f"{name} has {actual} bytes after its header, expected {_short(expected)}; it is truncated or damaged"
            )


def _header(data: bytes | bytearray, name: str) -> Header:
    """The header at the start of `data`; the dtype must be plain numbers."""
    file = io.BytesIO(data[: _LARGEST_HEADER_CHARACTERS + 64])
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_LARGEST_HEADER_CHARACTERS)
    except Exception as error:  # NumPy and the literal parser may raise anything on hostile text
        raise DataError(f"{name} is not a readable .npy array ({_short(error)})") from error
    if dtype.kind not in "uif" or dtype.itemsize > 8 or dtype.subdtype is not None:
        raise DataError(f"{name} has dtype {dtype}, must be integers or floats of at most 64 bits")
    if len(shape) > _MOST_DIMENSIONS or any(isinstance(size, bool) or size < 1 for size in shape):
        raise DataError(f"{name} has shape {_short(shape)}, must have at most {_MOST_DIMENSIONS} dimensions and not be empty")
    return Header(dtype, shape, bool(fortran), file.tell())


class ArrayOnDisk:
    """An array in a file, read by offset, row by row. Safe to share between threads.

    The file stays open, so replacing it has no effect. Truncating it or writing to it while it is in use is an error; it
    never gives wrong numbers or a signal.
    """

    def __init__(self, file: IO[bytes], name: str, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self._start, self._row_bytes = start, math.prod(shape[1:]) * dtype.itemsize
        self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._before = _size_and_time(self._descriptor)

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The rows with these numbers, in this order; allocates memory for these rows only."""
        data = np.empty(len(numbers) * self._row_bytes, dtype=np.uint8)
        place = 0
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):  # consecutive rows are read together
            if len(run):
                size = len(run) * self._row_bytes
                self._fill(data[place : place + size], self._start + int(run[0]) * self._row_bytes)
                place += size
        if _size_and_time(self._descriptor) != self._before:
            raise DataError(f"{self.name} was changed while in use; restore the file and rerun the command")
        return data.view(self.dtype).reshape(len(numbers), *self.shape[1:])

    def _fill(self, target: np.ndarray, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:].data], offset + done)
            except OSError as error:
                raise DataError(f"{self.name} cannot be read ({error.strerror or error})") from error
            if count == 0:
                raise DataError(f"{self.name} was truncated while in use; restore the file and rerun the command")
            done += count


def _size_and_time(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading; devices and pipes are refused without blocking."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a regular file; pass an .npz or .npy file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def open_npy(path: Path, limits: Limits, *, on_disk: bool) -> np.ndarray | ArrayOnDisk:
    """The array of an .npy file: in memory, or on disk if `on_disk` allows it and it exceeds the limit."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(file.read(_LARGEST_HEADER_CHARACTERS + 64), str(path))
        header.require_bytes(size - header.start, str(path))
        if on_disk and size > limits.array:
            return _array_on_disk(file, str(path), 0, header)
        _require_memory(path, size, limits, "use a machine with more memory")
        file.seek(0)
        return parse_npy(bytearray(file.read()), str(path))


def _array_on_disk(file: IO[bytes], name: str, member_start: int, header: Header) -> ArrayOnDisk:
    if header.fortran:
        raise DataError(
            f"{name} is too large for memory and in column-major order; convert it with numpy.ascontiguousarray before saving"
        )
    return ArrayOnDisk(file, name, member_start + header.start, header.dtype, header.shape)


def _require_memory(path: Path, size: int, limits: Limits, remedy: str) -> None:
    if size > limits.memory:
        raise DataError(
            f"{path} needs {size / 2**30:.2f} GiB of memory, {limits.memory / 2**30:.2f} GiB are available; {remedy}"
        )


def read_npz(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file, and those of the `optional` ones that it has; other plain arrays are ignored."""
    with _archive(path, names) as (archive, members, _):
        present = [*names, *(name for name in optional if f"{name}.npy" in members)]
        return {name: parse_npy(_content(archive, members[f"{name}.npy"]), f"{path} {name}") for name in present}


def open_npz(
    path: Path, names: Sequence[str], on_disk: Sequence[str], limits: Limits, progress: Progress = silent
) -> dict[str, np.ndarray | ArrayOnDisk]:
    """Like `read_npz`, but arrays in `on_disk` that are uncompressed and exceed the limit stay on disk."""
    with _archive(path, names) as (archive, members, file):
        wanted = {name: members[f"{name}.npy"] for name in names}
        staying = {name for name in on_disk if _is_stored(wanted[name]) and wanted[name].file_size > limits.array}
        loaded = sum(info.file_size for name, info in wanted.items() if name not in staying)
        _require_memory(path, loaded, limits, "save it uncompressed with numpy.savez, so that it is read from disk")
        return {
            name: _member_on_disk(archive, info, file, f"{path} {name}", progress)
            if name in staying
            else parse_npy(_content(archive, info), f"{path} {name}")
            for name, info in wanted.items()
        }


def npz_header(path: Path, name: str) -> Header:
    """The header of one array of an .npz file; the data is not read."""
    with _archive(path, [name]) as (archive, members, _), archive.open(members[f"{name}.npy"]) as member:
        return _header(member.read(_LARGEST_HEADER_CHARACTERS + 64), f"{path} {name}")


def npy_header(path: Path) -> Header:
    """The header of an .npy file."""
    with _opened(path) as file:
        return _header(file.read(_LARGEST_HEADER_CHARACTERS + 64), str(path))


@contextlib.contextmanager
def _archive(path: Path, names: Sequence[str]) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo], IO[bytes]]]:
    """An .npz file with its checked members, which include the named arrays."""
    with _opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = _checked_members(archive, path)
                missing = [name for name in names if f"{name}.npy" not in members]
                if missing:
                    raise DataError(f"{path} has no array {missing[0]!r}; it must contain {' '.join(names)}")
                yield archive, members, file
        except DataError:
            raise
        except Exception as error:  # zipfile raises many kinds of errors on damaged archives
            raise DataError(f"{path} is not a readable .npz file ({_short(error)}); write it with numpy.savez") from error


def _is_stored(info: zipfile.ZipInfo) -> bool:
    return info.compress_type == zipfile.ZIP_STORED


def _member_on_disk(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: IO[bytes], name: str, progress: Progress
) -> ArrayOnDisk:
    """An uncompressed member as an array on disk, after reading it once so that zipfile verifies its checksum."""
    with archive.open(info) as member:
        header, size = _header(member.read(_LARGEST_HEADER_CHARACTERS + 64), name), member.tell()
        while chunk := member.read(_CHUNK):
            size += len(chunk)
            progress(header.shape[0] * size // info.file_size, header.shape[0])
    header.require_bytes(size - header.start, name)
    local = os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset)
    _, name_length, extra_length = _LOCAL_HEADER.unpack(local)
    return _array_on_disk(file, name, info.header_offset + _LOCAL_HEADER.size + name_length + extra_length, header)


def _checked_members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS:
        raise DataError(f"{path} has {len(infos)} members, more than {_MOST_MEMBERS}; write it with numpy.savez")
    for info in infos:
        why = "it occurs twice" if info.filename in members else _suspicious(info)
        if why:
            raise DataError(f"{path} member {_short(repr(info.orig_filename))} is refused: {why}; write it with numpy.savez")
        members[info.filename] = info
    deflated = [info for info in infos if not _is_stored(info)]  # uncompressed members cannot expand
    total, packed = sum(info.file_size for info in deflated), sum(info.compress_size for info in deflated)
    if total > LARGEST_ARCHIVE_BYTES or (total > _BOMB_BYTES and total > _BOMB_RATIO * packed):
        raise DataError(
            f"{path} unpacks from {packed} to {total} bytes; the limits are {LARGEST_ARCHIVE_BYTES} bytes and a ratio of "
            f"{_BOMB_RATIO}: use a smaller data set or numpy.savez"
        )
    return members


def _suspicious(info: zipfile.ZipInfo) -> str:
    """Why numpy.savez would not have written this member, or an empty string."""
    name = info.orig_filename
    if name != info.filename or any(character in name for character in "/\\:\0") or not name.endswith(".npy"):
        return "its name is not an array name (a plain name ending in .npy)"
    mode = info.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "it is not a regular file"
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"numpy does not use its compression (type {info.compress_type})"
    if _is_stored(info) and info.file_size != info.compress_size:
        return f"it has {info.compress_size} bytes, but its header states {info.file_size}"
    return ""


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytearray:
    """The bytes of a member; memory grows with the bytes actually read, not with the stated size."""
    data = bytearray()
    with archive.open(info) as file:
        while chunk := file.read(_CHUNK):
            data += chunk
    return data


def _short(value: object) -> str:
    """Foreign text, shortened to one line."""
    try:
        text = " ".join(str(value).split())
    except ValueError:  # an integer of more than 4,300 digits
        return "a huge number"
    return text if len(text) <= 120 else f"{text[:117]}..."
