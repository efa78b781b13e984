"""How many rows to hold in memory at once, from the model and the shape of its input alone; and how memory is reused."""

import contextlib
import copy
import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from .engine import trainable

_MOST_ROWS = 480
_GRADIENT_BYTES, _ACTIVATION_BYTES = 640 << 20, 512 << 20
_BYTES_PER_NUMBER = 4
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's `mallopt`


def keep_freed_memory() -> None:
    """Ask the C library to keep freed memory for the next step, instead of returning it to the system after each one.

    The activations of a step are the size of those of the step before. Mapping their pages again took a fifth of the forward
    and backward pass of a residual network. Does nothing where the C library is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
        library.mallopt(_MMAP_THRESHOLD, 1 << 30)


def default_physical_batch(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the number of rows (examples x views) that the engines take at once, at least 1.

    Per-example gradients and activations stay within fixed numbers of bytes, with one view per example as the worst case. The
    result does not depend on the machine, so a run gives the same bits wherever it is resumed.
    """
    gradients = _BYTES_PER_NUMBER * sum(parameter.numel() for parameter in trainable(model).values())
    activations = _BYTES_PER_NUMBER * _activations(model, input_shape)
    rows = min(_GRADIENT_BYTES // max(1, gradients), _ACTIVATION_BYTES // max(1, activations))
    return max(1, min(_MOST_ROWS, rows))


def _activations(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return how many numbers the layers output for one row; 0 if the model cannot be copied or run (others report that)."""
    counted = 0

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal counted
        counted += output.numel() if isinstance(output, Tensor) else 0

    try:
        probed = copy.deepcopy(model)
        for layer in probed.modules():
            if next(layer.children(), None) is None:
                layer.register_forward_hook(count)
        device = next((parameter.device for parameter in probed.parameters()), torch.device("cpu"))
        with torch.no_grad():
            probed(torch.zeros((1, *input_shape), device=device))
    except Exception:
        return 0
    return counted
