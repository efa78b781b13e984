"""The convolutions of the paper's CNN with fixed feature scaling and a linear head: a small public classifier."""

from torch import Tensor, nn

from .cnn import cnn
from .resnet import WIDTHS, ResNet, Standardize, resnet

FEATURE_CNN = "feature-cnn"
BACKBONES = (*WIDTHS, FEATURE_CNN)


class FeatureCnn(nn.Module):
    """Both convolutions of `cnn`, a scaling of their features that is fixed after pretraining, and a linear head.

    The names are those of `resnet.ResNet`: `dpcert pretrain` and a head phase treat both alike.
    """

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        layers = list(cnn(input_shape, classes))
        flat = next(place for place, layer in enumerate(layers) if isinstance(layer, nn.Flatten))
        hidden = layers[flat + 1]
        assert isinstance(hidden, nn.Linear)
        self.convolutions = nn.Sequential(*layers[: flat + 1])
        self.standardize = Standardize(hidden.in_features)
        self.head = nn.Linear(hidden.in_features, classes)

    def features(self, x: Tensor) -> Tensor:
        """The outputs of the second convolution, ``[n, features]``."""
        features: Tensor = self.convolutions(x)
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images in [0, 1]."""
        logits: Tensor = self.head(self.standardize(self.features(x)))
        return logits


Backbone = ResNet | FeatureCnn


def backbone(name: str, input_shape: tuple[int, int, int], classes: int) -> Backbone:
    """Return a network that can be pretrained, by its name in `BACKBONES`."""
    return FeatureCnn(input_shape, classes) if name == FEATURE_CNN else resnet(name, input_shape, classes)
