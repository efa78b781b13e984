"""Atomic, durable writes: a file is written completely or not at all."""

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import RunError


def canonical_json(value: Any) -> str:
    """The canonical text of a JSON value: sorted keys, no spaces, no NaN. Hashes are computed from this text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes, mode: int = 0o644, *, real_folder: bool = False) -> None:
    """Replace `path` by `data`: temporary file, fsync, rename, fsync of the folder.

    Guarantee: after a crash at any moment, including a power failure, `path` contains either the old bytes or the new
    ones. A symbolic link at `path` is refused. With `real_folder`, a link in place of its folder is refused too. All
    operations use the descriptor of the opened folder, so a link created later has no effect.
    """
    if path.is_dir() or not path.name:  # a root has no name at all
        raise cannot_write(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    temporary = f".{path.name}.tmp"
    try:
        with _held(path.parent, real=real_folder) as folder:
            refuse_link(path)
            try:
                _write_new(temporary, data, mode, folder)
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except OSError:
                with contextlib.suppress(OSError):
                    _unlink(temporary, folder)
                raise
    except OSError as error:
        raise cannot_write(path, error) from error


def _write_new(name: str, data: bytes, mode: int, folder: int) -> None:
    """Write a new durable file in an open folder; an existing entry of that name (such as a link) is removed first."""
    _unlink(name, folder)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=folder)
    try:
        _write_whole(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _held(folder: Path, *, real: bool) -> Iterator[int]:
    """A descriptor of a folder; with `real`, a link to a folder is refused."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    descriptor = open_without_links(folder, flags) if real else os.open(folder, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_without_links(path: Path, flags: int) -> int:
    """Open `path` without following links; a link there, dangling or not, is a `RunError`."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)  # do not block on a pipe
    except OSError:
        refuse_link(path)
        raise


def refuse_link(path: Path) -> None:
    """Raise if `path` is a symbolic link: dpcert never reads, replaces or removes the target of a link."""
    if path.is_symlink():
        raise RunError(
            f"{path} is a symbolic link, which dpcert does not follow; put the file or folder itself there, or remove it"
        )


def read_file(path: Path) -> bytes:
    """The content of a file of a run. A link is a `RunError`; any other failure is an `OSError`."""
    descriptor = open_without_links(path, os.O_RDONLY)
    try:
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write all of `data`; a single `os.write` may write only part of it."""
    rest = memoryview(data)
    while rest:
        written = os.write(descriptor, rest)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = rest[written:]


def remove(path: Path) -> None:
    """Remove a file if it exists; its folder must not be a link."""
    try:
        with _held(path.parent, real=True) as folder:
            _unlink(path.name, folder)
    except OSError as error:
        raise cannot_write(path, error) from error


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)  # all calls that change the disk go through this `os`, which the fault tests patch


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can access (0700); a link is refused and its target is not changed."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)  # noqa: PTH102 (as for `_unlink`)
    with _held(folder, real=True) as descriptor:
        os.fchmod(descriptor, 0o700)


class Appender:
    """Appends lines to a file; they are synced to disk every few seconds and on exit.

    Guarantee: after a crash at any moment the file contains its old lines, complete new lines, and at most one partial line.
    """

    def __init__(self, path: Path, seconds_between_syncs: float) -> None:
        self._path, self._seconds = path, seconds_between_syncs

    def __enter__(self) -> Self:
        try:
            self._descriptor = open_without_links(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._synced = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._sync()  # also after an interrupt, so that finished work is kept
        except RunError:
            if kind is None:  # otherwise the first error is the one to report
                raise
        finally:
            os.close(self._descriptor)

    def add(self, line: str) -> None:
        """Append a line."""
        try:
            _write_whole(self._descriptor, f"{line}\n".encode("ascii"))
        except OSError as error:
            raise cannot_write(self._path, error) from error
        if time.monotonic() - self._synced > self._seconds:
            self._sync()

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._synced = time.monotonic()


def cannot_write(path: Path, error: OSError) -> RunError:
    """The error for a full disk, a read-only folder and similar failures."""
    reason = error.strerror or str(error)
    return RunError(f"cannot write {path}: {reason}; free space or choose another folder")


def parse_json(data: bytes) -> Any:
    """Parse standard JSON: NaN and Infinity are a `ValueError`."""
    return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def write_checked_json(path: Path, value: dict[str, Any]) -> None:
    """`checked_json`, written atomically."""
    write_atomically(path, checked_json(value))


def checked_json(value: dict[str, Any]) -> bytes:
    """A human-readable JSON object with a checksum as its last key."""
    return readable_json({**value, "check": sha256_hex(canonical_json(value).encode())})


def read_checked_json(path: Path, *, what: str, remedy: str, unchecked_keys: frozenset[str] = frozenset()) -> dict[str, Any]:
    """`parse_checked_json` of a file."""
    try:
        data = read_file(path)
    except FileNotFoundError as error:
        raise RunError(f"{what} {path} is missing") from error
    except OSError as error:
        raise RunError(f"{what} {path} cannot be read: {error}; restore it from a copy") from error
    return parse_checked_json(data, f"{what} {path}", remedy=remedy, unchecked_keys=unchecked_keys)


def parse_checked_json(
    data: bytes, origin: str, *, remedy: str, unchecked_keys: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Parse the output of `checked_json` and drop the checksum; any changed byte, even whitespace, is a `RunError`.

    Files written before checksums existed are accepted if all their keys are in `unchecked_keys`, so a file whose
    checksum key is damaged is not mistaken for an old one.
    """
    try:
        value = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{origin} cannot be read: {error}; restore it from a copy") from error
    if isinstance(value, dict) and "check" not in value and value.keys() <= unchecked_keys:
        return value
    check = value.pop("check", None) if isinstance(value, dict) else None
    try:
        intact = isinstance(value, dict) and check == sha256_hex(canonical_json(value).encode())
    except (ValueError, RecursionError):  # an infinity, or nested too deeply
        intact = False
    if not intact or data != readable_json({**value, "check": check}):
        raise RunError(f"{origin} is damaged (its checksum is wrong); {remedy}")
    assert isinstance(value, dict)
    return value


def readable_json(value: Any) -> bytes:
    """Human-readable JSON."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def destroy(path: Path) -> None:
    """Overwrite a secret and remove it (a journal or an SSD may still keep old blocks; see the docs)."""
    try:
        with _held(path.parent, real=True) as folder:
            refuse_link(path)
            descriptor = os.open(path.name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                _write_whole(descriptor, bytes(os.fstat(descriptor).st_size))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _unlink(path.name, folder)
            os.fsync(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(path, error) from error
