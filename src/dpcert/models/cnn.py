"""The models of the paper's small data sets."""

import torch
from torch import nn

from ..errors import ModelError


def cnn(input_shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> nn.Sequential:
    """The four-layer CNN of Tramer and Boneh (2021): 26,010 parameters on 28 x 28 grayscale images.

    Pooling comes before tanh: tanh is monotone, so max(tanh(a), tanh(b)) = tanh(max(a, b)) bit for bit, with fewer operations.
    """
    channels, height, width = input_shape
    features = nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=8, stride=2, padding=2),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Tanh(),
        nn.Flatten(),
    )
    try:
        with torch.no_grad():
            feature_count = features(torch.zeros(1, channels, height, width)).shape[1]
    except RuntimeError as error:
        raise ModelError(
            f"model 'cnn' needs images of at least 16 x 16 pixels, got {height} x {width}; "
            "use --set model.name=linear or a custom model (--model)"
        ) from error
    return nn.Sequential(*features, nn.Linear(feature_count, 32), nn.Tanh(), nn.Linear(32, classes))


def linear(input_shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> nn.Sequential:
    """Softmax regression: the smallest model, for tests and small images."""
    channels, height, width = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))
