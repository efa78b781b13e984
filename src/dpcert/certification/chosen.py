"""Some rows of inputs that may be too many for memory."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


class _Chosen:
    """Rows of `x` by number, taken when they are asked for."""

    def __init__(self, x: Tensor, rows: Sequence[int]) -> None:
        self._x, self._rows = x, torch.tensor(rows, dtype=torch.long)
        self.shape = torch.Size((len(rows), *x.shape[1:]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        return self._x[self._rows[index]]


def chosen(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return ``x[rows]``. Of images that are read on access (a subclass of Tensor), it is read row by row, too.

    Use only its shape, its length and rows of it.
    """
    return x[list(rows)] if type(x) is Tensor else cast(Tensor, _Chosen(x, rows))
