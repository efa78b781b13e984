"""StoBatch's first layer: a tied-weight auto-encoder with noise inside, as a model with noise after its first layer.

The hidden values are h = clip(A x + c + noise, -1, 1), and the reconstruction of x is A^T h. With the residual r = x - A^T h
the error is E = ||r||^2. Its derivative is dE = -2 <r, d(A^T h)> = -2 d<A r, h> with r held fixed. So the gradient of E is
that of -2 <A r, h>, which needs no transposed layer: the engines differentiate one more call of the same convolution.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..errors import ModelError
from ..tied import tied_residual
from .noisy import NoisyModel

fx.wrap("tied_residual")  # one operation in a trace: it keeps rows apart and has no derivative


class Reconstructing(nn.Module):
    """A `NoisyModel` as StoBatch trains it: logits, and one more column with the gradient of the reconstruction error.

    The error is the mean over the pixels of (x - A^T h)^2, where x is the (noisy) image of the row. The value of the column is
    -2 <A r, h> / d, which has the same gradient in all parameters. All parameters are those of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, NoisyModel) or type(model.first) is not nn.Conv2d:
            raise ModelError(
                f"{type(model).__name__} has no noisy first convolution to reconstruct images with; use model.system=stobatch"
            )
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        """``[n, classes + 1]``."""
        x, noise, zero = self.model.split(rows)
        z = self.model.linear(x, zero) + self.model.shift + noise
        column = self._slope(x, F.hardtanh(z), zero)
        return torch.cat([self.model.rest(z), column], dim=1)

    def _slope(self, x: Tensor, hidden: Tensor, zero: Tensor) -> Tensor:
        first, divisor = self.model.first, self.model.divisor(zero)
        residual = tied_residual(x, hidden, first.weight, divisor, list(first.stride), list(first.padding))
        product: Tensor = (self.model.linear(residual, zero) * hidden).flatten(1)
        return product.sum(1, keepdim=True) * (-2.0 / self.model.image_size)
