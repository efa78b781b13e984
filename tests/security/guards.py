"""Traps: what must not happen while a file is loaded raises, or is written down, at the moment it happens."""

import contextlib
import pickle
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

_watching: list[list[str]] = []
_EVENTS = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "marshal.loads")


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    """Python's own audit events: they come from the C unpickler too, whatever name it was called by."""
    if _watching and event in _EVENTS:
        _watching[-1].append(f"{event} {arguments!r:.200}")


sys.addaudithook(_hook)  # there is no way to take one away: it looks at `_watching`


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What the audit hook saw inside the block."""
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)


class UnpickledError(BaseException):
    """Not an `Exception`: no reader may swallow it."""


@contextlib.contextmanager
def no_unpickling() -> Iterator[list[str]]:
    """Inside, every way to unpickle raises, and ``np.load`` raises unless pickles are refused."""

    def forbidden(*arguments: object, **options: object) -> object:
        raise UnpickledError("something was unpickled")

    real = np.load

    def load(*arguments: object, **options: object) -> object:
        if options.get("allow_pickle", False) is not False:
            raise UnpickledError("np.load was told to unpickle")
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, watched() as seen:
        for owner, name in (
            (pickle, "load"),
            (pickle, "loads"),
            (pickle, "Unpickler"),
            (pickle, "_Unpickler"),
            (torch, "load"),
        ):
            patch.setattr(owner, name, forbidden)
        patch.setattr(torch.serialization, "load", forbidden)
        patch.setattr(np, "load", load)
        yield seen
