"""Built-in architectures by name. Each is built from ``(input_shape, classes)``; some take settings."""

from collections.abc import Callable
from functools import partial

from torch import nn

from .cnn import cnn, lenet, linear
from .crossvit import CrossViTClassifier
from .efficientnet import efficientnet_lite0
from .feature_cnn import FEATURE_CNN, FeatureCnn
from .resnet import WIDTHS, resnet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "lenet": lenet,
    "linear": linear,
    FEATURE_CNN: FeatureCnn,
    **{name: partial(resnet, name) for name in WIDTHS},
    "efficientnet-lite0": efficientnet_lite0,
    "crossvit-tiny": CrossViTClassifier,
}
