"""Read rows in the background before a step asks for them. Which rows a step takes is known one step ahead, from the key.

What is read does not depend on timing: a row is a function of its number. So reading ahead changes the speed, and no bit.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .images import Images, RowSource, as_float

AHEAD_BYTES = 256 << 20  # at most, counted as floats: uint8 rows take a quarter of it
_PIECE_BYTES, _PIECE_ROWS = 4 << 20, 32


@dataclass
class _Piece:
    """Rows that one thread reads together."""

    rows: Future[Tensor]
    turn: int
    left: int


@dataclass
class _Tail:
    """The rows of a batch from `place` on, which wait for room. Their numbers increase."""

    numbers: np.ndarray
    turn: int
    place: int = 0

    def holds(self, number: int) -> bool:
        """Whether a row is among them."""
        place = self.place + int(np.searchsorted(self.numbers[self.place :], number))
        return place < len(self.numbers) and int(self.numbers[place]) == number


class RowsAhead:
    """A source that reads the rows of another one ahead of use. For use by the threads of one step at a time.

    Turns are the batches of consecutive steps, each expected before it begins.
    """

    known = None

    def __init__(self, source: RowSource) -> None:
        self._source, self.shape, self.readers = source, source.shape, source.readers
        row_bytes = 4 * int(np.prod(self.shape[1:]))
        self._piece_rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES // row_bytes))
        self._most_pieces = max(2 * self.readers, AHEAD_BYTES // (self._piece_rows * row_bytes))
        self._pool = ThreadPoolExecutor(self.readers, "dpcert-ahead")
        self._lock = threading.Lock()
        self._places: dict[int, deque[tuple[_Piece, int]]] = {}  # by row number: where it is or will be, by turn
        self._tails: deque[_Tail] = deque()
        self._held = self._expected = self._begun = 0

    def expect(self, numbers: np.ndarray) -> None:
        """Begin to read the rows of the next turn, given by increasing numbers."""
        with self._lock:
            self._expected += 1
            if len(numbers):
                self._tails.append(_Tail(numbers, self._expected))
            self._read_more()

    def begin(self) -> None:
        """Begin the next turn. Rows that the one before left are dropped."""
        with self._lock:
            self._begun += 1
            self._drop_before(self._begun)
            self._read_more()

    def take(self, indices: np.ndarray) -> Tensor:
        """The rows as float32. Those that nobody expected are read now."""
        found: dict[int, tuple[_Piece, list[int], list[int]]] = {}
        unexpected = []
        with self._lock:
            for place, number in enumerate(indices.tolist()):
                claimed = self._claim(number)
                if claimed is None:
                    unexpected.append(place)
                else:
                    piece, row = claimed
                    _, places, rows = found.setdefault(id(piece), (piece, [], []))
                    places.append(place)
                    rows.append(row)
        taken = torch.empty((len(indices), *self.shape[1:]))
        for piece, places, rows in found.values():
            taken[places] = as_float(piece.rows.result()[rows])
            self._release(piece, len(rows))
        if unexpected:
            taken[unexpected] = as_float(self._source.take_in_step(indices[unexpected]))
        return taken

    def take_in_step(self, indices: np.ndarray) -> Tensor:
        """Like `take`."""
        return self.take(indices)

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            self._tails.clear()
            self._places.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _claim(self, number: int) -> tuple[_Piece, int] | None:
        if number not in self._places and self._tails and self._tails[0].turn == self._begun:
            tail = self._tails[0]
            if tail.holds(number):  # it is needed now, whatever else is held
                while number not in self._places:
                    self._start_piece(tail)
        places = self._places.get(number)
        if places is None:
            return None
        claimed = places.popleft()
        if not places:
            del self._places[number]
        return claimed

    def _release(self, piece: _Piece, count: int) -> None:
        with self._lock:
            piece.left -= count
            if piece.left == 0:
                self._held -= 1
                self._read_more()

    def _read_more(self) -> None:
        while self._tails and self._held < self._most_pieces:
            self._start_piece(self._tails[0])

    def _start_piece(self, tail: _Tail) -> None:
        """Start to read the next piece of the first tail."""
        numbers = tail.numbers[tail.place : tail.place + self._piece_rows]
        tail.place += len(numbers)
        if tail.place == len(tail.numbers):
            self._tails.popleft()
        piece = _Piece(self._pool.submit(self._source.take_in_step, numbers), tail.turn, len(numbers))
        self._held += 1
        for place, number in enumerate(numbers.tolist()):
            self._places.setdefault(number, deque()).append((piece, place))

    def _drop_before(self, turn: int) -> None:
        """Forget rows of earlier turns that no step took: those of a step that was abandoned."""
        while self._tails and self._tails[0].turn < turn:
            self._tails.popleft()
        old = {id(piece): piece for places in self._places.values() for piece, _ in places if piece.turn < turn}
        if not old:
            return
        self._held -= len(old)
        kept = {n: deque(entry for entry in places if id(entry[0]) not in old) for n, places in self._places.items()}
        self._places = {number: places for number, places in kept.items() if places}


class Ahead:
    """The images of a training run, and the way to announce the batch of the next step."""

    def __init__(self, images: Tensor) -> None:
        self.images, self._first = images, 0
        self._rows: RowsAhead | None = None
        self._drawer = ThreadPoolExecutor(1, "dpcert-draw")  # starts no thread until it is used
        self._drawing: Future[None] | None = None
        if isinstance(images, Images) and images.source.readers:
            self._rows, self._first = RowsAhead(images.source), images.start
            self.images = images.through(self._rows)

    def announce(self, draw: Callable[[], np.ndarray] | None) -> None:
        """Say that the step of the batch announced before begins. Begin to draw and read the batch after it (None: no more).

        Nothing is computed from the rows of a step until the step runs, so this may be ahead of the ledger.
        """
        if self._rows is None:
            return
        if self._drawing is not None:
            self._drawing.result()
            self._rows.begin()
        self._drawing = None if draw is None else self._drawer.submit(self._expect, self._rows, draw)

    def _expect(self, rows: RowsAhead, draw: Callable[[], np.ndarray]) -> None:
        rows.expect(draw() + self._first)

    def close(self) -> None:
        """Stop drawing and reading."""
        self._drawer.shutdown(wait=True, cancel_futures=True)
        if self._rows is not None:
            self._rows.close()


@contextlib.contextmanager
def reading_ahead(images: Tensor) -> Iterator[Ahead]:
    """The images for the steps of a training run. Images in memory are used as they are."""
    ahead = Ahead(images)
    try:
        yield ahead
    finally:
        ahead.close()


def as_in_steps(images: Tensor) -> Tensor:
    """The images as the steps of a training run read them: a single record that cannot be read is NaN, and no exception."""
    return Ahead(images).images
