"""The residual of a tied-weight auto-encoder, as one operation without a derivative (see `models.autoencoder`)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def tied_residual(x: Tensor, hidden: Tensor, weight: Tensor, divisor: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Return ``x - A^T hidden`` as a constant. A is the convolution of images ``[n, C, H, W]`` with kernel weight / divisor."""
    with torch.no_grad():
        steps = zip(x.shape[-2:], hidden.shape[-2:], weight.shape[-2:], stride, padding, strict=True)
        missing = [size - ((places - 1) * s - 2 * p + k) for size, places, k, s, p in steps]  # what the stride left over
        back = F.conv_transpose2d(hidden.detach(), weight.detach(), None, stride, padding, missing)
        return x.detach() - back / divisor.detach()
