"""Per-example gradients of one layer's parameters, in the cheapest of three forms: stored, as products, or formed when needed.

All forms compute the norms and the weighted sum in float64 from the same float32 values, so that the norm used for
clipping is the norm of what is summed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..chains.sums import SumCode, sum_code

WIDEST = 16384  # gradients with more entries are converted to float64 in blocks
_IN_CACHE = 1 << 18  # entries of a block


class Part(Protocol):
    """Per-example gradients of one parameter."""

    @property
    def deferred(self) -> bool:
        """Whether gradients are formed each time they are needed: use `of` to form those of a few examples once."""

    @property
    def size(self) -> int:
        """Entries of one gradient."""

    def of(self, some: slice) -> "Part":
        """Return the gradients of some examples. Where `deferred`, they are valid until the next call."""

    def norms_squared(self) -> Tensor:
        """``[b]``, float64."""

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """sum_i factors[i] * gradient[i], float64, flat in the order of the part; added to `total`, in place, if given."""

    def in_order(self, flat: Tensor) -> Tensor:
        """Return a sum in the order of the parameter."""

    def instantiate(self) -> Tensor:
        """``[b, size]``."""

    def without(self, rows: Tensor) -> "Part":
        """Return a copy with the gradients of the marked examples set to 0."""


@dataclass(frozen=True)
class Instantiated:
    """Stored gradients, ``[b, size]``."""

    gradients: Tensor
    deferred: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """Entries of one gradient."""
        return self.gradients.shape[1]

    @cached_property
    def _wide(self) -> Tensor:
        return self.gradients.double()

    def of(self, some: slice) -> "Instantiated":
        """Some rows."""
        return Instantiated(self.gradients[some])

    def norms_squared(self) -> Tensor:
        """Row sums of squares."""
        if self.gradients.shape[1] > WIDEST:
            squares = [torch.linalg.vector_norm(block, dim=1).square() for block in self._blocks()]
            return torch.stack(squares).sum(dim=0)
        norms: Tensor = torch.linalg.vector_norm(self._wide, dim=1)
        return norms.square()

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """A vector-matrix product in float64: float32 sums would move by more than the clip margin."""
        if self.gradients.shape[1] > WIDEST:
            return _added(torch.cat([factors @ block for block in self._blocks()]), total)
        return _added(factors @ self._wide, total)

    def in_order(self, flat: Tensor) -> Tensor:
        """Already in order."""
        return flat

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
    deferred: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """Entries of one gradient."""
        return self.inputs.shape[2] * self.deltas.shape[2]

    def of(self, some: slice) -> "Factored":
        """The factors of some examples."""
        return Factored(self.inputs[some], self.deltas[some])

    def norms_squared(self) -> Tensor:
        """The ghost norm, in float64, plus a bound on its rounding error.

        If the views of an example nearly cancel, the sum loses up to s 2^-50 ‖A‖^2 ‖D‖^2. Without that term such a gradient
        would be clipped too little.
        """
        inputs, deltas = self.inputs.double(), self.deltas.double()
        gram_in, gram_out = torch.bmm(inputs, inputs.mT), torch.bmm(deltas, deltas.mT)
        sizes = gram_in.diagonal(dim1=1, dim2=2).sum(dim=1) * gram_out.diagonal(dim1=1, dim2=2).sum(dim=1)
        return (gram_in * gram_out).sum(dim=(1, 2)).clamp_(min=0.0) + inputs.shape[1] * 2.0**-50 * sizes

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """One matrix product over all rows."""
        deltas = (self.deltas.double() * factors[:, None, None]).flatten(0, 1)
        return _added((deltas.mT @ self.inputs.double().flatten(0, 1)).flatten(), total)

    def in_order(self, flat: Tensor) -> Tensor:
        """Already in order."""
        return flat

    def instantiate(self) -> Tensor:
        """``[b, out * in]``."""
        return torch.bmm(self.deltas.mT, self.inputs).flatten(1)

    def without(self, rows: Tensor) -> "Factored":
        """Zero the factors of the marked examples."""
        marked = rows[:, None, None]
        return Factored(torch.where(marked, 0.0, self.inputs), torch.where(marked, 0.0, self.deltas))


@dataclass(frozen=True)
class Formed:
    """Gradients of a few examples in float64, ``[m, size]``, in memory that is used again."""

    wide: Tensor
    squares: Tensor
    deferred: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """Entries of one gradient."""
        return self.wide.shape[1]

    def of(self, some: slice) -> "Formed":
        """Some rows."""
        return Formed(self.wide[some], self.squares[some])

    def norms_squared(self) -> Tensor:
        """Known since they were formed."""
        return self.squares

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """A vector-matrix product in float64."""
        return factors @ self.wide if total is None else total.addmv_(self.wide.mT, factors)

    def in_order(self, flat: Tensor) -> Tensor:
        """Already in order."""
        return flat

    def instantiate(self) -> Tensor:
        """Return a copy in float32: exact, because that is what they were."""
        return self.wide.float()

    def without(self, rows: Tensor) -> "Formed":
        """Zero rows."""
        return Formed(torch.where(rows[:, None], 0.0, self.wide), torch.where(rows, 0.0, self.squares))


@dataclass(frozen=True)
class Kept:
    """Gradients of a few examples in float32, ``[m, size]``, in memory that is used again.

    Machine code computes their norms and sums in float64.
    """

    gradients: Tensor
    squares: Tensor
    code: SumCode
    deferred: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """Entries of one gradient."""
        return self.gradients.shape[1]

    def of(self, some: slice) -> "Kept":
        """Some rows."""
        return Kept(self.gradients[some], self.squares[some], self.code)

    def norms_squared(self) -> Tensor:
        """Known since they were formed."""
        return self.squares

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """One example after the other, in float64."""
        return self.code.add(self.gradients, factors, factors.new_zeros(self.size) if total is None else total)

    def in_order(self, flat: Tensor) -> Tensor:
        """Already in order."""
        return flat

    def instantiate(self) -> Tensor:
        """Return a copy."""
        return self.gradients.clone()

    def without(self, rows: Tensor) -> "Kept":
        """Zero rows."""
        return Kept(torch.where(rows[:, None], 0.0, self.gradients), torch.where(rows, 0.0, self.squares), self.code)


@dataclass(frozen=True)
class Deferred:
    """Large gradients, formed for a few examples at a time.

    All b of them at once would need b times the memory of the parameter and leave the cache between norm and sum.
    ``form(some, into)`` writes the gradients of some examples, flat. With `code` they stay in float32, and machine code
    computes norm and sum.
    """

    form: Callable[[range, Tensor], None]
    examples: int
    size: int
    allocate: "Allocate"
    excluded: Tensor | None = None
    code: SumCode | None = None
    deferred: ClassVar[bool] = True

    def of(self, some: slice) -> Formed | Kept:
        """Form the gradients of some examples: norm and sum read the same numbers."""
        examples = range(*some.indices(self.examples))
        formed = self._wide(examples) if self.code is None else self._kept(examples, self.code)
        return formed if self.excluded is None else formed.without(self.excluded[some])

    def _wide(self, examples: range) -> Formed:
        wide = self.allocate((len(examples), self.size), torch.float64)
        self.form(examples, wide)
        norms: Tensor = torch.linalg.vector_norm(wide, dim=1)
        return Formed(wide, norms.square())

    def _kept(self, examples: range, code: SumCode) -> Kept:
        kept, squares = self.allocate((len(examples), self.size), torch.float32), []
        for example, row in zip(examples, kept, strict=True):
            self.form(range(example, example + 1), row[None])
            squares.append(code.squares(row))  # while it is in the cache
        return Kept(kept, torch.tensor(squares, dtype=torch.float64), code)

    def _each(self) -> Iterator[Formed | Kept]:
        return (self.of(slice(example, example + 1)) for example in range(self.examples))

    def norms_squared(self) -> Tensor:
        """Form each gradient, and forget it."""
        return torch.cat([one.norms_squared() for one in self._each()])

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """Form each gradient, add it, and forget it."""
        total = factors.new_zeros(self.size) if total is None else total
        for factor, one in zip(factors.split(1), self._each(), strict=True):  # type: ignore[no-untyped-call]
            one.weighted_sum(factor, total)
        return total

    def in_order(self, flat: Tensor) -> Tensor:
        """Already in order."""
        return flat

    def instantiate(self) -> Tensor:
        """Form all of them: b times the memory of the parameter."""
        return torch.cat([one.instantiate() for one in self._each()])

    def without(self, rows: Tensor) -> "Deferred":
        """Zero the marked examples as soon as they are formed."""
        return replace(self, excluded=rows if self.excluded is None else self.excluded | rows)


@dataclass(frozen=True)
class ChannelsLast:
    """Gradients of a convolution's weight as ``shape``: out, kernel..., in. The parameter's order is out, in, kernel..."""

    part: Part
    shape: tuple[int, ...]

    @property
    def deferred(self) -> bool:
        """As the part."""
        return self.part.deferred

    @property
    def size(self) -> int:
        """Entries of one gradient."""
        return self.part.size

    def of(self, some: slice) -> "ChannelsLast":
        """Some examples."""
        return ChannelsLast(self.part.of(some), self.shape)

    def norms_squared(self) -> Tensor:
        """Order does not matter."""
        return self.part.norms_squared()

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """In the order of `shape`."""
        return self.part.weighted_sum(factors, total)

    def in_order(self, flat: Tensor) -> Tensor:
        """Move the channels."""
        return self.part.in_order(flat).view(self.shape).movedim(-1, 1).flatten()

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

    @property
    def deferred(self) -> bool:
        """Whether any part is."""
        return any(part.deferred for part in self.parts)

    @property
    def size(self) -> int:
        """Entries of one gradient."""
        return sum(part.size for part in self.parts)

    def of(self, some: slice) -> "Stacked":
        """Some examples of each part."""
        return Stacked([part.of(some) for part in self.parts])

    def norms_squared(self) -> Tensor:
        """Add the squares of the parts."""
        return torch.stack([part.norms_squared() for part in self.parts]).sum(dim=0)

    def weighted_sum(self, factors: Tensor, total: Tensor | None = None) -> Tensor:
        """Join the sums of the parts."""
        return _added(torch.cat([part.weighted_sum(factors) for part in self.parts]), total)

    def in_order(self, flat: Tensor) -> Tensor:
        """Order each part."""
        sums = torch.split(flat, [part.size for part in self.parts])
        return torch.cat([part.in_order(of_part) for part, of_part in zip(self.parts, sums, strict=True)])

    def instantiate(self) -> Tensor:
        """Join the gradients of the parts."""
        return torch.cat([part.instantiate() for part in self.parts], dim=1)

    def without(self, rows: Tensor) -> "Stacked":
        """Zero the marked examples."""
        return Stacked([part.without(rows) for part in self.parts])


def _added(found: Tensor, total: Tensor | None) -> Tensor:
    return found if total is None else total.add_(found)


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]  # memory that every step reuses


@dataclass(frozen=True)
class Arithmetic:
    """How large gradients are formed and summed on a CPU: which is faster depends on the processor.

    The results differ in rounding errors only, so a run keeps the one it began with.
    """

    blas: bool = False  # single products by PyTorch's own library instead of oneDNN
    code: SumCode | None = None

    @property
    def name(self) -> str:
        """Name what decides the bits, for checkpoints; empty for the arithmetic that needs no choice."""
        return " ".join([*["blas"] * self.blas, *([] if self.code is None else [f"sums-{self.code.fingerprint()}"])])

    def suits(self, like: Tensor) -> bool:
        """Return whether this is a matter of choice for such gradients."""
        return like.device.type == "cpu" and like.dtype == torch.float32


PLAIN = Arithmetic()


def arithmetics() -> list[Arithmetic]:
    """Return what this machine can choose from."""
    codes = [None] if sum_code() is None else [None, sum_code()]
    return [Arithmetic(blas, code) for code in codes for blas in (False, True)]


def factors_are_cheaper(summed: int, width_in: int, width_out: int) -> bool:
    """Compare the number of multiplications and float64 writes of the two forms."""
    instantiated = width_in * width_out * (summed + 8)
    factored = 2 * summed * (summed + 4) * (width_in + width_out) + 2 * summed * width_in * width_out
    return factored < instantiated


def product(inputs: Tensor, deltas: Tensor, allocate: Allocate, arithmetic: Arithmetic = PLAIN) -> Part:
    """Return deltas[i]^T inputs[i] in the cheapest form; `allocate` gives the memory for gradients with many entries."""
    summed, width_in, width_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    if factors_are_cheaper(summed, width_in, width_out):
        return Factored(inputs, deltas)
    if is_large(width_in * width_out):
        return deferred_product(lambda some: inputs[some.start : some.stop], deltas, width_in, allocate, arithmetic)
    return Instantiated(torch.bmm(deltas.mT, inputs).flatten(1))


def deferred_product(
    inputs: Callable[[range], Tensor], deltas: Tensor, width_in: int, allocate: Allocate, arithmetic: Arithmetic = PLAIN
) -> Deferred:
    """Return deltas[i]^T inputs[i], formed later. ``inputs(some)`` gives ``[m, s, width_in]``, in the same memory each time."""
    each, suits = deltas.mT.unbind(), arithmetic.suits(deltas)
    blas = suits and arithmetic.blas
    one_by_one = blas or _one_by_one(deltas)

    def form(some: range, into: Tensor) -> None:
        if not one_by_one:
            into.copy_(torch.bmm(deltas[some.start : some.stop].mT, inputs(some)).flatten(1))
            return
        for row, example in zip(into, some, strict=True):
            seen = inputs(range(example, example + 1))[0]
            if blas and into.dtype == deltas.dtype:
                torch.mm(each[example], seen, out=row.view(-1, width_in))
            else:
                row.copy_((each[example] @ seen if blas else _onednn_product(each[example], seen.mT)).view(-1))

    return Deferred(form, len(deltas), width_in * deltas.shape[2], allocate, code=arithmetic.code if suits else None)


def is_large(size: int) -> bool:
    """Return whether gradients with `size` entries are formed for a few examples at a time."""
    return size > WIDEST


def _one_by_one(like: Tensor) -> bool:
    """Return whether single products are faster than a batched one.

    PyTorch's matrix products use MKL, which runs at half speed on processors of other makers. oneDNN's do not, but there is
    no batched one.
    """
    return like.device.type == "cpu" and like.dtype == torch.float32 and _onednn_multiplies()


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
