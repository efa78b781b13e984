"""The models of earlier private and certified systems, made from any packaged network.

| system    | made of the network                                                             | certificate                 |
|-----------|---------------------------------------------------------------------------------|-----------------------------|
| pixeldp   | noise after its first layer, whose norm is held                                 | `certification.laws`        |
| securesgd | the same, with a noise scale for each channel                                   | the same                    |
| stobatch  | noise at the input and after its first layer, hidden values clipped to [-1, 1]  | the same                    |
| denoiser  | a denoiser in front of it                                                       | plain input smoothing       |

`sigma` is in units of the input: all four have the radius sigma * Phi^-1(p).
"""

import copy
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._validate import one_of
from ..errors import ModelError
from ..operator_norm import operator_norm
from .denoiser import Denoised
from .noisy import NoisyModel, heterogeneous_scales
from .parts import head_name
from .resnet import ResNet

PIXELDP, SECURESGD, STOBATCH, DENOISER = "pixeldp", "securesgd", "stobatch", "denoiser"
UNIFORM, INITIALIZATION, CHARGED, PRIVATE = "uniform", "initialization", "charged", "private"
_FLOOR = 0.1  # the share of the noise variance that all channels get alike: no weight is below 0.1 / K
_PROBES = 256
Weights = str | Sequence[float] | None


class AfterStem(nn.Module):
    """A `ResNet` without its stem: what follows the convolution. `offset` is what the stem makes of the mean pixel.

    The pixels are scaled inside the first layer, and its zero padding stands for the mean, so the offset depends on the place.
    """

    offset: Tensor

    def __init__(self, network: ResNet, offset: Tensor, bound: float = math.inf) -> None:
        super().__init__()
        self.register_buffer("offset", offset)
        self.clip = nn.Identity() if math.isinf(bound) else nn.Hardtanh(-bound, bound)
        self.stem_norm, self.stage1, self.stage2, self.stage3 = (
            network.stem_norm,
            network.stage1,
            network.stage2,
            network.stage3,
        )
        self.standardize, self.head = network.standardize, network.head

    def forward(self, z: Tensor) -> Tensor:
        """Logits of hidden values."""
        x = F.relu(self.stem_norm(self.clip(z) + self.offset))
        x = self.stage3(self.stage2(self.stage1(x)))
        logits: Tensor = self.head(self.standardize(x.mean(dim=(2, 3))))
        return logits


def as_system(name: str, network: nn.Module, input_shape: tuple[int, ...], sigma: float, weights: Weights = None) -> nn.Module:
    """Return the model of a system, made of a network. `weights` are for securesgd only."""
    build = SYSTEMS[one_of("model.system", name, SYSTEMS, error=ModelError)]
    if weights is not None and name != SECURESGD:
        raise ModelError(f"model.noise_weights is set, but only system {SECURESGD} has a noise scale per channel; remove it")
    return build(network, input_shape, sigma, weights)


def _pixeldp(network: nn.Module, input_shape: tuple[int, ...], sigma: float, weights: Weights) -> nn.Module:
    return _with_noise(network, input_shape, sigma, torch.full((1,), 1.0))


def _securesgd(network: nn.Module, input_shape: tuple[int, ...], sigma: float, weights: Weights) -> nn.Module:
    channels = len(_first_layer(network).weight)
    if isinstance(weights, str) and weights == PRIVATE:
        raise ModelError(
            f"model.noise_weights is {PRIVATE!r}: weights from private records would be a release that no ledger charges; "
            f"use {CHARGED}, {INITIALIZATION}, {UNIFORM}, or a list from public data"
        )
    if isinstance(weights, str) and weights == CHARGED:
        raise ModelError(f"noise weights that are {CHARGED} come from training: build the model with dpcert.build_model")
    if isinstance(weights, str) and "," in weights:
        weights = _numbers(weights)
    if weights is None or isinstance(weights, str):
        known = (UNIFORM, INITIALIZATION, CHARGED)
        chosen = one_of("model.noise_weights", weights or INITIALIZATION, known, error=ModelError)
        r = torch.full((channels,), 1.0 / channels, dtype=torch.float64)
        if chosen == INITIALIZATION:
            r = vulnerabilities(_with_noise(network, input_shape, sigma, torch.full((1,), 1.0)))
    else:
        r = torch.tensor(list(weights), dtype=torch.float64)
        if len(r) != channels:
            raise ModelError(f"model.noise_weights has {len(r)} values, the first layer has {channels} channels")
    return _with_noise(network, input_shape, sigma, heterogeneous_scales(1.0, r))


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise ModelError(f"model.noise_weights is {text[:80]!r}, must be numbers with commas; {error}") from error


def _stobatch(network: nn.Module, input_shape: tuple[int, ...], sigma: float, weights: Weights) -> nn.Module:
    each = sigma / math.sqrt(2.0)  # noise at two sites adds up in quadrature
    return _with_noise(network, input_shape, each, torch.full((1,), 1.0), input_scale=each, clipped=True)


def _denoiser(network: nn.Module, input_shape: tuple[int, ...], sigma: float, weights: Weights) -> nn.Module:
    if any(side % 2 for side in input_shape[1:]):
        sides = " x ".join(map(str, input_shape[1:]))
        raise ModelError(f"images have {sides} pixels: system {DENOISER} needs even sides; pad or crop the images")
    return Denoised(network, input_shape[0])


