"""A denoiser in front of a frozen classifier (Salman et al. 2020): only denoiser and head are trained on private data."""

from torch import Tensor, nn

DEPTH, WIDTH, _GROUPS, _BLOCK = 5, 32, 8, 2


class Denoiser(nn.Module):
    """x - net(x), where net estimates the noise: 3 x 3 convolutions with GroupNorm and ReLU (DnCNN, Zhang et al. 2017).

    They work at half resolution, on 2 x 2 blocks of pixels as channels (FFDNet, Zhang et al. 2018): a quarter of the products,
    and twice the field of view. The sides of an image must be even.

    The last convolution starts at zero, so that a new denoiser is the identity: the classifier works from the first step.
    """

    def __init__(self, channels: int, depth: int = DEPTH, width: int = WIDTH) -> None:
        super().__init__()
        blocks = channels * _BLOCK**2
        layers: list[nn.Module] = [nn.PixelUnshuffle(_BLOCK), nn.Conv2d(blocks, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, width), nn.ReLU()]
        last = nn.Conv2d(width, blocks, 3, padding=1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self.noise = nn.Sequential(*layers, last, nn.PixelShuffle(_BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        """``[n, channels, height, width]``."""
        denoised: Tensor = x - self.noise(x)
        return denoised


class Denoised(nn.Module):
    """classifier(denoiser(x)). Noise is added to x, so the certificate is that of plain input smoothing."""

    def __init__(self, classifier: nn.Module, channels: int, depth: int = DEPTH, width: int = WIDTH) -> None:
        super().__init__()
        self.denoiser = Denoiser(channels, depth, width)
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        logits: Tensor = self.classifier(self.denoiser(x))
        return logits
