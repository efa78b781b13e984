"""The curvature of the loss at each input: the spectral norm of its Hessian, by Lanczos, never the Hessian itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._validate import finite_in, integer_in

Losses = Callable[[Tensor, Tensor], Tensor]  # inputs [b, ...], labels [b] -> the loss of each [b], of that example alone
Product = Callable[[Tensor], Tensor]  # vectors [b, d] -> H v [b, d]

_STEPS_BETWEEN_LOOKS = 4
_FIRST_LOOK = 8
_NOTHING_LEFT = 1e-12  # a new direction shorter than this share of the largest so far is rounding


@dataclass(frozen=True)
class Lanczos:
    """When an eigenvalue is good enough: ``||Hv - lambda v|| <= tolerance |lambda|``, or after `most_products` products."""

    tolerance: float = 1e-3
    most_products: int = 100

    def __post_init__(self) -> None:
        finite_in("hessian tolerance", self.tolerance, 1e-12, 0.5)
        integer_in("hessian products", self.most_products, 1, 10_000)


def spectral_norm(
    losses: Losses, x: Tensor, labels: Tensor, start: Tensor, how: Lanczos | None = None
) -> tuple[Tensor, Tensor]:
    """Largest |eigenvalue| of each example's input Hessian, and the residual ``||Hv - lambda v|| / |lambda|``; ``[b]`` each.

    Lanczos with full reorthogonalisation from `start` (any vectors, shaped like x). It keeps both ends of the spectrum
    apart, so +lambda and -lambda may tie, where power iteration would turn for ever. Some eigenvalue is within residual *
    lambda of the answer. It is the *largest* unless `start` has next to no share in its eigenvector: take it at random.

    Each example stops by its own rule, so its figures do not depend on its batch. Where a product is not finite both are NaN.
    Edge cases: a Hessian of zeros has norm 0 and residual 0.
    """
    how, most = how or Lanczos(), x[:1].numel()
    products = whole = _hessian_products(losses, x, labels)
    held = torch.arange(len(x), device=x.device)  # which examples `products` and `space` are about
    going = torch.ones_like(held, dtype=torch.bool)
    space = _Krylov(start.to(x).flatten(1), min(how.most_products, most))
    vectors, finite = torch.zeros_like(x).flatten(1), torch.ones_like(going)
    while bool(going.any()):
        image = products(space.newest)
        finite[held] &= image.isfinite().all(dim=1)
        space.extend(torch.where(finite[held, None], image, 0.0))
        if not space.is_full and (space.size < _FIRST_LOOK or space.size % _STEPS_BETWEEN_LOOKS):
            continue
        vector, converged = space.leading(how.tolerance)
        stop = going & (converged | space.is_full)
        vectors[held[stop]] = vector[stop]
        going = going & ~stop
        if 0 < 2 * int(going.sum()) <= len(held):  # the others need no more products
            held, space = held[going], space.only(going)
            products, going = _hessian_products(losses, x[held], labels[held]), going[going]
    return _rayleigh(whole, vectors, finite)


def _hessian_products(losses: Losses, x: Tensor, labels: Tensor) -> Product:
    """H v for each example. The loss of one depends on its own input only, so the gradient of the sum will do."""
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
    """Orthonormal bases of span(v, Hv, H^2 v, ...) of several examples, and H within them: tridiagonal."""

    def __init__(self, start: Tensor, most: int) -> None:
        self.most, self.size = most, 0
        self.basis = start.new_zeros((len(start), most + 1, start.shape[1]))
        self.basis[:, 0] = start / torch.linalg.vector_norm(start, dim=1, keepdim=True)
        self.diagonal, self.beside = start.new_zeros((len(start), most)), start.new_zeros((len(start), most))

    @property
    def newest(self) -> Tensor:
        """The vectors to multiply next."""
        return self.basis[:, self.size]

    @property
    def is_full(self) -> bool:
        """Whether no more products may be taken."""
        return self.size == self.most

    def only(self, chosen: Tensor) -> "_Krylov":
        """The same for some of the examples."""
        part = _Krylov.__new__(_Krylov)
        part.most, part.size, part.basis = self.most, self.size, self.basis[chosen]
        part.diagonal, part.beside = self.diagonal[chosen], self.beside[chosen]
        return part

    def extend(self, image: Tensor) -> None:
        """Take H times the newest vectors. Twice orthogonalised: once leaves rounding that grows into copies of eigenvalues."""
        known = self.basis[:, : self.size + 1]
        self.diagonal[:, self.size] = (self.newest * image).sum(dim=1)
        for _ in range(2):
            image = image - torch.einsum("bkd,bk->bd", known, torch.einsum("bkd,bd->bk", known, image))
        length = torch.linalg.vector_norm(image, dim=1)
        scale = torch.maximum(self.diagonal.abs().amax(dim=1), self.beside.amax(dim=1))
        length = torch.where(length > _NOTHING_LEFT * scale, length, 0.0)  # 0: nothing is left outside, the rest stays zeros
        self.beside[:, self.size] = length
        self.basis[:, self.size + 1] = torch.where(length[:, None] > 0, image / length[:, None], 0.0)
        self.size += 1

    def leading(self, tolerance: float) -> tuple[Tensor, Tensor]:
        """The vectors whose eigenvalues are largest in size, and whether these are good enough.

        Good enough is also asked of the other end of the spectrum: it must not be able to overtake.
        """
        size = self.size
        inner = torch.diag_embed(self.diagonal[:, :size])
        inner += torch.diag_embed(self.beside[:, : size - 1], 1) + torch.diag_embed(self.beside[:, : size - 1], -1)
        values, weights = torch.linalg.eigh(inner)
        ends = values[:, [0, -1]].abs()  # the most negative and the most positive
        errors = self.beside[:, size - 1, None] * weights[:, -1, [0, -1]].abs()
        winner = ends.argmax(dim=1, keepdim=True)
        largest, error = ends.gather(1, winner)[:, 0], errors.gather(1, winner)[:, 0]
        rival = (ends + errors).gather(1, 1 - winner)[:, 0]
        chosen = torch.where(winner == 0, weights[:, :, 0], weights[:, :, -1])
        vector = torch.einsum("bkd,bk->bd", self.basis[:, :size], chosen)
        return vector, (error <= tolerance * largest) & (rival <= (1 + tolerance) * largest)


def _rayleigh(products: Product, vectors: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """|v'Hv| and the residual, by one more product: what is reported does not rest on the recurrence."""
    unit = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    image = products(unit)
    value = (unit * image).sum(dim=1)
    error = torch.linalg.vector_norm(image - value[:, None] * unit, dim=1)
    residual = torch.where(error == 0, 0.0, error / value.abs())
    nothing = torch.full_like(value, torch.nan)
    return torch.where(finite, value.abs(), nothing), torch.where(finite, residual, nothing)
