"""Per-example gradients of one layer's parameters, in the cheaper of two forms.

Both forms compute the norms and the weighted sum in float64 from the same float32 values, so that the norm used for
clipping is the norm of what is summed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


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

    @cached_property
    def _wide(self) -> Tensor:
        return self.gradients.double()

    def norms_squared(self) -> Tensor:
        """Row sums of squares."""
        norms: Tensor = torch.linalg.vector_norm(self._wide, dim=1)
        return norms.square()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """A vector-matrix product in float64: float32 sums would move by more than the clip margin."""
        return factors @ self._wide

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
class Reordered:
    """Gradients in another order than the parameter's: entry k of the parameter is entry ``order[k]`` of `part`."""

    part: Part
    order: Tensor

    def norms_squared(self) -> Tensor:
        """Order does not matter."""
        return self.part.norms_squared()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum in the parameter's order."""
        return self.part.weighted_sum(factors)[self.order]

    def instantiate(self) -> Tensor:
        """Return the gradients in the parameter's order."""
        return self.part.instantiate()[:, self.order]

    def without(self, rows: Tensor) -> "Reordered":
        """Zero the marked examples."""
        return Reordered(self.part.without(rows), self.order)


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


def product(inputs: Tensor, deltas: Tensor) -> Part:
    """Return the cheaper form of deltas[i]^T inputs[i], by the number of multiplications and float64 writes."""
    summed, width_in, width_out = inputs.shape[1], inputs.shape[2], deltas.shape[2]
    instantiated = width_in * width_out * (summed + 8)
    factored = 2 * summed * (summed + 4) * (width_in + width_out) + 2 * summed * width_in * width_out
    return Factored(inputs, deltas) if factored < instantiated else Instantiated(torch.bmm(deltas.mT, inputs).flatten(1))


def total(parts: list[Part]) -> Part:
    """Return the gradient of a parameter that is used several times in one forward pass."""
    if len(parts) == 1:
        return parts[0]
    summed = parts[0].instantiate()
    for part in parts[1:]:
        summed = summed + part.instantiate()
    return Instantiated(summed)
