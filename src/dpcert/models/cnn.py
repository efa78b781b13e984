"""The models of the paper's small data sets, and larger ones with settings that are off by default."""

import math

import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in, one_of
from ..errors import ModelError

MAX, AVERAGE = "max", "average"
Pool = type[nn.MaxPool2d] | type[nn.AvgPool2d]
POOLS: dict[str, Pool] = {MAX: nn.MaxPool2d, AVERAGE: nn.AvgPool2d}
NO_NORM, GROUP_NORM, PLAIN_NORM = "none", "group", "plain"
NORMS = (NO_NORM, GROUP_NORM, PLAIN_NORM)  # plain: GroupNorm without parameters
_WIDEST, _CHANNELS_PER_GROUP = 16, 4
_LARGEST_BLUR, _LARGEST_SCALE = 8.0, 1e3  # blur in pixels
Shape = tuple[int, int, int]


def cnn(
    input_shape: Shape = (1, 28, 28),
    classes: int = 10,
    *,
    width: int = 1,
    pool: str = MAX,
    norm: str = NO_NORM,
    blur: float | None = None,
    input_scale: float | None = None,
) -> nn.Sequential:
    """The four-layer CNN of Tramer and Boneh (2021): 26,010 parameters on 28 x 28 grayscale images.

    Pooling comes before tanh: tanh is monotone, so max(tanh(a), tanh(b)) = tanh(max(a, b)) bit for bit, with fewer operations.
    `width` multiplies the channels of every hidden layer. For the other settings see `lenet`.
    """
    pooling = _pool(pool)
    first, second = 16 * _width(width), 32 * width
    features = nn.Sequential(
        *_front(input_shape[0], blur, input_scale),
        nn.Conv2d(input_shape[0], first, kernel_size=8, stride=2, padding=2),
        *_norm(norm, first),
        pooling(kernel_size=2, stride=1),
        nn.Tanh(),
        nn.Conv2d(first, second, kernel_size=4, stride=2),
        *_norm(norm, second),
        pooling(kernel_size=2, stride=1),
        nn.Tanh(),
        nn.Flatten(),
    )
    hidden = 32 * width
    return nn.Sequential(
        *features, nn.Linear(_size(features, input_shape, "cnn"), hidden), nn.Tanh(), nn.Linear(hidden, classes)
    )


def lenet(
    input_shape: Shape = (1, 28, 28),
    classes: int = 10,
    *,
    width: int = 1,
    pool: str = MAX,
    norm: str = GROUP_NORM,
    blur: float | None = None,
    input_scale: float | None = None,
) -> nn.Sequential:
    """LeNet with 20 and 50 channels and 500 hidden units, with GroupNorm: 431,220 parameters on 28 x 28 grayscale images.

    Settings: `pool` is max or average; `norm` is group, plain (without parameters) or none. `blur` is a fixed Gaussian low-pass
    filter with this standard deviation in pixels before the first layer, `input_scale` multiplies its output by a constant.
    Neither is trained. GroupNorm uses one example at a time.
    """
    pooling = _pool(pool)
    first, second, hidden = 20 * _width(width), 50 * width, 500 * width
    features = nn.Sequential(
        *_front(input_shape[0], blur, input_scale),
        nn.Conv2d(input_shape[0], first, kernel_size=5),
        *_norm(norm, first),
        nn.ReLU(),
        pooling(kernel_size=2, stride=2),
        nn.Conv2d(first, second, kernel_size=5),
        *_norm(norm, second),
        nn.ReLU(),
        pooling(kernel_size=2, stride=2),
        nn.Flatten(),
    )
    return nn.Sequential(
        *features, nn.Linear(_size(features, input_shape, "lenet"), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def linear(input_shape: Shape = (1, 28, 28), classes: int = 10) -> nn.Sequential:
    """Softmax regression: the smallest model, for tests and small images."""
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))


def _width(width: int) -> int:
    return integer_in("model.width", width, 1, _WIDEST, error=ModelError)


def _pool(pool: str) -> Pool:
    return POOLS[one_of("model.pool", pool, POOLS, error=ModelError)]


def _norm(norm: str, channels: int) -> list[nn.Module]:
    """GroupNorm over groups of about four channels of one example."""
    if one_of("model.norm", norm, NORMS, error=ModelError) == NO_NORM:
        return []
    groups = max(count for count in range(1, channels // _CHANNELS_PER_GROUP + 1) if channels % count == 0)
    return [nn.GroupNorm(groups, channels, affine=norm == GROUP_NORM)]


def _front(channels: int, blur: float | None, scale: float | None) -> list[nn.Module]:
    """A fixed filter before the first layer, the same for every channel; nothing if there is neither `blur` nor `scale`."""
    if blur is None and scale is None:
        return []
    if scale is not None:
        finite_in("model.input_scale", scale, 0.0, _LARGEST_SCALE, open_low=True, error=ModelError)
    kernel = (1.0 if scale is None else scale) * _gaussian(blur)
    size = kernel.shape[0]
    layer = nn.Conv2d(channels, channels, size, padding=size // 2, groups=channels, bias=False)
    layer.weight = nn.Parameter(kernel.expand(channels, 1, size, size).clone(), requires_grad=False)
    return [layer]


def _gaussian(blur: float | None) -> Tensor:
    """A square kernel that sums to 1, out to three standard deviations."""
    if blur is None:
        return torch.ones(1, 1)
    finite_in("model.blur", blur, 0.0, _LARGEST_BLUR, open_low=True, error=ModelError, remedy="it is in pixels")
    places = torch.arange(-math.ceil(3 * blur), math.ceil(3 * blur) + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (places / blur) ** 2)
    kernel = torch.outer(weights, weights)
    return (kernel / kernel.sum()).float()


def _size(features: nn.Sequential, input_shape: Shape, name: str) -> int:
    """The number of features that the convolutions give."""
    channels, height, width = input_shape
    try:
        with torch.no_grad():
            return int(features(torch.zeros(1, channels, height, width)).shape[1])
    except RuntimeError as error:
        raise ModelError(
            f"model {name!r} needs images of at least 16 x 16 pixels, got {height} x {width}; "
            "use --set model.name=linear or a custom model (--model)"
        ) from error
