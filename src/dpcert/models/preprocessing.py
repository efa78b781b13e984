"""Input layers of models that were pretrained on ImageNet: they take users' images in [0, 1] at their own resolution.

Noise is added to the user's pixels, before these layers, so a certified radius is in units of the user's image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError

_LARGEST_SIDE = 1024


class Resize(nn.Module):
    """Resize images to ``size x size`` pixels, bicubic; smoothed first where pixels are dropped.

    A linear map of each axis, as two products: the resizing of ONNX Runtime takes longer than all of EfficientNet-Lite0.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, input_shape: tuple[int, int, int], size: int) -> None:
        super().__init__()
        self.size = size
        shrinks = max(input_shape[1:]) > size
        self.register_buffer("rows", _resizing(input_shape[1], size, shrinks), persistent=False)
        self.register_buffer("columns", _resizing(input_shape[2], size, shrinks).mT.contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, channels, size, size]``."""
        return torch.matmul(torch.matmul(self.rows, x), self.columns)

    def extra_repr(self) -> str:
        """The size, for ``print(model)``."""
        return f"size={self.size}"


def _resizing(before: int, after: int, shrinks: bool) -> Tensor:
    """Return the matrix ``[after, before]`` that resizes one axis: what becomes of each single pixel."""
    pixels = torch.eye(before)[None, None]  # resized along one axis only
    resized = F.interpolate(pixels, size=(after, before), mode="bicubic", align_corners=False, antialias=shrinks)
    return resized[0, 0].contiguous()


def check_input(model: str, input_shape: tuple[int, int, int], input_size: int, multiple: int) -> None:
    """Raise `ModelError` unless images are RGB and `input_size` is a multiple that every layer of the model accepts."""
    if len(input_shape) != 3 or input_shape[0] != 3 or min(input_shape) < 1:
        raise ModelError(
            f"model {model!r} needs color images [3, height, width], got {list(input_shape)}; "
            "convert the images to RGB or use another model"
        )
    integer = isinstance(input_size, int) and not isinstance(input_size, bool)
    if not integer or not 0 < input_size <= _LARGEST_SIDE or input_size % multiple:
        raise ModelError(
            f"model.input_size is {input_size}, model {model!r} needs a multiple of {multiple} "
            f"in {multiple}..{_LARGEST_SIDE - _LARGEST_SIDE % multiple}"
        )
