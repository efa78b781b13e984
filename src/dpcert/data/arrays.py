"""NumPy's .npy and .npz, read strictly: plain numbers only, and what the header promises must be what follows it.

An .npz is a zip archive. It is read member by member and never extracted; a member that could surprise another reader (a
path, a link, a name twice, a password, an unusual compression) is a reason to refuse the whole file. No pickle is ever read,
and no memory is taken because a header asks for it.

An array that is too large for memory stays in its file (`ArrayOnDisk`) and is read by offset. It is never mapped: a file that
is truncated while it is mapped kills the process, a short read is an error.
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

LARGEST_ARCHIVE_BYTES = 8 << 30
LARGEST_ARRAY_FILE_BYTES = 1 << 30
_LARGEST_HEADER_CHARACTERS = 2000
_MOST_DIMENSIONS = 8
_MOST_MEMBERS = 64
_BOMB_BYTES, _BOMB_RATIO = 256 << 20, 100  # images shrink by 10 or so; a bomb by 1000
_ENCRYPTED = 0x1
_CHUNK = 1 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip member: signature ... length of the name, length of the extra field


@dataclass(frozen=True)
class Limits:
    """What may be loaded: an uncompressed array of more than `array` bytes stays on disk, all others must fit in `memory`."""

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
    """What the first bytes of an .npy file say, and where the numbers start."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    start: int

    def require_bytes(self, found: int, name: str) -> None:
        """Refuse a file whose length is not what the header promises."""
        promised = math.prod(self.shape) * self.dtype.itemsize
        if promised != found:
            raise DataError(
                f"{name} holds {found} bytes after its header, which promises {_short(promised)}; it is cut or damaged"
            )


def _header(data: bytes | bytearray, name: str) -> Header:
    """The header at the front of `data`, which must be of plain numbers."""
    file = io.BytesIO(data[: _LARGEST_HEADER_CHARACTERS + 64])
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_LARGEST_HEADER_CHARACTERS)
    except Exception as error:  # whatever NumPy and the literal parser make of hostile text
        raise DataError(f"{name} is not a readable .npy array ({_short(error)})") from error
    if dtype.kind not in "uif" or dtype.itemsize > 8 or dtype.subdtype is not None:
        raise DataError(f"{name} has dtype {dtype}, must be numbers (integers or floats of at most 64 bits)")
    if len(shape) > _MOST_DIMENSIONS or any(isinstance(size, bool) or size < 1 for size in shape):
        raise DataError(f"{name} has shape {_short(shape)}, must be of 1 to {_MOST_DIMENSIONS} dimensions and not empty")
    return Header(dtype, shape, bool(fortran), file.tell())


class ArrayOnDisk:
    """An array in a file, read row by row by offset. Threads may share it.

    The file is kept open, so one that is replaced by another does not matter. One that is truncated or written to while it
    is in use is an error, never wrong numbers and never a signal.
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
        """The rows of these numbers, in this order: memory for them and no more."""
        data = np.empty(len(numbers) * self._row_bytes, dtype=np.uint8)
        place = 0
        for stretch in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):  # neighbours are read at once
            if len(stretch):
                size = len(stretch) * self._row_bytes
                self._fill(data[place : place + size], self._start + int(stretch[0]) * self._row_bytes)
                place += size
        if _size_and_time(self._descriptor) != self._before:
            raise DataError(f"{self.name} was changed while in use; restore the file and run the same command again")
        return data.view(self.dtype).reshape(len(numbers), *self.shape[1:])

    def _fill(self, target: np.ndarray, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:].data], offset + done)
            except OSError as error:
                raise DataError(f"{self.name} cannot be read ({error.strerror or error})") from error
            if count == 0:
                raise DataError(f"{self.name} was truncated while in use; restore the file and run the same command again")
            done += count


def _size_and_time(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file opened for reading, unless it is a device, a pipe or the like: nobody waits for those."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not an ordinary file; give an .npz or .npy file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def open_npy(path: Path, limits: Limits, *, on_disk: bool) -> np.ndarray | ArrayOnDisk:
    """The array of an .npy file: in memory, or (where `on_disk` allows it and the limits ask for it) in its file."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(file.read(_LARGEST_HEADER_CHARACTERS + 64), str(path))
        header.require_bytes(size - header.start, str(path))
        if on_disk and size > limits.array:
            return _array_on_disk(file, str(path), 0, header)
        _require_memory(path, size, limits, "give more memory")
        file.seek(0)
        return parse_npy(bytearray(file.read()), str(path))


def _array_on_disk(file: IO[bytes], name: str, member_start: int, header: Header) -> ArrayOnDisk:
    if header.fortran:
        raise DataError(f"{name} is too large for memory and in column order; save numpy.ascontiguousarray of it")
    return ArrayOnDisk(file, name, member_start + header.start, header.dtype, header.shape)


