"""EfficientNet-Lite0 (Tan and Le 2019): a small ImageNet model of depthwise convolutions, without squeeze-and-excitation.

Parameter names of the trunk are those of the PyPI package ``efficientnet_lite_pytorch``. Its weights are converted by
``scripts/convert_efficientnet.py``. The last layer is called ``head`` here, ``_fc`` there.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .preprocessing import Resize, check_input
from .resnet import Normalize, Standardize

INPUT_SIZE = 96
_MULTIPLE = 32  # five layers of stride 2: every image that they see has an even number of rows, so padding is fixed
_PIXEL_MEAN, _PIXEL_SCALE = (127 / 255,), (128 / 255,)  # the package computes (255 x - 127) / 128
_BATCH_NORM_EPSILON = 1e-3


@dataclass(frozen=True)
class Stage:
    """`repeats` blocks; the first has the stride and changes the width."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    width: int


@dataclass(frozen=True)
class Architecture:
    """The sizes of an EfficientNet-Lite."""

    stem: int = 32
    stages: tuple[Stage, ...] = (
        Stage(1, 3, 1, 1, 16),
        Stage(2, 3, 2, 6, 24),
        Stage(2, 5, 2, 6, 40),
        Stage(3, 3, 2, 6, 80),
        Stage(3, 5, 1, 6, 112),
        Stage(4, 5, 2, 6, 192),
        Stage(1, 3, 1, 6, 320),
    )
    features: int = 1280


LITE0 = Architecture()


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=_BATCH_NORM_EPSILON, momentum=0.01)


def _pad_for_stride_2(kernel: int) -> nn.ZeroPad2d:
    """TensorFlow's "same" padding for stride 2 and an even number of rows and columns: one more on the right and below."""
    before, after = (kernel - 2) // 2, (kernel - 1) // 2
    return nn.ZeroPad2d((before, after, before, after))


class Block(nn.Module):
    """Inverted bottleneck: expand with 1 x 1, filter each channel, project with 1 x 1; a shortcut if the shape stays."""

    def __init__(self, width_in: int, width: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = expansion * width_in
        self.expands, self.has_shortcut = expansion > 1, stride == 1 and width_in == width
        if self.expands:
            self._expand_conv = nn.Conv2d(width_in, inner, 1, bias=False)
            self._bn0 = _norm(inner)
        self._pad = _pad_for_stride_2(kernel) if stride == 2 else nn.Identity()
        padding = 0 if stride == 2 else kernel // 2
        self._depthwise_conv = nn.Conv2d(inner, inner, kernel, stride, padding, groups=inner, bias=False)
        self._bn1 = _norm(inner)
        self._project_conv = nn.Conv2d(inner, width, 1, bias=False)
        self._bn2 = _norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, width, height / stride, width / stride]``."""
        inner = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        inner = F.relu6(self._bn1(self._depthwise_conv(self._pad(inner))))
        output: Tensor = self._bn2(self._project_conv(inner))
        return output + x if self.has_shortcut else output


def _blocks(width: int, stages: tuple[Stage, ...]) -> list[Block]:
    blocks = []
    for stage in stages:
        for repeat in range(stage.repeats):
            blocks.append(Block(width, stage.width, stage.kernel, stage.stride if repeat == 0 else 1, stage.expansion))
            width = stage.width
    return blocks


class EfficientNet(nn.Module):
    """EfficientNet-Lite for images in [0, 1] of any size: resize, normalize, trunk, fixed feature scaling, linear head.

    Built in evaluation mode: BatchNorm is a fixed affine map of each channel, and no example changes its statistics.
    """

    def __init__(
        self, input_shape: tuple[int, int, int], classes: int, input_size: int = INPUT_SIZE, architecture: Architecture = LITE0
    ) -> None:
        super().__init__()
        check_input("efficientnet-lite0", input_shape, input_size, _MULTIPLE)
        self.resize = Resize(input_shape, input_size)
        self.normalize = Normalize(3, _PIXEL_MEAN, _PIXEL_SCALE)
        self._pad = _pad_for_stride_2(3)
        self._conv_stem = nn.Conv2d(3, architecture.stem, 3, 2, bias=False)
        self._bn0 = _norm(architecture.stem)
        self._blocks = nn.Sequential(*_blocks(architecture.stem, architecture.stages))
        self._conv_head = nn.Conv2d(architecture.stages[-1].width, architecture.features, 1, bias=False)
        self._bn1 = _norm(architecture.features)
        self.standardize = Standardize(architecture.features)
        self.head = nn.Linear(architecture.features, classes)
        self.eval()

    def features(self, x: Tensor) -> Tensor:
        """The mean over positions of the last layer, ``[n, 1280]``."""
        x = self._pad(self.normalize(self.resize(x)))
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        x = F.relu6(self._bn1(self._conv_head(x)))
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images in [0, 1]."""
        logits: Tensor = self.head(self.standardize(self.features(x)))
        return logits


def efficientnet_lite0(input_shape: tuple[int, int, int], classes: int, input_size: int = INPUT_SIZE) -> EfficientNet:
    """EfficientNet-Lite0: 3.4 M parameters without the head."""
    return EfficientNet(input_shape, classes, input_size)
