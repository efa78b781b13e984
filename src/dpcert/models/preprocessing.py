"""Input layers of models that were pretrained on ImageNet: they take users' images in [0, 1] at their own resolution.

Noise is added to the user's pixels, before these layers, so a certified radius is in units of the user's image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError

_LARGEST_SIDE = 1024


class Resize(nn.Module):
    """Resize images to ``size x size`` pixels, bicubic; smoothed first where pixels are dropped."""

    def __init__(self, input_shape: tuple[int, int, int], size: int) -> None:
        super().__init__()
        self.size = size
        self.shrinks = max(input_shape[1:]) > size

    def forward(self, x: Tensor) -> Tensor:
        """``[n, channels, size, size]``."""
        if (
            torch.onnx.is_in_onnx_export()
        ):  # the same linear map: the Resize of ONNX Runtime takes longer than EfficientNet-Lite0
            return self._weights(x.shape[2]) @ x @ self._weights(x.shape[3]).mT
        return F.interpolate(x, size=(self.size, self.size), mode="bicubic", align_corners=False, antialias=self.shrinks)

    def _weights(self, before: int) -> Tensor:
        """Return the matrix that resizes one axis, as a constant of the graph."""
        pixels = torch.eye(int(before)).view(1, int(before), int(before), 1)
        resized = F.interpolate(pixels, size=(self.size, 1), mode="bicubic", align_corners=False, antialias=self.shrinks)
        return torch.tensor(resized[0, :, :, 0].mT.tolist())

    def extra_repr(self) -> str:
        """The size, for ``print(model)``."""
        return f"size={self.size}"


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
