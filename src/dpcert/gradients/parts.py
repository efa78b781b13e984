"""Per-example gradients of one layer's parameters, in the cheaper of two forms.

Both forms compute the norms and the weighted sum in float64 from the same float32 values, so that the norm used for
clipping is the norm of what is summed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

WIDEST = 16384  # gradients with more entries are converted to float64 in blocks
_IN_CACHE = 1 << 18  # entries of a block


class Part(Protocol):
    """Per-example gradients of one parameter."""

    def norms_squared(self) -> Tensor:
        """``[b]``, float64."""

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """sum_i factors[i] * gradient[i], flat, float64."""

    def instantiate(self) -> Tensor:
        """``[b, size]``."""

    def without(self, rows: Tensor) -> "Part":
        """Return a copy with the gradients of the marked examples set to 0."""


@dataclass(frozen=True)
class Instantiated:
    """Materialized gradients, ``[b, size]``."""

    gradients: Tensor
    squares: Tensor | None = None  # of the norms, if they are already known

    @cached_property
    def _wide(self) -> Tensor:
        return self.gradients.double()

    def norms_squared(self) -> Tensor:
        """Row sums of squares."""
        if self.squares is not None:
            return self.squares
        if self.gradients.shape[1] > WIDEST:
            squares = [torch.linalg.vector_norm(block, dim=1).square() for block in self._blocks()]
            return torch.stack(squares).sum(dim=0)
        norms: Tensor = torch.linalg.vector_norm(self._wide, dim=1)
        return norms.square()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """A vector-matrix product in float64: float32 sums would move by more than the clip margin."""
        if self.gradients.shape[1] > WIDEST:
            return torch.cat([factors @ block for block in self._blocks()])
        return factors @ self._wide

    def _blocks(self) -> Iterator[Tensor]:
        """Yield the columns in float64, some at a time in one buffer: a whole float64 copy would leave the cache."""
        examples = len(self.gradients)
        columns = max(512, _IN_CACHE // max(1, examples))
        buffer = self.gradients.new_empty((examples, columns), dtype=torch.float64)
        for block in self.gradients.split(columns, dim=1):  # type: ignore[no-untyped-call]
            yield buffer[:, : block.shape[1]].copy_(block)

    def instantiate(self) -> Tensor:
        """Return the gradients."""
        return self.gradients

    def without(self, rows: Tensor) -> "Instantiated":
        """Zero rows."""
        return Instantiated(torch.where(rows[:, None], 0.0, self.gradients))


@dataclass(frozen=True)
class Factored:
    """Gradients as products, never formed: gradient[i] = deltas[i]^T inputs[i].

    ``inputs [b, s, in]``, ``deltas [b, s, out]``: s sums over views and positions. The norm is the ghost norm
    ‖D^T A‖^2 = sum of (A A^T) * (D D^T) (Goodfellow 2015; Li et al. 2022), which suits wide linear layers.
    """

    inputs: Tensor
    deltas: Tensor

    def norms_squared(self) -> Tensor:
        """The ghost norm, in float64, plus a bound on its rounding error.

        If the views of an example nearly cancel, the sum loses up to s 2^-50 ‖A‖^2 ‖D‖^2. Without that term such a gradient
        would be clipped too little.
        """
        inputs, deltas = self.inputs.double(), self.deltas.double()
        gram_in, gram_out = torch.bmm(inputs, inputs.mT), torch.bmm(deltas, deltas.mT)
        sizes = gram_in.diagonal(dim1=1, dim2=2).sum(dim=1) * gram_out.diagonal(dim1=1, dim2=2).sum(dim=1)
        return (gram_in * gram_out).sum(dim=(1, 2)).clamp_(min=0.0) + inputs.shape[1] * 2.0**-50 * sizes

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """One matrix product over all rows."""
        deltas = (self.deltas.double() * factors[:, None, None]).flatten(0, 1)
        return (deltas.mT @ self.inputs.double().flatten(0, 1)).flatten()

    def instantiate(self) -> Tensor:
        """``[b, out * in]``."""
        return torch.bmm(self.deltas.mT, self.inputs).flatten(1)

    def without(self, rows: Tensor) -> "Factored":
        """Zero the factors of the marked examples."""
        marked = rows[:, None, None]
        return Factored(torch.where(marked, 0.0, self.inputs), torch.where(marked, 0.0, self.deltas))


@dataclass(frozen=True)
class ChannelsLast:
    """Gradients of a convolution's weight as ``shape``: out, kernel..., in. The parameter's order is out, in, kernel..."""

    part: Part
    shape: tuple[int, ...]

    def norms_squared(self) -> Tensor:
        """Order does not matter."""
        return self.part.norms_squared()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum in the parameter's order."""
        return self.part.weighted_sum(factors).view(self.shape).movedim(-1, 1).flatten()

    def instantiate(self) -> Tensor:
        """Return the gradients in the parameter's order."""
        return torch.unflatten(self.part.instantiate(), 1, self.shape).movedim(-1, 2).flatten(1)

    def without(self, rows: Tensor) -> "ChannelsLast":
        """Zero the marked examples."""
        return ChannelsLast(self.part.without(rows), self.shape)


