"""The disk of the durable store, made to fail at its k-th write, fsync, rename or removal.

Everything dpcert writes goes through ``dpcert.store.durable.os``; `Disk` takes its place there. A *kill* is a
BaseException that nothing catches, after which no call reaches the disk any more (as after kill -9). A *power cut* also
takes back what was never made durable: bytes without fsync, names without fsync of their folder.
"""

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from dpcert.store import durable

OPERATIONS = ("write", "fsync", "replace", "unlink")
KILLS = ("kill after", "kill halfway", "power cut, names lost", "power cut, names kept")  # before = after the one before
ERRORS = ("ENOSPC", "EIO", "half, then ENOSPC")


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, at which call (1 is the first) of which operation."""

    operation: str
    number: int
    kind: str


@dataclass
class Disk:
    """`os` as the store sees it. fsync is only noted: what it promises is enforced by the power cut."""

    fault: Fault | None = None
    calls: Counter[str] = field(default_factory=Counter)
    fired: bool = False
    dead: bool = False

    def __post_init__(self) -> None:
        self._paths: dict[int, Path] = {}  # of open descriptors
        self._durable: dict[int, bytes] = {}  # content at the last fsync, by inode, of files that have more than that
        self._names: list[tuple[Path, Path, bytes | None]] = []  # folder, name, content under it before; not yet durable

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _at(self, path: Path | str, folder: int | None) -> Path:
        """The path behind a name in an open folder."""
        return Path(path) if folder is None else self._paths[folder] / path

    def open(self, path: Path | str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._refuse_if_dead()
        whole = self._at(path, dir_fd)
        if flags & os.O_CREAT:
            self._note_name(whole)
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
        self._paths[descriptor] = whole
        return descriptor

    def close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        os.close(descriptor)

    def write(self, descriptor: int, data: Any) -> int:
        kind = self._due("write")
        path = self._paths[descriptor]
        self._durable.setdefault(path.stat().st_ino, path.read_bytes())
        if kind in ("half, then ENOSPC", "short", "kill halfway"):
            half = os.write(descriptor, data[: max(1, len(data) // 2)])
            if kind == "kill halfway":
                self._die()
            return half
        self._before(kind)
        written = os.write(descriptor, data)
        self._after(kind)
        return written

    def fsync(self, descriptor: int) -> None:
        kind = self._due("fsync")
        self._before(kind)
        path = self._paths[descriptor]
        if path.is_dir():
            self._names = [entry for entry in self._names if entry[0] != path]
        else:
            self._durable.pop(path.stat().st_ino, None)
        self._after(kind)

    def replace(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        kind = self._due("replace")
        self._before(kind)
        self._note_name(self._at(target, dst_dir_fd))
        os.replace(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._after(kind)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        whole = self._at(path, dir_fd)
        if not whole.exists():  # nothing is changed: not a point of failure
            self._refuse_if_dead()
            return
        kind = self._due("unlink")
        self._before(kind)
        self._note_name(whole)
        os.unlink(path, dir_fd=dir_fd)
        self._after(kind)

    def _due(self, operation: str) -> str | None:
        """The fault of this call. An error stays (a full disk stays full); a short write happens once."""
        self._refuse_if_dead()
        self.calls[operation] += 1
        fault = self.fault
        if fault is None or fault.operation != operation or self.calls[operation] < fault.number:
            return None
        first = self.calls[operation] == fault.number
        self.fired = True
        if fault.kind == "half, then ENOSPC":
            return fault.kind if first else "ENOSPC"
        return fault.kind if first or fault.kind in ERRORS else None

    def _before(self, kind: str | None) -> None:
        if kind in ("ENOSPC", "EIO"):
            number = getattr(errno, kind)
            raise OSError(number, os.strerror(number))

    def _after(self, kind: str | None) -> None:
        if kind is not None and kind.startswith("power cut"):
            self._lose_what_is_not_durable(names_too=kind.endswith("lost"))
        if kind == "kill after" or (kind is not None and kind.startswith("power cut")):
            self._die()

    def _die(self) -> None:
        self.dead = True
        raise Killed

    def _refuse_if_dead(self) -> None:
        if self.dead:
            raise Killed

    def _note_name(self, path: Path) -> None:
        self._names.append((path.parent, path, self._content(path)))

    def _content(self, path: Path) -> bytes | None:
        """What the disk itself holds under a name."""
        if not path.exists():
            return None
        return self._durable.get(path.stat().st_ino, path.read_bytes())

    def _lose_what_is_not_durable(self, *, names_too: bool) -> None:
        touched = {path for _, path, _ in self._names} | set(self._paths.values())
        for path in touched:
            if path.is_file():
                content = self._content(path)
                assert content is not None
                path.write_bytes(content)
        if names_too:
            for _, path, content in reversed(self._names):
                if content is None:
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(content)


class WithoutFsync(Disk):
    """Broken twin: a store that does not call fsync."""

    def fsync(self, descriptor: int) -> None:
        self._after(self._due("fsync"))


class WithoutRename(Disk):
    """Broken twin: a store that writes over the old file."""

    def open(self, path: Path | str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = Path(path).name
        if name.endswith(".tmp"):
            path, flags = name.removeprefix(".").removesuffix(".tmp"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return super().open(path, flags, mode, dir_fd=dir_fd)

    def replace(self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        self._after(self._due("replace"))


@contextlib.contextmanager
def failing(fault: Fault | None = None, disk_type: type[Disk] = Disk) -> Iterator[Disk]:
    """The store on a disk that has `fault`."""
    disk = disk_type(fault)
    with mock.patch.object(durable, "os", disk):
        yield disk


def every_fault(calls: Counter[str], kinds: tuple[str, ...]) -> Iterator[Fault]:
    """Each kind at each call that an undisturbed run makes."""
    for operation in OPERATIONS:
        for number in range(1, calls[operation] + 1):
            for kind in kinds:
                if operation == "write" or kind not in ("kill halfway", "half, then ENOSPC", "short"):
                    yield Fault(operation, number, kind)
