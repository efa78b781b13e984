"""Norms, factors and the clipped sum of one call of an engine, from the per-example gradients of one piece after another."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .engine import ClippedSum, Clipping, may_be_unusable
from .parts import Part

_AT_ONCE = 1 << 24  # entries of large gradients in memory at the same time (128 MB in float64), if one example has fewer

Parts = dict[str, Part]


class Sums:
    """Adds up clipped gradients. A factor needs the gradients of all parameters, and the sum needs the factor.

    Large gradients are therefore formed for a few examples at a time: for all parameters, then norm and sum. b of them never
    exist together.
    """

    def __init__(self, sizes: dict[str, int], examples: int, clip: Clipping, device: torch.device) -> None:
        self._clip, self._few = clip, max(1, _AT_ONCE // max(1, sum(sizes.values())))
        self._norms = torch.zeros(examples, dtype=torch.float64, device=device)
        self._value = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)
        self._places = dict(zip(sizes, torch.split(self._value, list(sizes.values())), strict=True))

    @property
    def result(self) -> ClippedSum:
        """The sum over all pieces so far."""
        return ClippedSum(self._value, self._clip.sensitivity, self._norms)

    def add(self, some: slice, parts: Parts) -> None:
        """Add the examples at `some`, with the gradients of every parameter."""
        late = {name: part for name, part in parts.items() if part.deferred}
        ready = {name: part for name, part in parts.items() if not part.deferred}
        squares = self._stored_squares([part.norms_squared() for part in ready.values()], some)
        sums: dict[str, Tensor] = {}
        for few, here in self._groups(some) if late else ():
            formed = {name: part.of(few) for name, part in late.items()}
            self._set_norms(here, squares[few], [part.norms_squared() for part in formed.values()])
            self._weigh(formed, here, sums)
        self._weigh(ready, some, sums)
        self._collect(parts, sums)

    def add_in_two_passes(self, some: slice, backward: Callable[[], Iterable[Parts]], order: list[str]) -> None:
        """Add the examples at `some`; `backward` gives the gradients of some parameters after the other, each time the same.

        The first pass computes norms and forgets the gradients, the second one computes the sum. Every operation is the one
        of `add`, on the same numbers: the result has the same bits.
        """
        ready: dict[str, Tensor] = {}
        late: dict[str, list[Tensor]] = {}
        for parts in backward():
            for name, part in parts.items():
                if part.deferred:
                    late[name] = [part.of(few).norms_squared() for few, _ in self._groups(some)]
                else:
                    ready[name] = part.norms_squared()
        squares = self._stored_squares([ready[name] for name in order if name in ready], some)
        for group, (few, here) in enumerate(self._groups(some) if late else ()):
            self._set_norms(here, squares[few], [late[name][group] for name in order if name in late])
        for parts in backward():
            sums: dict[str, Tensor] = {}
            for name, part in parts.items():
                if not part.deferred:
                    self._weigh({name: part}, some, sums)
                    continue
                for few, here in self._groups(some):
                    self._weigh({name: part.of(few)}, here, sums)
            self._collect(parts, sums)

    def _groups(self, some: slice) -> Iterator[tuple[slice, slice]]:
        """Yield the examples to form at a time: their place in the piece, and among all examples."""
        for few in pieces(some.stop - some.start, self._few):
            yield few, slice(some.start + few.start, some.start + few.stop)

    def _stored_squares(self, squares: list[Tensor], some: slice) -> Tensor:
        """Return the squared norms over the parameters whose gradients are stored; they are the norms if no others follow."""
        found = torch.stack(squares or [torch.zeros_like(self._norms[some])]).sum(dim=0)
        self._norms[some] = found.sqrt()
        return found

    def _set_norms(self, here: slice, stored: Tensor, formed: list[Tensor]) -> None:
        self._norms[here] = torch.stack([stored, *formed]).sum(dim=0).sqrt_()

    def _weigh(self, parts: Parts, here: slice, sums: dict[str, Tensor]) -> None:
        factors = self._clip.factors(self._norms)[here]  # each factor depends on its own norm only
        if may_be_unusable(self._norms[here]):  # 0 * inf is nan: set such gradients to 0, a factor of 0 is not enough
            unusable = ~torch.isfinite(self._norms[here])
            parts = {name: part.without(unusable) for name, part in parts.items()}
        for name, part in parts.items():
            sums[name] = part.weighted_sum(factors, sums.get(name))

    def _collect(self, parts: Parts, sums: dict[str, Tensor]) -> None:
        for name, total in sums.items():
            self._places[name] += parts[name].in_order(total)


def pieces(count: int, size: int) -> list[slice]:
    """Split 0..count into slices of `size`; the last one may be shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
