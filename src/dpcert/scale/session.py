"""A session of tasks on other nodes: which code it runs, and a folder that every node must share.

The driver creates a file in the folder and holds its lock. A node may run a task only if it sees that file and cannot
take the lock: then run directories, their locks and the logs are the same everywhere, and no transfer is needed.
"""

import contextlib
import errno
import hashlib
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ..errors import RunError
from ..store.durable import cannot_write, open_without_links

_STEM = ".session-"
_PACKAGES = ("torch", "numpy")
_SECONDS_UNTIL_STALE = 3600.0


@contextlib.contextmanager
def shared_session(folder: Path) -> Iterator[str]:
    """Create the file of a session in `folder`, hold its lock, and remove it at the end; yields its name."""
    _remove_stale(folder)
    path = folder / f"{_STEM}{secrets.token_hex(16)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_without_links(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        if not _lock(descriptor, path):  # nobody else knows the name
            raise RunError(f"{path} cannot be locked; choose a folder on another file system")
        yield path.name
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def why_not_shared(folder: Path, name: str, node: str) -> str | None:
    """Why this node cannot work in the folder of a session; None if it can."""
    path = folder / name
    remedy = "mount the folder at the same path on every node"
    with contextlib.suppress(OSError):
        os.listdir(folder)  # noqa: PTH208  (makes a network file system look again)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        return f"{node} does not share the results folder: {path}: {error.strerror}; {remedy}"
    try:
        if _lock(descriptor, path):
            return (
                f"{node} sees {folder}, but file locks are not shared with it, so two nodes could write one run; "
                "mount the folder with locks (NFS 4, Lustre with -o flock)"
            )
    except RunError as error:
        return f"{node}: {error}"
    finally:
        os.close(descriptor)
    return None


def _remove_stale(folder: Path) -> None:
    """Remove the files of sessions that were killed: their locks are free."""
    for path in folder.glob(f"{_STEM}*"):
        with contextlib.suppress(OSError, RunError):
            if time.time() - path.stat().st_mtime < _SECONDS_UNTIL_STALE:  # perhaps created, but not locked yet
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if _lock(descriptor, path):
                    path.unlink()
            finally:
                os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Take the lock of an open file without waiting; False if another process holds it."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise RunError(f"{path} cannot be locked: {error.strerror}; choose a folder on another file system") from error
    return True


def code_identity() -> dict[str, str]:
    """What must be equal on driver and nodes for equal rows: dpcert, its source files, Python, torch and numpy."""
    from .. import __version__

    source = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        source.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {name: metadata.version(name).split("+")[0] for name in _PACKAGES}  # without +cpu, +cu128
    return {"dpcert": __version__, "source files of dpcert": source.hexdigest()[:12], "Python": python, **versions}


def why_other_code(driver: Mapping[str, str], node: str) -> str | None:
    """How the code of this node differs from the driver's; None if it does not."""
    here = code_identity()
    for name in {**driver, **here}:
        if driver.get(name) != here.get(name):
            return (
                f"{node} has {name} {here.get(name, 'missing')}, the driver has {driver.get(name, 'missing')}; "
                "install the same version on every node"
            )
    return None
