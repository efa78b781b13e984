"""Writes that are either wholly there or not at all."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..errors import RunError


def canonical_json(value: Any) -> str:
    """The one text for a JSON value: sorted keys, no spaces, no NaN. Hashes are taken of this text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data`: temporary file, fsync, rename, fsync of the folder.

    Guarantee: after a crash at any moment `path` holds the old bytes or the new ones.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105 (kept beside os.fsync for the reader)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


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
    return RunError(f"cannot write {path}: {reason}; free space or choose another folder with --out")


def read_json(path: Path, *, what: str) -> Any:
    """A JSON file, or a `RunError` that names it."""
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise RunError(f"{what} {path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{what} {path} cannot be read: {error}; restore it from a copy") from error


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def write_json(path: Path, value: Any) -> None:
    """A JSON file a person can read, written atomically."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def destroy(path: Path) -> None:
    """Overwrite a secret and remove it (a journal or an SSD may still keep old blocks: see docs)."""
    with contextlib.suppress(FileNotFoundError):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
        sync_folder(path.parent)
