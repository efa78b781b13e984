"""The reference engine: ``torch.func`` computes the gradient of one example's loss and maps it over the batch.

Works for any model that `models.check` accepts. Faster engines are compared with it.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ..outputs import explaining_vmap
from .engine import ClippedSum, Clipping, LossOfOne, clip_and_sum, empty_sum, trainable


def per_example_gradients(model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the gradient of each example's loss, ``[b, *shape]`` for each trained parameter."""
    weights = {name: parameter.detach() for name, parameter in trainable(model).items()}

    def loss_of_one(weights: dict[str, Tensor], views_of_one: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, weights, (views_of_one,)), label)

    with explaining_vmap():
        gradients = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(weights, views, labels)
    return cast(dict[str, Tensor], gradients)


def clipped_sum(model: nn.Module, loss: LossOfOne, views: Tensor, labels: Tensor, clip: Clipping) -> ClippedSum:
    """The contract of `engine`, by `per_example_gradients`."""
    if len(views) == 0:
        return empty_sum(model, clip)
    with torch.no_grad():
        return clip_and_sum(per_example_gradients(model, loss, views, labels).values(), clip)
