"""The gradient norm of the loss at each input."""

from collections.abc import Callable

import torch
from torch import Tensor

Losses = Callable[[Tensor, Tensor], Tensor]  # inputs [b, ...], labels [b] -> the loss of each [b], of that example alone


def gradient_norm(losses: Losses, x: Tensor, labels: Tensor) -> Tensor:
    """Return the L2 norm of the gradient of each example's loss for its input; ``[b]``."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(losses(x, labels).sum(), x)
    norm: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return norm
