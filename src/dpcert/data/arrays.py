"""NumPy's .npy and .npz, read strictly: plain numbers only, and what the header promises must be what follows it.

An .npz is a zip archive. It is read member by member and never extracted; a member that could surprise another reader (a
path, a link, a name twice, a password, an unusual compression) is a reason to refuse the whole file. No pickle is ever read,
and no memory is taken because a header asks for it.
"""

import io
import math
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path

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
    dtype, shape, fortran, start = _header(data, name)
    if dtype.kind not in "uif" or dtype.itemsize > 8 or dtype.subdtype is not None:
        raise DataError(f"{name} has dtype {dtype}, must be numbers (integers or floats of at most 64 bits)")
    if len(shape) > _MOST_DIMENSIONS or any(isinstance(size, bool) or size < 1 for size in shape):
        raise DataError(f"{name} has shape {_short(shape)}, must be of 1 to {_MOST_DIMENSIONS} dimensions and not empty")
    promised, found = math.prod(shape) * dtype.itemsize, len(data) - start
    if promised != found:
        raise DataError(f"{name} holds {found} bytes after its header, which promises {_short(promised)}; it is cut or damaged")
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if fortran else "C")


def _header(data: bytearray, name: str) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    file = io.BytesIO(data[: _LARGEST_HEADER_CHARACTERS + 64])
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_LARGEST_HEADER_CHARACTERS)
    except Exception as error:  # whatever NumPy and the literal parser make of hostile text
        raise DataError(f"{name} is not a readable .npy array ({_short(error)})") from error
    return dtype, shape, bool(fortran), file.tell()


def read_npz(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The named arrays of an .npz file, and the `optional` ones that it has; other plain arrays in it are left alone."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = _checked_members(archive, path)
            missing = [name for name in names if f"{name}.npy" not in members]
            if missing:
                raise DataError(f"{path} has no array {missing[0]!r}; it must hold {' '.join(names)}")
            present = [*names, *(name for name in optional if f"{name}.npy" in members)]
            return {name: parse_npy(_content(archive, members[f"{name}.npy"]), f"{path} {name}") for name in present}
    except DataError:
        raise
    except Exception as error:  # zipfile raises a dozen kinds on damaged archives
        raise DataError(f"{path} is not a readable .npz file ({_short(error)}); write it with numpy.savez") from error


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
    total, packed = sum(info.file_size for info in infos), sum(info.compress_size for info in infos)
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
