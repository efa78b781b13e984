"""Images that are converted to float32 on access: stored as bytes in memory, or as an array on disk.

`Images` behaves like a tensor. Indexing rows (an index, a slice, a list, a mask) reads and converts only those rows. Any
other operation works on a float copy of the whole collection, so code in this package indexes rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import DataError
from ..progress import Progress, silent

CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class Known:
    """What the check of all rows noted about each, so that they need not be read again. Private: never leaves memory."""

    digests: np.ndarray  # uint8 [rows, bytes]: of pixels and label, the same in every process
    hashes: np.ndarray  # uint64 [rows]: `record_hashes`, under a key of this process


class RowSource(Protocol):
    """Storage of the rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, channels, height, width."""

    @property
    def readers(self) -> int:
        """The number of threads that it is worth to read with ahead of use; 0 for rows in memory."""

    @property
    def known(self) -> Known | None:
        """What is known about each row; None if a pass over the rows is cheap, or cannot fail for a single row."""

    def take(self, indices: np.ndarray) -> Tensor:
        """Rows by number, each 0 <= number < rows: uint8, or float32 in [0, 1]."""

    def take_in_step(self, indices: np.ndarray) -> Tensor:
        """Like `take`, but a single row that cannot be read is NaN: no exception in a private step may depend on one record."""


class RowsInMemory:
    """Rows of a uint8 tensor."""

    readers = 0
    known = None

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, channels, height, width."""
        return tuple(self._rows.shape)

    def take(self, indices: np.ndarray) -> Tensor:
        """A copy of the rows."""
        return self._rows[torch.from_numpy(indices)]

    def take_in_step(self, indices: np.ndarray) -> Tensor:
        """Like `take`, which never fails here."""
        return self.take(indices)


class Images(Tensor):
    """Rows `start` to `stop` of a source as a float32 tensor ``[n, channels, height, width]`` in [0, 1]; read-only."""

    _source: RowSource
    _start: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: RowSource, start: int = 0, stop: int | None = None) -> "Images":
        """Create the tensor without reading any rows."""
        rows, *shape = source.shape
        count = (rows if stop is None else stop) - start
        images: Images = torch.Tensor._make_wrapper_subclass(cls, (count, *shape), dtype=torch.float32)
        images._source, images._start = source, start
        return images

    def __init__(self, source: RowSource, start: int = 0, stop: int | None = None) -> None:
        """Does nothing: `__new__` sets everything."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run any operation other than indexing rows on a float copy of all rows."""
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Images):
                raise _read_only()
        args, kwargs = tree_map_only(Images, Images.whole, (args, kwargs))
        return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """All rows as an ordinary float tensor; needs four bytes per value."""
        return self._take(np.arange(len(self)))

    def part(self, start: int, stop: int) -> "Images":
        """Rows `start` to `stop` of the same source, without reading them."""
        return Images(self._source, self._start + start, self._start + stop)

    def stored(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` as they are stored: uint8 or float32."""
        return self._source.take(np.arange(start, stop) + self._start)

    def through(self, source: RowSource) -> "Images":
        """The same rows, read through another source with the same numbers."""
        return Images(source, self._start, self._start + len(self))

    @property
    def source(self) -> RowSource:
        """Where the rows are."""
        return self._source

    @property
    def start(self) -> int:
        """The number of the first row in the source."""
        return self._start

    @property
    def known(self) -> Known | None:
        """What is known about each row."""
        known, here = self._source.known, slice(self._start, self._start + len(self))
        return None if known is None else Known(known.digests[here], known.hashes[here])

    def _take(self, indices: np.ndarray) -> Tensor:
        return as_float(self._source.take(indices + self._start))

    def __getitem__(self, index: Any) -> Tensor:
        """Rows as an ordinary float tensor; the index has the same meaning as for a tensor."""
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        rows = _row_numbers(first, len(self)) if all(isinstance(part, int | slice) for part in rest) else None
        if rows is None:
            return self.whole()[index]
        taken = self._take(rows.flatten().numpy()).reshape(*rows.shape, *self.shape[1:])
        return taken[(*[slice(None)] * rows.ndim, *rest)] if rest else taken

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raise: the change would be lost, or would modify the user's array."""
        raise _read_only()

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __deepcopy__(self, memo: Any) -> "Images":
        return self  # it is immutable

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Images, (self._source, self._start, self._start + len(self))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"Images(shape={list(self.shape)}, dtype={self.dtype}, source={type(self._source).__name__})"

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.numpy().astype(dtype or np.float32, copy=False)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """All rows as an ordinary float array."""
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """All rows as nested lists."""
        return self.whole().tolist()


def as_float(rows: Tensor) -> Tensor:
    """Rows of a source as float32 in [0, 1]."""
    return rows.float().div_(255.0) if rows.dtype == torch.uint8 else rows


def _row_numbers(index: Any, count: int) -> Tensor | None:
    """The non-negative row numbers that an index of the first dimension selects; None if it involves other dimensions."""
    if isinstance(index, slice):
        if index.step is not None and index.step <= 0:
            raise ValueError("slice step must be positive")  # as in torch
        chosen = range(count)[index]  # and not an array of all numbers: there may be a billion
        return torch.arange(chosen.start, max(chosen.start, chosen.stop), chosen.step)
    if index is None or index is Ellipsis or isinstance(index, bool | tuple):
        return None
    numbers = torch.as_tensor(index).cpu()
    if numbers.dtype == torch.bool:
        return numbers.nonzero().flatten() if numbers.shape == (count,) else None
    if numbers.is_floating_point() and numbers.numel():
        raise IndexError(f"row numbers are {numbers.dtype}, must be integers")
    numbers = numbers.long()
    if numbers.numel() and (int(numbers.min()) < -count or int(numbers.max()) >= count):
        raise IndexError(f"row numbers {int(numbers.min())} to {int(numbers.max())} are out of range for {count} images")
    return torch.where(numbers < 0, numbers + count, numbers)


def _read_only() -> DataError:
    return DataError("the images of a data set are read-only; change a copy: images = data.x_train.clone()")


def is_read_by_index(images: Tensor) -> bool:
    """Whether the rows are not in memory, so that a pass over all of them takes time."""
    return isinstance(images, Images) and images.source.readers > 0


def rows_between(images: Tensor, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop`, without reading or copying them."""
    return images.part(start, stop) if isinstance(images, Images) else images[start:stop]


def rows_per_chunk(images: Tensor, chunk_bytes: int | None = None) -> int:
    """How many rows of these images fit in a chunk as float32; at least one."""
    return max(1, (chunk_bytes or CHUNK_BYTES) // max(1, images.shape[1:].numel() * images.element_size()))


def chunks(images: Tensor, progress: Progress = silent) -> Iterator[Tensor]:
    """All rows in order, as contiguous tensors of at most `CHUNK_BYTES` each (but at least one row)."""
    rows = rows_per_chunk(images)
    for start in range(0, len(images), rows):
        yield images[start : start + rows].contiguous()
        progress(min(start + rows, len(images)), len(images))
