"""The three per-sample metrics of the paper, for a batch of test images."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..input_gradients import for_input_gradients
from ..rng import Purpose, bulk_normal, uniform_words
from .input_gradient import gradient_norm
from .input_hessian import Lanczos, spectral_norm
from .layers import feature_layer, features_of
from .lipschitz import BallSearch, local_lipschitz

_CURVATURE, _FEATURES = 0, 1  # parts of an example's random stream
_SOFTPLUS_IS_LINEAR_AFTER = 40.0


@dataclass(frozen=True)
class Metrics:
    """Per example: the base model's class, and the metrics of the true label's loss."""

    predict: Tensor
    gradient_norm: Tensor
    hessian_norm: Tensor
    hessian_residual: Tensor
    lipschitz: Tensor

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The values in the order of the fields."""
        return self.predict, self.gradient_norm, self.hessian_norm, self.hessian_residual, self.lipschitz


class Analyst:
    """Measures examples on a frozen copy of a model.

    Uses float64 if the device supports it: confident examples have gradients of 1e-9, and results must not depend on the
    batch. The random numbers of an example are a function of (key, index).
    """

    def __init__(
        self, model: nn.Module, example: Tensor, key: bytes, layer: str | None, lanczos: Lanczos, search: BallSearch
    ) -> None:
        device = next(model.parameters()).device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.device, self.key, self.lanczos, self.search = device, key, lanczos, search
        self.model = for_input_gradients(model).eval().to(self.dtype)
        self.layer = feature_layer(self.model, self._put(example), layer)
        self.features = features_of(for_input_gradients(model).eval().to(self.dtype), self.layer)

    def __call__(self, x: Tensor, labels: Tensor, indices: Sequence[int]) -> Metrics:
        """Measure ``x [b, ...]``, whose indices in the test set are `indices`."""
        x, labels = self._put(x), labels.to(self.device)

        def losses(inputs: Tensor, labels: Tensor) -> Tensor:
            return losses_of_labels(self.model(inputs), labels)

        with torch.no_grad():
            predicted = self.model(x).argmax(dim=1)
        norm, residual = spectral_norm(losses, x, labels, self._starts(x, indices, normal=True), self.lanczos)
        lipschitz = local_lipschitz(self.features, x, self._starts(x, indices, normal=False), self.search)
        metrics = (predicted, gradient_norm(losses, x, labels), norm, residual, lipschitz)
        return Metrics(*(values.cpu() for values in metrics))

    def _put(self, x: Tensor) -> Tensor:
        return x.to(device=self.device, dtype=self.dtype)

    def _starts(self, x: Tensor, indices: Sequence[int], *, normal: bool) -> Tensor:
        """Draw a random vector for each example: normal for Lanczos, uniform in [-1, 1] for the ball."""
        shape, cpu = tuple(x.shape[1:]), torch.device("cpu")
        if normal:
            drawn = [bulk_normal(self.key, Purpose.ANALYSIS, shape, cpu, index, _CURVATURE) for index in indices]
        else:
            words = [uniform_words(self.key, Purpose.ANALYSIS, x[0].numel(), index, _FEATURES) for index in indices]
            drawn = [torch.from_numpy(row * 2.0**-63 - 1.0).view(shape) for row in words]
        return self._put(torch.stack(drawn))


def losses_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each example, ``log(1 + sum_{c != y} exp(z_c - z_y))``, accurate even if it is tiny.

    The usual form has a gradient of p_y - 1, which is only rounding error if the model is certain of an example.
    """
    is_label = F.one_hot(labels, logits.shape[1]).bool()
    label_logits = torch.where(is_label, logits, 0.0).sum(dim=1)
    others = torch.logsumexp(torch.where(is_label, -torch.inf, logits), dim=1)
    return F.softplus(others - label_logits, threshold=_SOFTPLUS_IS_LINEAR_AFTER)
