"""Losses of ONE example: logits ``[R, classes]`` of its R views, and its label.

No function here has a batch axis, so none can join two examples.
"""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Mean over the views of the cross-entropy: ``1/(K+1) sum_j L(theta; x^j, y)`` of Algorithm 2."""
    return F.cross_entropy(logits, label.expand(logits.shape[0]))