@dataclass(frozen=True)
class Stacked:
    """Gradients of one parameter in several parts, one after the other: the three projections of an attention layer."""

    parts: list[Part]

    def norms_squared(self) -> Tensor:
        """Add the squares of the parts."""
        return torch.stack([part.norms_squared() for part in self.parts]).sum(dim=0)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Join the sums of the parts."""
        return torch.cat([part.weighted_sum(factors) for part in self.parts])

    def instantiate(self) -> Tensor:
        """Join the gradients of the parts."""
        return torch.cat([part.instantiate() for part in self.parts], dim=1)

    def without(self, rows: Tensor) -> "Stacked":
        """Zero the marked examples."""
        return Stacked([part.without(rows) for part in self.parts])


Allocate = Callable[[tuple[int, ...]], Tensor]


def factors_are_cheaper(summed: int, width_in: int, width_out: int) -> bool:
    """Compare the number of multiplications and float64 writes of the two forms."""
    instantiated = width_in * width_out * (summed + 8)
    factored = 2 * summed * (summed + 4) * (width_in + width_out) + 2 * summed * width_in * width_out
    return factored < instantiated


def product(inputs: Tensor, deltas: Tensor, allocate: Allocate) -> Part:
    """Return deltas[i]^T inputs[i] in the cheaper form; `allocate` gives the memory for gradients with many entries."""
    summed, width_in, width_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    if factors_are_cheaper(summed, width_in, width_out):
        return Factored(inputs, deltas)
    if one_by_one(width_in * width_out, inputs):
        return products(inputs, deltas, allocate((len(inputs), width_out, width_in)))
    return Instantiated(torch.bmm(deltas.mT, inputs).flatten(1))


def one_by_one(size: int, like: Tensor) -> bool:
    """Return whether `products` is the faster way to gradients with `size` entries.

    PyTorch's matrix products use MKL, which runs at half speed on processors of other makers. oneDNN's do not, but there is
    no batched one.
    """
    return size > WIDEST and like.device.type == "cpu" and like.dtype == torch.float32 and _onednn_multiplies()


def products(inputs: Iterable[Tensor], deltas: Tensor, memory: Tensor) -> Instantiated:
    """Write deltas[i]^T inputs[i] to ``memory[i]``, and sum its squares while it is in cache."""
    squares, wide = [], memory.new_empty(memory[0].numel(), dtype=torch.float64)
    for gradient, a, d in zip(memory, inputs, deltas, strict=True):
        gradient.copy_(_onednn_product(d.mT, a.mT))
        wide.copy_(gradient.flatten())
        squares.append(torch.dot(wide, wide))
    return Instantiated(memory.flatten(1), torch.stack(squares))


def _onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left right^T."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return result


@cache
def _onednn_multiplies() -> bool:
    """Return whether this build of PyTorch offers oneDNN's matrix product, and it is one."""
    left, right = torch.rand(5, 7).mT, torch.rand(5, 3).mT
    try:
        return torch.allclose(_onednn_product(left, right), left @ right.mT)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def total(parts: list[Part]) -> Part:
    """Return the gradient of a parameter that is used several times in one forward pass."""
    if len(parts) == 1:
        return parts[0]
    summed = parts[0].instantiate()
    for part in parts[1:]:
        summed = summed + part.instantiate()
    return Instantiated(summed)
