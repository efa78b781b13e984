"""Read records of a map-style dataset, in one thread or in several processes. No torch: a worker process starts quickly.

A record is ``dataset[number]``, an ``(image, label)`` pair. Whatever the dataset does for one record (raise, return something
else, end its process) becomes a text about that record, and never touches the others.
"""

import multiprocessing
import operator
import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import numpy as np

from ..errors import DataError
from ..shapes import LARGEST_IMAGE, channels_last, transpose_advice

_LONGEST_TEXT = 160
_PICTURE_MODES = ("L", "RGB")
Record = tuple[np.ndarray, int] | str  # pixels ``[channels, height, width]`` and label, or why there are none


class Reader(Protocol):
    """Reads records by number; `parallel` calls at once make sense."""

    parallel: int

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """The records with these numbers, in this order."""


class OneThread:
    """Reads in one thread of this process, so a dataset need not be safe to share between threads."""

    parallel = 1

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._pool = dataset, ThreadPoolExecutor(1, "dpcert-reader")
        self._close = weakref.finalize(self, _end, self._pool)

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """The records with these numbers, in this order."""
        return self._pool.submit(records_of, self._dataset, numbers).result()

    def __reduce__(self) -> tuple[Any, ...]:
        return OneThread, (self._dataset,)


class Processes:
    """Reads in `parallel` processes, each with a copy of the dataset. A process that dies is replaced."""

    def __init__(self, dataset: Any, parallel: int, name: str) -> None:
        self._dataset, self.parallel, self._name = dataset, parallel, name
        self._lock, self._alone = threading.Lock(), threading.Lock()
        self._pool = self._started(parallel)
        self._pools = [self._pool]
        self._close = weakref.finalize(self, _end_all, self._pools)

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """The records with these numbers, in this order."""
        pool = self._pool
        try:
            return pool.submit(_read, list(numbers)).result()
        except BrokenProcessPool:
            with self._lock:
                if self._pool is pool:  # not yet replaced by another thread
                    self._pools.remove(pool)
                    _end(pool)
                    self._pool = self._started(self.parallel)
                    self._pools.append(self._pool)
            return self._one_by_one(numbers)

    def _one_by_one(self, numbers: Sequence[int]) -> list[Record]:
        """Read each record in a process that nobody else uses, to find the one that ends its process."""
        records: list[Record] = []
        with self._alone:
            pool = self._started(1)
            for number in numbers:
                try:
                    records += pool.submit(_read, [number]).result()
                except BrokenProcessPool:
                    records.append("its __getitem__ ends the process that runs it")
                    _end(pool)
                    pool = self._started(1)
            _end(pool)
        return records

    def _started(self, count: int) -> ProcessPoolExecutor:
        """A pool whose processes have the dataset. New processes, not forks: a fork of a process with threads may hang."""
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(count, context, _begin, (self._dataset,))
        try:
            pool.submit(_read, []).result()
        except BrokenProcessPool as error:
            _end(pool)
            raise DataError(
                f"the worker processes of {self._name} end as soon as they start; call dpcert under "
                "if __name__ == '__main__':, define the dataset in a module, or use workers=0"
            ) from error
        except Exception as error:  # a custom dataset may raise anything when it is pickled
            _end(pool)
            raise DataError(
                f"{self._name} cannot be sent to worker processes ({in_one_line(error)}); open files and connections in "
                "__getitem__, or use workers=0"
            ) from error
        return pool

    def __reduce__(self) -> tuple[Any, ...]:
        return Processes, (self._dataset, self.parallel, self._name)


def _end(pool: Executor) -> None:
    pool.shutdown(wait=False, cancel_futures=True)


def _end_all(pools: list[ProcessPoolExecutor]) -> None:
    for pool in pools:
        _end(pool)


_OWN: list[Any] = []  # in a worker process: its copy of the dataset


def _begin(dataset: Any) -> None:
    """Start of a worker process: the main process decides when it ends, and it ends if that process is killed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    _OWN.append(dataset)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read(numbers: Sequence[int]) -> list[Record]:
    return records_of(_OWN[0], numbers)


def records_of(dataset: Any, numbers: Sequence[int]) -> list[Record]:
    """The records with these numbers; a text where there is none."""
    records: list[Record] = []
    for number in numbers:
        try:
            records.append(pixels_and_label(dataset[number]))
        except DataError as error:
            records.append(str(error))
        except Exception as error:  # a custom dataset may raise anything
            records.append(f"its __getitem__ raises {in_one_line(error)}")
    return records


def pixels_and_label(item: Any) -> tuple[np.ndarray, int]:
    """An ``(image, label)`` pair as pixels ``[channels, height, width]`` (uint8 or float32 in [0, 1]) and an integer."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        kind = f"{type(item).__name__} of {len(item)}" if isinstance(item, (tuple, list)) else type(item).__name__
        raise DataError(f"it is a {kind}, must be a pair (image, label)")
    image, label = item
    return _pixels(image), _label(label)


def _pixels(image: Any) -> np.ndarray:
    pixels = _array(image)
    if pixels.dtype != np.uint8 and pixels.dtype.kind != "f":
        raise DataError(f"its image is {pixels.dtype}, must be uint8 or floats in [0, 1]")
    if pixels.ndim == 2:
        pixels = pixels[None]
    if pixels.ndim != 3 or not 0 < pixels.size <= LARGEST_IMAGE:
        raise DataError(f"its image has shape {list(pixels.shape)}, must be [h, w] or [channels, h, w]")
    if channels_last(pixels.shape):
        raise DataError(f"its image has shape {list(pixels.shape)}: {transpose_advice(pixels.shape)}")
    if pixels.dtype == np.uint8:
        return np.ascontiguousarray(pixels)
    inside = (pixels >= 0.0) & (pixels <= 1.0)  # false for NaN
    if not inside.all():
        value = float(pixels[~inside][0])
        raise DataError(f"its image contains the value {value:g}, pixels must be in [0, 1]; rescale the images")
    return np.ascontiguousarray(pixels, dtype=np.float32)


def _array(image: Any) -> np.ndarray:
    """Tensors, arrays and Pillow images; torch and Pillow are not imported for it."""
    torch, pillow = sys.modules.get("torch"), sys.modules.get("PIL.Image")
    if torch is not None and isinstance(image, torch.Tensor):
        image = image.detach().cpu()
    if pillow is not None and isinstance(image, pillow.Image):
        if image.mode not in _PICTURE_MODES:
            raise DataError(f"its image has the mode {image.mode!r}, must be 8-bit grayscale or RGB; convert it")
        pixels = np.asarray(image)
        return pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    try:
        return np.asarray(image)
    except Exception as error:  # a custom class may raise anything
        raise DataError(f"its image is a {type(image).__name__}, which is not an array ({in_one_line(error)})") from error


def _label(label: Any) -> int:
    kind = f"{type(label).__name__} {getattr(label, 'dtype', '')}".strip()
    if isinstance(label, bool) or "bool" in kind:
        raise DataError(f"its label is a {kind}, must be an integer")
    try:
        number = operator.index(label)
    except Exception as error:  # a custom class may raise anything
        raise DataError(f"its label is a {kind}, must be an integer") from error
    if not 0 <= number < 2**63:
        raise DataError(f"its label is {number if number < 0 else 'too large'}, labels must be at least 0 and fit in 64 bits")
    return number


def in_one_line(error: BaseException) -> str:
    """The kind and the text of an error, on one line of bounded length."""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # a custom error may fail to print
        text = type(error).__name__
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
