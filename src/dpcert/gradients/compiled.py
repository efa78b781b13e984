"""The engine for chains of known layers, in machine code (`chains`): one example at a time, in the cache of a core.

An example's gradient is computed from its own rows only. Its bits depend neither on the other examples nor on the size of a
part. Norms and the sum are float64, and the norm is that of the float32 numbers that are summed.
"""

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..chains.chain import Chain, compiled_chain
from ..row_proof import state_of
from .engine import ClippedSum, Clipping, Engine, LossOfOne, empty_sum, trainable
from .parts import Instantiated, Part

_AT_ONCE = 1 << 22  # numbers in the gradients that exist at a time


class Compiled:
    """The engine for one model. What the machine code was not made for is left to another engine."""

    def __init__(self, chain: Chain, model: nn.Module, input_shape: tuple[int, ...], other: Engine) -> None:
        self._chain, self._model, self._shape, self._other = chain, model, input_shape, other
        self._state, self._names = state_of(model), list(trainable(model))
        self._work, self._gradients = chain.work(0), torch.empty((0, chain.size))

    @property
    def fingerprint(self) -> str:
        """Equal on two machines if they compute the same bits."""
        return self._chain.fingerprint()

    def another(self, other: Engine) -> "Compiled":
        """Return an engine for another thread."""
        return Compiled(self._chain, self._model, self._shape, other)

    def __call__(self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor, clip: Clipping) -> ClippedSum:
        """The contract of `engine`."""
        if not self._fits(model, views):
            return self._other(model, loss, views, labels, clip)
        if len(views) == 0:
            return empty_sum(model, clip)
        norms, total = (torch.zeros(size, dtype=torch.float64) for size in (len(views), self._chain.size))
        weights = self._chain.pack(model)
        few = max(1, _AT_ONCE // self._chain.size)
        for some in (slice(start, start + few) for start in range(0, len(views), few)):
            gradients, norms[some] = self._of_some(loss, views[some], labels[some], weights)
            self._chain.add(gradients, clip.factors(norms)[some], total)  # each factor depends on its own norm only
        by_name = self._chain.in_order(total)
        return ClippedSum(torch.cat([by_name[name] for name in self._names]), clip.sensitivity, norms)

    def per_example(self, model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor) -> dict[str, Part]:
        """Return per-example gradients of every trained parameter, in the order of `trainable`."""
        gradients, _ = self._of_some(loss, views, labels, self._chain.pack(model))
        by_name = self._chain.in_order(gradients.clone())
        return {name: Instantiated(by_name[name]) for name in self._names}

    def _of_some(self, loss: LossOfOne, views: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients ``[b, size]``, valid until the next call, and their norms."""
        if len(self._work) < len(views) * views.shape[1]:
            self._work = self._chain.work(len(views) * views.shape[1])
        if len(self._gradients) < len(views):
            self._gradients = torch.empty((len(views), self._chain.size))
        gradients = self._gradients[: len(views)]
        with torch.enable_grad():
            logits = self._chain.forward(views.detach().flatten(0, 1), weights, self._work).view(*views.shape[:2], -1)
            logits.requires_grad_()
            (slopes,) = torch.autograd.grad(vmap(loss)(logits, labels).sum(), logits)
        return gradients, self._chain.backward(self._work, weights, slopes, gradients).sqrt_()

    def _fits(self, model: nn.Module, views: Tensor) -> bool:
        """Return whether the machine code was made for this model as it is, and for such views."""
        plain = views.dtype == torch.float32 and views.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        same = model is self._model and self._state == state_of(model) and self._names == list(trainable(model))
        return plain and same and tuple(views.shape[2:]) == self._shape


def compiled_engine(model: nn.Module, input_shape: tuple[int, ...], other: Engine) -> Compiled | None:
    """Return the engine for a model; None if there is no machine code for it here."""
    chain = compiled_chain(model, input_shape)
    return None if chain is None or not chain.size else Compiled(chain, model, input_shape, other)