SYSTEMS: dict[str, Callable[[nn.Module, tuple[int, ...], float, Weights], nn.Module]] = {
    PIXELDP: _pixeldp,
    SECURESGD: _securesgd,
    STOBATCH: _stobatch,
    DENOISER: _denoiser,
}


def _with_noise(
    network: nn.Module,
    input_shape: tuple[int, ...],
    sigma: float,
    relative: Tensor,
    *,
    input_scale: float = 0.0,
    clipped: bool = False,
) -> NoisyModel:
    """Return the network with noise after its first layer; `relative` are the noise scales of the channels, with mean square 1.

    A new layer is normalized in the forward pass. A pretrained stem keeps its values, and the noise is scaled by its norm
    instead, which is the same up to a factor that the next layers expect.
    """
    first = _first_layer(network)
    relative = relative.expand(len(first.weight)).clone()
    if isinstance(network, ResNet):
        stem, offset = _plain_stem(network, input_shape)
        norm = float(operator_norm(stem, tuple(input_shape), relative).detach())
        rest: nn.Module = AfterStem(network, offset, norm if clipped else math.inf)
        return NoisyModel(stem, rest, sigma * norm * relative, input_shape, input_scale=input_scale, normalize=False)
    assert isinstance(network, nn.Sequential)
    after = [_averaging(layer) for layer in list(network)[1:2]] + list(network)[2:]
    rest = nn.Sequential(*([nn.Hardtanh()] if clipped else []), *after)
    return NoisyModel(first, rest, sigma * relative, input_shape, input_scale=input_scale)


def _averaging(layer: nn.Module) -> nn.Module:
    """Replace a maximum over noisy values, which finds the noise, by their mean, which reduces it."""
    if isinstance(layer, nn.MaxPool2d):
        return nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding)
    return layer


def _first_layer(network: nn.Module) -> nn.Conv2d | nn.Linear:
    layer = network.stem if isinstance(network, ResNet) else network[0] if type(network) is nn.Sequential else None
    if type(layer) in (nn.Conv2d, nn.Linear):
        return layer  # type: ignore[return-value]
    raise ModelError(
        f"noise inside needs a network whose first layer is a Conv2d or Linear, such as cnn or resnet-48; "
        f"{type(network).__name__} is none"
    )


def _plain_stem(network: ResNet, input_shape: tuple[int, ...]) -> tuple[nn.Conv2d, Tensor]:
    """Return the stem with the scaling of the pixels inside it, and the constant that the mean pixel adds."""
    stem, normalize = copy.deepcopy(network.stem), network.normalize
    with torch.no_grad():
        offset = network.stem(normalize(torch.zeros((1, *input_shape))))[0]
        stem.weight.div_(normalize.scale.reshape(1, -1, 1, 1))
    return stem, offset.clone()


def vulnerabilities(model: NoisyModel) -> Tensor:
    """Return the weights r of the channels: mean |dLoss/dh| over synthetic images, all labels and all places; they sum to 1.

    Depends on the initial weights only, never on a record. No weight is below 0.1 / K. A head that starts at zero gets random
    weights for this, since no gradient passes it.
    """
    generator = torch.Generator().manual_seed(0)
    probed = probed_copy(model, generator)
    images = torch.rand((_PROBES, *model.input_shape), generator=generator)
    with torch.no_grad():
        hidden = probed.hidden(images)
    hidden.requires_grad_()
    logits = probed.rest(hidden)
    labels = torch.arange(_PROBES) % logits.shape[1]
    (slope,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), hidden)
    return floored(of_channels(slope).mean(dim=0))


def probed_copy(model: NoisyModel, generator: torch.Generator) -> NoisyModel:
    """Return a frozen copy whose head passes gradients: a head that starts at zero gets random weights."""
    probed = copy.deepcopy(model).requires_grad_(False)
    head = probed.get_submodule(head_name(probed))
    assert isinstance(head, nn.Linear)
    if not bool(head.weight.any()):
        std, device = head.in_features**-0.5, head.weight.device
        head.weight.copy_(torch.empty(head.weight.shape).normal_(std=std, generator=generator).to(device))
    return probed


def of_channels(slope: Tensor) -> Tensor:
    """Return ``[n, K]``, the mean of |slope| over the places of each channel, for ``[n, K, ...]``; float64."""
    return slope.double().abs().reshape(*slope.shape[:2], -1).mean(dim=2)


def floored(channels: Tensor) -> Tensor:
    """Return weights r that sum to 1, none below 0.1 / K, in proportion to nonnegative `channels`; uniform if all are 0."""
    total = channels.sum()
    shares = channels / total if total > 0 else torch.full_like(channels, 1.0 / len(channels))
    return (1.0 - _FLOOR) * shares + _FLOOR / len(channels)


@torch.no_grad()
def set_weights(model: NoisyModel, r: Tensor) -> None:
    """Give the channels of a model noise in proportion to sqrt(r), worth as much as the noise that they have."""
    shape, relative = model.input_shape, heterogeneous_scales(1.0, r).to(model.scales.device)
    if model.normalize:
        model.scales.copy_(model.scales.double().square().mean().sqrt() * relative)
        return
    worth = 1.0 / operator_norm(model.first, shape, model.scales)
    model.scales.copy_(worth * operator_norm(model.first, shape, relative) * relative)