def _require_memory(path: Path, size: int, limits: Limits, remedy: str) -> None:
    if size > limits.memory:
        raise DataError(
            f"{path} takes {size / 2**30:.2f} GiB in memory, {limits.memory / 2**30:.2f} GiB are available; {remedy}"
        )


def read_npz(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file, and the `optional` ones that it has; other plain arrays in it are left alone."""
    with _archive(path, names) as (archive, members, _):
        present = [*names, *(name for name in optional if f"{name}.npy" in members)]
        return {name: parse_npy(_content(archive, members[f"{name}.npy"]), f"{path} {name}") for name in present}


def open_npz(path: Path, names: Sequence[str], on_disk: Sequence[str], limits: Limits) -> dict[str, np.ndarray | ArrayOnDisk]:
    """`read_npz` in which those arrays of `on_disk` that are stored uncompressed and larger than the limit stay on disk."""
    with _archive(path, names) as (archive, members, file):
        wanted = {name: members[f"{name}.npy"] for name in names}
        staying = {name for name in on_disk if _is_stored(wanted[name]) and wanted[name].file_size > limits.array}
        loaded = sum(info.file_size for name, info in wanted.items() if name not in staying)
        _require_memory(path, loaded, limits, "save it uncompressed with numpy.savez, which is read from disk")
        return {
            name: _member_on_disk(archive, info, file, f"{path} {name}")
            if name in staying
            else parse_npy(_content(archive, info), f"{path} {name}")
            for name, info in wanted.items()
        }


def npz_header(path: Path, name: str) -> Header:
    """The header of one array of an .npz file; its numbers are not read."""
    with _archive(path, [name]) as (archive, members, _), archive.open(members[f"{name}.npy"]) as member:
        return _header(member.read(_LARGEST_HEADER_CHARACTERS + 64), f"{path} {name}")


def npy_header(path: Path) -> Header:
    """The header of an .npy file."""
    with _opened(path) as file:
        return _header(file.read(_LARGEST_HEADER_CHARACTERS + 64), str(path))


@contextlib.contextmanager
def _archive(path: Path, names: Sequence[str]) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo], IO[bytes]]]:
    """An .npz file with its members, all checked; the named arrays are among them."""
    with _opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = _checked_members(archive, path)
                missing = [name for name in names if f"{name}.npy" not in members]
                if missing:
                    raise DataError(f"{path} has no array {missing[0]!r}; it must hold {' '.join(names)}")
                yield archive, members, file
        except DataError:
            raise
        except Exception as error:  # zipfile raises a dozen kinds on damaged archives
            raise DataError(f"{path} is not a readable .npz file ({_short(error)}); write it with numpy.savez") from error


def _is_stored(info: zipfile.ZipInfo) -> bool:
    return info.compress_type == zipfile.ZIP_STORED


def _member_on_disk(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: IO[bytes], name: str) -> ArrayOnDisk:
    """A stored member as an array on disk, after one pass over it: zipfile compares its checksum."""
    with archive.open(info) as member:
        header, size = _header(member.read(_LARGEST_HEADER_CHARACTERS + 64), name), member.tell()
        while chunk := member.read(_CHUNK):
            size += len(chunk)
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
        why = "it is there twice" if info.filename in members else _suspicious(info)
        if why:
            raise DataError(f"{path} member {_short(repr(info.orig_filename))} is refused: {why}; write it with numpy.savez")
        members[info.filename] = info
    deflated = [info for info in infos if not _is_stored(info)]  # what is stored as it is cannot grow
    total, packed = sum(info.file_size for info in deflated), sum(info.compress_size for info in deflated)
    if total > LARGEST_ARCHIVE_BYTES or (total > _BOMB_BYTES and total > _BOMB_RATIO * packed):
        raise DataError(
            f"{path} unpacks from {packed} to {total} bytes; allowed are {LARGEST_ARCHIVE_BYTES}, and at most {_BOMB_RATIO} "
            "times as much as packed: use a smaller set or numpy.savez"
        )
    return members


def _suspicious(info: zipfile.ZipInfo) -> str:
    """Why a member is not what numpy.savez writes, or nothing."""
    name = info.orig_filename
    if name != info.filename or any(character in name for character in "/\\:\0") or not name.endswith(".npy"):
        return "its name is not that of an array (a plain name ending in .npy)"
    mode = info.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "it is not an ordinary file"
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"its compression (number {info.compress_type}) is not one of numpy's"
    if _is_stored(info) and info.file_size != info.compress_size:
        return f"it is stored as {info.compress_size} bytes and said to hold {info.file_size}"
    return ""


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytearray:
    """The bytes of a member: memory grows with what really comes, never with what is promised."""
    data = bytearray()
    with archive.open(info) as file:
        while chunk := file.read(_CHUNK):
            data += chunk
    return data


def _short(value: object) -> str:
    """Words of others, kept to a line."""
    try:
        text = " ".join(str(value).split())
    except ValueError:  # a whole number of more than 4,300 digits
        return "a huge number"
    return text if len(text) <= 120 else f"{text[:117]}..."
