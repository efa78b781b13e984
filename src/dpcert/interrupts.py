"""Ctrl-C and SIGTERM, handled between steps, when the state is consistent."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; the state is saved if there is a run directory."""


_ONE_REQUEST_SECONDS = 5.0  # Ctrl-C in a terminal reaches a rank directly, and again through torchrun


@contextlib.contextmanager
def stop_requests(*, alone: bool = True) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM, to be checked between steps; a second one stops immediately.

    A rank of several (not `alone`) counts signals that follow within seconds as the same request, also while it ends.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    first = [0.0]

    def ask(number: int, frame: Any) -> None:
        if not asked:
            first[0] = time.monotonic()
        elif alone or time.monotonic() - first[0] > _ONE_REQUEST_SECONDS:
            raise KeyboardInterrupt
        asked.append(number)

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    stops = False
    try:
        yield asked
    except Interrupted:
        stops = True
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if stops and not alone else handler)
