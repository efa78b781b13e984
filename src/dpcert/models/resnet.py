"""A small residual network for 32 x 32 color images: the backbone that `dpcert pretrain` trains on public images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError

_SMALLEST_SIDE = 8


class Normalize(nn.Module):
    """Scale pixels in [0, 1] to about zero mean and unit variance. A model layer, so noise is added in [0, 1] pixel units."""

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int, mean: tuple[float, ...] = (0.5,), scale: tuple[float, ...] = (0.25,)) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).expand(channels).reshape(channels, 1, 1).clone())
        self.register_buffer("scale", torch.tensor(scale).expand(channels).reshape(channels, 1, 1).clone())

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / scale."""
        return (x - self.mean) / self.scale


class Standardize(nn.Module):
    """Scale features to zero mean and unit variance with statistics of *public* images, fixed after pretraining."""

    mean: Tensor
    scale: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """(x - mean) / scale."""
        return (x - self.mean) / self.scale


class Block(nn.Module):
    """Two 3 x 3 convolutions with a shortcut around them (He et al. 2016)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        same = stride == 1 and width_in == width
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """relu(x + f(x))."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """A 4 x 4 stem of stride 2, three stages of two blocks, the mean over positions, fixed feature scaling, a linear head.

    `stages` are those whose means the head sees, in increasing order: (2, 3) is 6 instead of 4 times the width.

    BatchNorm statistics are computed in pretraining only: private training uses the model in evaluation mode, where
    BatchNorm is a fixed affine map of each channel.
    """

    def __init__(self, input_shape: tuple[int, int, int], classes: int, width: int, stages: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        channels, height, side = input_shape
        if min(height, side) < _SMALLEST_SIDE:
            raise ModelError(
                f"model 'resnet' needs images of at least {_SMALLEST_SIDE} x {_SMALLEST_SIDE} pixels, got {height} x {side}; "
                "resize them"
            )
        self.normalize = Normalize(channels)
        self.stem = nn.Conv2d(channels, width, 4, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.stage1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.stage2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.stage3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.stages = stages
        count = sum(width * 2 ** (stage - 1) for stage in stages)
        self.standardize = Standardize(count)
        self.head = nn.Linear(count, classes)

    def features(self, x: Tensor) -> Tensor:
        """The means over positions of the chosen stages, by default the last one: ``[n, 4 * width]``."""
        first = self.stage1(F.relu(self.stem_norm(self.stem(self.normalize(x)))))
        second = self.stage2(first)
        outputs = {1: first, 2: second, 3: self.stage3(second)}
        means = [outputs[stage].mean(dim=(2, 3)) for stage in self.stages]
        return means[0] if len(means) == 1 else torch.cat(means, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images in [0, 1]."""
        logits: Tensor = self.head(self.standardize(self.features(x)))
        return logits


WIDTHS = {"resnet-32": 32, "resnet-48": 48}
STAGES = {"1": 1, "2": 2, "3": 3}


def resnet(name: str, input_shape: tuple[int, int, int], classes: int, stages: str = "3") -> ResNet:
    """A backbone by name. Its number is the width of the first stage; the next stages are two and four times as wide."""
    # only pretraining computes new statistics
    return ResNet(input_shape, classes, WIDTHS[name], stages_of(stages)).eval()


def stages_of(text: str) -> tuple[int, ...]:
    """The stages of ``model.stages``: ``"2,3"`` is (2, 3)."""
    found = tuple(STAGES.get(word.strip(), 0) for word in text.split(","))
    if found != tuple(sorted(set(found))) or 0 in found or 3 not in found:
        raise ModelError(f"model.stages is {text!r}, must be 3, 2,3 or 1,2,3: stages in increasing order, with the last one")
    return found
