"""Writes that are either wholly there or not at all."""

import contextlib
import errno
import hashlib
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import RunError


def canonical_json(value: Any) -> str:
    """The one text for a JSON value: sorted keys, no spaces, no NaN. Hashes are taken of this text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data`: temporary file, fsync, rename, fsync of the folder.

    Guarantee: after a crash at any moment, a power cut included, `path` holds the old bytes or the new ones.
    """
    if path.is_dir() or not path.name:  # a root has no name at all
        raise cannot_write(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        _unlink(temporary)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            _write_whole(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)  # noqa: PTH105 (kept beside os.fsync for the reader)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            _unlink(temporary)
        raise cannot_write(path, error) from error


def _write_whole(descriptor: int, data: bytes) -> None:
    """All of `data`: one call of the system may take only a part of it."""
    rest = memoryview(data)
    while rest:
        taken = os.write(descriptor, rest)
        if taken == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = rest[taken:]


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    try:
        _unlink(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 (all calls that change a disk go through one `os`: the fault tests stand there)


class Appender:
    """Lines put at the end of a file as they come, durable every few seconds and at the end.

    Guarantee: after a crash at any moment the file holds its old lines, whole new lines, and at most a part of one more.
    """

    def __init__(self, path: Path, seconds_between_syncs: float) -> None:
        self._path, self._seconds = path, seconds_between_syncs

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        self._synced = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._sync()  # also when asked to stop: what was done stays
        except RunError:
            if kind is None:  # else the first thing that went wrong is the one to tell
                raise
        finally:
            os.close(self._descriptor)

    def add(self, line: str) -> None:
        """One more line."""
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


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> RunError:
    """The one sentence for a full disk, a read-only folder and the like."""
    reason = error.strerror or str(error)
    return RunError(f"cannot write {path}: {reason}; free space or choose another folder")


def read_json(path: Path, *, what: str) -> Any:
    """A JSON file, or a `RunError` that names it."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise RunError(f"{what} {path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{what} {path} cannot be read: {error}; restore it from a copy") from error


def parse_json(data: bytes) -> Any:
    """JSON as the standard has it: NaN and Infinity are a `ValueError`."""
    return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def write_checked_json(path: Path, value: dict[str, Any]) -> None:
    """`checked_json`, written atomically."""
    write_atomically(path, checked_json(value))


def checked_json(value: dict[str, Any]) -> bytes:
    """A JSON object a person can read, with a checksum as its last key."""
    return readable_json({**value, "check": sha256_hex(canonical_json(value).encode())})


def read_checked_json(path: Path, *, what: str, remedy: str, unchecked_keys: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What `write_checked_json` wrote, without the checksum; one changed byte, in a space even, is a `RunError`.

    Files from before the checksum are taken if they hold no key but `unchecked_keys`: a damaged name of the checksum
    does not make a file look old.
    """
    value = read_json(path, what=what)
    if isinstance(value, dict) and "check" not in value and value.keys() <= unchecked_keys:
        return value
    check = value.pop("check", None) if isinstance(value, dict) else None
    try:
        intact = isinstance(value, dict) and check == sha256_hex(canonical_json(value).encode())
    except (ValueError, RecursionError):  # an infinity, or nested too deeply to be ours
        intact = False
    if not intact or path.read_bytes() != readable_json({**value, "check": check}):
        raise RunError(f"{what} {path} is damaged (its checksum is wrong); {remedy}")
    assert isinstance(value, dict)
    return value


def readable_json(value: Any) -> bytes:
    """JSON a person can read."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def destroy(path: Path) -> None:
    """Overwrite a secret and remove it (a journal or an SSD may still keep old blocks: see docs)."""
    try:
        size = path.stat().st_size
        descriptor = os.open(path, os.O_WRONLY)
        try:
            _write_whole(descriptor, bytes(size))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _unlink(path)
        sync_folder(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(path, error) from error
