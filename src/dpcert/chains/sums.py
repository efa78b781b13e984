"""Norms and sums of large gradients as machine code: float32 numbers are widened to float64 in registers, not in memory."""

import ctypes
import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .build import library
from .numbers import digits, pointer

SOURCE = Path(__file__).parent / "sums.cpp"


class SumCode:
    """The machine code. It has no state, so threads may share it. All tensors are contiguous and on the CPU."""

    def __init__(self, code: ctypes.CDLL) -> None:
        self._code = code
        code.squares.restype = ctypes.c_double

    def squares(self, gradient: Tensor) -> float:
        """Return the squared norm of a float32 gradient."""
        found: float = self._code.squares(pointer(gradient), ctypes.c_int64(gradient.numel()))
        return found

    def add(self, gradients: Tensor, factors: Tensor, total: Tensor) -> Tensor:
        """Add ``sum_i factors[i] * gradients[i]`` to `total`, one example after the other; those with factor 0 are not read."""
        factors = factors.contiguous()
        sizes = ctypes.c_int64(len(gradients)), ctypes.c_int64(gradients.shape[1])
        self._code.add(pointer(gradients), *sizes, pointer(factors), pointer(total))
        return total

    def fingerprint(self) -> str:
        """Return a digest of fixed sums: equal where the machine code gives the same bits."""
        gradients, total = digits(3, 4111), torch.zeros(4111, dtype=torch.float64)
        norms = torch.tensor([self.squares(gradient) for gradient in gradients], dtype=torch.float64)
        self.add(gradients, 1.0 / norms.sqrt(), total)
        return hashlib.sha256(norms.numpy().tobytes() + total.numpy().tobytes()).hexdigest()[:16]


@cache
def sum_code() -> SumCode | None:
    """Return the machine code, or None if this machine cannot compile it to something that agrees with PyTorch."""
    library_or_none = library(SOURCE, "SUMS=1")
    code = None if library_or_none is None else SumCode(library_or_none)
    return code if code is not None and _agrees(code) else None


def _agrees(code: SumCode) -> bool:
    gradients, factors = digits(3, 4111), torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    norms = torch.tensor([code.squares(gradient) for gradient in gradients], dtype=torch.float64)
    total = code.add(gradients, factors, torch.ones(4111, dtype=torch.float64))
    wide = gradients.double()
    expected = wide.square().sum(dim=1), 1.0 + factors @ wide
    return all(torch.allclose(a, b, rtol=1e-12, atol=0.0) for a, b in zip((norms, total), expected, strict=True))
