"""Compile C++ for this processor at first use, and keep the result in a cache that belongs to this user.

Without a compiler, or with a broken one, there is no library, and the caller does without. A library is named by everything
that it is made from: the source, the compiler's version and the instructions of the processor. So several kinds of machines may
share a home directory. It is moved into the cache when it is complete: two processes may compile the same one.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")  # no flag may reorder sums
_SECONDS = 300


def library(source: Path, definition: str) -> ctypes.CDLL | None:
    """Return the compiled `source` with the macro `definition` (``NAME=TEXT``), or None if that is not possible here."""
    try:
        compiler = _compiler()
        if compiler is None:
            return None
        made_from = "\0".join([*compiler, *FLAGS, definition, _target(tuple(compiler))])
        digest = hashlib.sha256(made_from.encode() + source.read_bytes()).hexdigest()
        cache = _cache()
        if cache is not None:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(cache / f"{digest}.so"))
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as folder:  # a loaded library outlives its file
            built = Path(folder) / "chain.so"
            _run([*compiler, *FLAGS, f"-D{definition}", str(source), "-o", str(built)])
            loaded = ctypes.CDLL(str(built))
            if cache is not None:
                _keep(built, cache / f"{digest}.so")
            return loaded
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _keep(built: Path, name: Path) -> None:
    """Move a library into the cache: a power failure leaves all of it there, or nothing."""
    with contextlib.suppress(OSError), built.open("rb") as file:
        os.fsync(file.fileno())
        built.replace(name)


def _compiler() -> list[str] | None:
    """Return the command of the C++ compiler: ``$CXX``, or the first one that is installed."""
    asked = os.environ.get("CXX")
    if asked is not None:
        return shlex.split(asked) or None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


@functools.cache
def _target(compiler: tuple[str, ...]) -> str:
    """Return the macros that the compiler defines: its version, and the instructions of this processor."""
    return _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]).decode()


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL).stdout


def _cache() -> Path | None:
    """Return the folder for libraries; None unless it can be made and only this user can write to it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpcert"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):
        return None
    if not os.access(folder, os.W_OK):
        return None
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return None if others_write or found.st_uid != os.geteuid() else folder
