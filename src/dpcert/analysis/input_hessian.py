"""The curvature of the loss at each input: the spectral norm of its Hessian, by Lanczos, without forming the Hessian."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._validate import finite_in, integer_in

Losses = Callable[[Tensor, Tensor], Tensor]  # inputs [b, ...], labels [b] -> the loss of each [b], of that example alone
Product = Callable[[Tensor], Tensor]  # vectors [b, d] -> H v [b, d]

_STEPS_BETWEEN_LOOKS = 4
_FIRST_LOOK = 8
_NOTHING_LEFT = 1e-12  # a new direction shorter than this share of the largest so far is rounding error


@dataclass(frozen=True)
class Lanczos:
    """Stopping rule for an eigenvalue: ``||Hv - lambda v|| <= tolerance |lambda|``, or after `most_products` products."""

    tolerance: float = 1e-3
    most_products: int = 100

    def __post_init__(self) -> None:
        finite_in("hessian tolerance", self.tolerance, 1e-12, 0.5)
        integer_in("hessian products", self.most_products, 1, 10_000)


def spectral_norm(
    losses: Losses, x: Tensor, labels: Tensor, start: Tensor, how: Lanczos | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest |eigenvalue| of each example's input Hessian, and ``||Hv - lambda v|| / |lambda|``; ``[b]`` each.

    Lanczos with full reorthogonalization from `start` (any vectors, shaped like x). It separates both ends of the spectrum,
    so +lambda and -lambda may tie, where power iteration would not converge. Some eigenvalue is within residual * lambda of
    the result. It is the *largest* unless `start` is nearly orthogonal to its eigenvector: use a random `start`.

    Each example stops independently, so its results do not depend on its batch. If a product is not finite, both are NaN.
    Edge cases: a Hessian of zeros has norm 0 and residual 0.
    """
    how, most = how or Lanczos(), x[:1].numel()
    products = all_products = _hessian_products(losses, x, labels)
    active = torch.arange(len(x), device=x.device)  # the examples that `products` and `space` cover
    going = torch.ones_like(active, dtype=torch.bool)
    space = _Krylov(start.to(x).flatten(1), min(how.most_products, most))
    vectors, finite = torch.zeros_like(x).flatten(1), torch.ones_like(going)
    while bool(going.any()):
        image = products(space.newest)
        finite[active] &= image.isfinite().all(dim=1)
        space.extend(torch.where(finite[active, None], image, 0.0))
        if not space.is_full and (space.size < _FIRST_LOOK or space.size % _STEPS_BETWEEN_LOOKS):
            continue
        vector, converged = space.leading(how.tolerance)
        stop = going & (converged | space.is_full)
        vectors[active[stop]] = vector[stop]
        going = going & ~stop
        if 0 < 2 * int(going.sum()) <= len(active):  # the others need no more products
            active, space = active[going], space.only(going)
            products, going = _hessian_products(losses, x[active], labels[active]), going[going]
    return _rayleigh(all_products, vectors, finite)


def _hessian_products(losses: Losses, x: Tensor, labels: Tensor) -> Product:
    """Return a function for H v of each example. Each loss depends only on its input, so the gradient of the sum suffices."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(losses(x, labels).sum(), x, create_graph=True)

    def product(vectors: Tensor) -> Tensor:
        if not gradient.requires_grad:  # the loss is linear in its input
            return torch.zeros_like(vectors)
        seed = vectors.view_as(gradient)
        (image,) = torch.autograd.grad(gradient, x, seed, retain_graph=True, materialize_grads=True)
        return image.flatten(1)

    return product


class _Krylov:
    """Orthonormal bases of span(v, Hv, H^2 v, ...) of several examples, and the tridiagonal matrix of H in them."""

    def __init__(self, start: Tensor, most: int) -> None:
        self.most, self.size = most, 0
        self.basis = start.new_zeros((len(start), most + 1, start.shape[1]))
        self.basis[:, 0] = start / torch.linalg.vector_norm(start, dim=1, keepdim=True)
        self.diagonal, self.off_diagonal = start.new_zeros((len(start), most)), start.new_zeros((len(start), most))

    @property
    def newest(self) -> Tensor:
        """The vectors to multiply next."""
        return self.basis[:, self.size]

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of products is reached."""
        return self.size == self.most

    def only(self, chosen: Tensor) -> "_Krylov":
        """Return the bases of the chosen examples."""
        part = _Krylov.__new__(_Krylov)
        part.most, part.size, part.basis = self.most, self.size, self.basis[chosen]
        part.diagonal, part.off_diagonal = self.diagonal[chosen], self.off_diagonal[chosen]
        return part

    def extend(self, image: Tensor) -> None:
        """Add H times the newest vectors. Orthogonalizes twice: after one pass, rounding grows into copies of eigenvalues."""
        known = self.basis[:, : self.size + 1]
        self.diagonal[:, self.size] = (self.newest * image).sum(dim=1)
        for _ in range(2):
            image = image - torch.einsum("bkd,bk->bd", known, torch.einsum("bkd,bd->bk", known, image))
        length = torch.linalg.vector_norm(image, dim=1)
        scale = torch.maximum(self.diagonal.abs().amax(dim=1), self.off_diagonal.amax(dim=1))
        length = torch.where(length > _NOTHING_LEFT * scale, length, 0.0)  # 0: the space is invariant, the rest stays zero
        self.off_diagonal[:, self.size] = length
        self.basis[:, self.size + 1] = torch.where(length[:, None] > 0, image / length[:, None], 0.0)
        self.size += 1

    def leading(self, tolerance: float) -> tuple[Tensor, Tensor]:
        """Return the vectors with the largest |eigenvalue|, and whether these have converged.

        Convergence also requires that the other end of the spectrum cannot become the largest.
        """
        size = self.size
        inner = torch.diag_embed(self.diagonal[:, :size])
        inner += torch.diag_embed(self.off_diagonal[:, : size - 1], 1) + torch.diag_embed(self.off_diagonal[:, : size - 1], -1)
        values, weights = torch.linalg.eigh(inner)
        ends = values[:, [0, -1]].abs()  # the most negative and the most positive
        errors = self.off_diagonal[:, size - 1, None] * weights[:, -1, [0, -1]].abs()
        winner = ends.argmax(dim=1, keepdim=True)
        largest, error = ends.gather(1, winner)[:, 0], errors.gather(1, winner)[:, 0]
        rival = (ends + errors).gather(1, 1 - winner)[:, 0]
        chosen = torch.where(winner == 0, weights[:, :, 0], weights[:, :, -1])
        vector = torch.einsum("bkd,bk->bd", self.basis[:, :size], chosen)
        return vector, (error <= tolerance * largest) & (rival <= (1 + tolerance) * largest)


def _rayleigh(products: Product, vectors: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return |v'Hv| and the residual, from one more product: the result does not depend on the recurrence."""
    unit = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    image = products(unit)
    value = (unit * image).sum(dim=1)
    error = torch.linalg.vector_norm(image - value[:, None] * unit, dim=1)
    residual = torch.where(error == 0, 0.0, error / value.abs())
    nothing = torch.full_like(value, torch.nan)
    return torch.where(finite, value.abs(), nothing), torch.where(finite, residual, nothing)
