"""What machine code is given: addresses of tensors, and fixed numbers to compare its bits by."""

import ctypes

import torch
from torch import Tensor


def digits(*shape: int) -> Tensor:
    """Return numbers in [-0.5, 0.5), by operations that every processor rounds alike."""
    integers = torch.arange(torch.Size(shape).numel()) * 40503 % 65536
    return (integers.double() / 65536 - 0.5).float().view(shape)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return the address of the numbers, or a null pointer."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
