"""Models with noise inside: z = A x + c + noise after the first linear layer, and everything after it a function of z.

The answer depends on the image only through z: `NoisyModel` is built from the layer and the rest, so there is no way around
the noise. This is what a certificate for inner noise assumes (`certification.laws`).

A packed row is one flat tensor, the image followed by standard normal coordinates for the noise. Engines, isolation proofs
and compiled graphs know models with one input only, and need not know that a part of it is noise.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .._validate import finite_in
from ..errors import ModelError
from ..known_layers import altered
from ..operator_norm import Geometry, geometry_of, norm_gradient, require_scales

fx.wrap("norm_gradient")  # one operation in a trace: it has no rows and no derivative
_SUMS_TO_ONE = 1e-6


class NoisyModel(nn.Module):
    """``rest(A x + c + scales * e)`` with e ~ N(0, I), and optionally noise of standard deviation `input_scale` on x.

    `scales` has one standard deviation per output channel of `first`, or one for all. Called with images ``[n, C, H, W]``, e is
    0. Called with packed rows ``[n, d + m]`` (see `pack`), e are the last m values of a row. The noise on x is added by the
    caller.

    With `normalize`, A is the kernel divided by ``rms(scales) * ||diag(scales)^-1 kernel||``. For equal scales this is its
    norm, so that ||A|| = 1. The division is part of the forward pass and is differentiated. Then
    ``1 / ||diag(scales)^-1 A|| = rms(scales)`` for all weights (up to rounding and the gap of the bound).
    """

    first: Any
    shift: Tensor
    scales: Tensor
    input_scale: Tensor

    def __init__(
        self,
        first: nn.Module,
        rest: nn.Module,
        scales: Tensor | Sequence[float] | float,
        input_shape: tuple[int, ...],
        *,
        input_scale: float = 0.0,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.geometry: Geometry = geometry_of(first, tuple(input_shape))
        self.input_shape, self.normalize = tuple(input_shape), normalize
        self.first, shift = _without_bias(first)
        self._hold_shift(shift)
        channels = len(shift)
        given = torch.as_tensor(scales, dtype=torch.float32).detach()
        self.register_buffer("scales", given.expand(channels).clone() if given.ndim == 0 else given.clone())
        require_scales(self.scales, channels)
        finite_in("input_scale", input_scale, 0.0, 100.0, error=ModelError)
        self.register_buffer("input_scale", torch.tensor(float(input_scale)))
        self.rest = rest
        with torch.no_grad():
            image = torch.zeros((1, *self._first_takes), device=self.shift.device)
            self.hidden_shape = tuple(self.first(image).shape[1:])

    def _hold_shift(self, shift: Tensor) -> None:
        if isinstance(shift, nn.Parameter):
            self.register_parameter("shift", shift)
        else:
            self.register_buffer("shift", shift)

    @property
    def image_size(self) -> int:
        """d, the number of values of an image."""
        return math.prod(self.input_shape)

    @property
    def noise_size(self) -> int:
        """m, the number of noisy hidden values."""
        return math.prod(self.hidden_shape)

    @property
    def _first_takes(self) -> tuple[int, ...]:
        return self.input_shape if self.geometry else (self.image_size,)

    def pack(self, x: Tensor, noise: Tensor) -> Tensor:
        """Join images ``[..., *input_shape]`` and standard normal noise ``[..., *hidden_shape]`` to rows ``[..., d + m]``."""
        images, inner = x.flatten(-len(self.input_shape)), noise.flatten(-len(self.hidden_shape))
        return torch.cat([images, inner], dim=-1)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of images or of packed rows."""
        x, noise, zero = self.split(rows)
        logits: Tensor = self.rest(self.linear(x, zero) + self.shift + noise)
        return logits

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images (as the first layer takes them), the noise ``scales * e``, and a zero for each row."""
        self._require_shape(rows)
        d, m = self.image_size, self.noise_size
        padded = F.pad(rows.flatten(1), (0, m + 1))  # an image has noise 0: both kinds of rows take the same way
        x, noise, zero = padded[:, :d], padded[:, d : d + m], padded[:, -1:]
        noise = torch.unflatten(noise, 1, self.hidden_shape) * self._spread(self.scales)
        return torch.unflatten(x, 1, self._first_takes), noise, zero

    def _require_shape(self, rows: Tensor) -> None:
        """Refuse other shapes: the first values of a larger image would pass for an image, and the others for noise."""
        packed = (self.image_size + self.noise_size,)
        if not isinstance(rows, fx.Proxy) and tuple(rows.shape[1:]) not in (self.input_shape, packed):
            shape = list(rows.shape[1:])
            raise ModelError(f"a row has the shape {shape}, must be {list(self.input_shape)}, or {list(packed)} with noise")

    def hidden(self, x: Tensor) -> Tensor:
        """Return A x + c for images ``[n, *input_shape]``: the hidden values without noise."""
        images, _, zero = self.split(x)
        return self.linear(images, zero) + self.shift

    def linear(self, x: Tensor, zero: Tensor) -> Tensor:
        """Return A x for images and zeros of `split`."""
        product: Tensor = self.first(x)
        return product / self.divisor(zero) if self.normalize else product

    def divisor(self, zero: Tensor) -> Tensor:
        """Return what the kernel is divided by, for each row of `zero`, with the dimensions of the hidden values."""
        norm = self._norm(zero) if self.normalize else zero[:, 0] + 1.0
        return norm.reshape(-1, *[1] * len(self.hidden_shape))

    def _norm(self, zero: Tensor) -> Tensor:
        return _divisor(self.first.weight, self.scales, self.geometry, zero)

    def folded(self) -> "NoisyModel":
        """Return a plain copy with A as its kernel and nothing left to normalize: the model that votes.

        It is made of the layer and the rest, so that a subclass or a hook on the layer has no way around the noise.
        """
        self.require_plain_layer()
        first, weight = copy.deepcopy(self.first), self.first.weight.detach()
        kernel = normalized_kernel(weight, self.scales, self.geometry) if self.normalize else weight.clone()
        first.weight, first.bias = nn.Parameter(kernel), nn.Parameter(self.shift.detach().flatten().clone())
        rest, scale = copy.deepcopy(self.rest), float(self.input_scale)
        plain = NoisyModel(first, rest, self.scales, self.input_shape, input_scale=scale, normalize=False)
        return plain.to(self.scales.device, self.scales.dtype).train(self.training)

    def require_plain_layer(self) -> None:
        """Raise unless the first layer is still the linear layer whose norm is known: not replaced, no hooks."""
        if altered(self.first) or geometry_of(self.first, self.input_shape) != self.geometry:
            raise ModelError("the noisy layer was replaced or has hooks, so it may not be linear; build the NoisyModel again")

    def _spread(self, channels: Tensor) -> Tensor:
        return channels.reshape(-1, *[1] * (len(self.hidden_shape) - 1))


def _divisor(weight: Tensor, scales: Tensor, geometry: Geometry, zero: Tensor) -> Tensor:
    """Return the divisor of the kernel for each row: ``rms(scales) * <G, kernel>``.

    The kernel is added to a zero of each row: per-example gradients are gradients of such copies.
    """
    copies = weight + zero.reshape(-1, *[1] * (4 if geometry else 2))
    norm = (copies * norm_gradient(weight, scales, geometry)).flatten(1).sum(1)
    return norm * scales.square().mean().sqrt()


def normalized_kernel(weight: Tensor, scales: Tensor, geometry: Geometry) -> Tensor:
    """Return the kernel that a `NoisyModel` with `normalize` applies."""
    with torch.no_grad():
        return weight / _divisor(weight, scales, geometry, scales.new_zeros(1))


def _without_bias(first: Any) -> tuple[Any, Tensor]:
    """Return a copy of the layer without its bias, and the bias ``[channels, 1, 1]``: zeros if there is none."""
    bare = copy.deepcopy(first)
    weight, bias = bare.weight, bare.bias
    bare.register_parameter("bias", None)
    wide = (len(weight), *[1] * (weight.ndim - 2))
    if bias is None:
        return bare, torch.zeros(wide, device=weight.device)
    return bare, nn.Parameter(bias.detach().reshape(wide), requires_grad=bias.requires_grad)


def heterogeneous_scales(sigma: float, weights: Tensor | Sequence[float]) -> Tensor:
    """Return the scales ``sigma * sqrt(K r_k)`` of the heterogeneous Gaussian mechanism for K weights r that sum to 1."""
    finite_in("sigma", sigma, 0.0, 100.0, open_low=True, error=ModelError)
    r = torch.as_tensor(weights, dtype=torch.float64)
    if r.ndim != 1 or not bool(torch.isfinite(r).all() and (r > 0).all()):
        raise ModelError("the noise weights r must be positive, one per channel; floor them, for example at 0.1 / K")
    if abs(float(r.sum()) - 1.0) > _SUMS_TO_ONE:
        raise ModelError(f"the noise weights r sum to {float(r.sum()):g}, must sum to 1; divide them by their sum")
    return (sigma * torch.sqrt(len(r) * r)).float()


def noise_after(
    model: nn.Module,
    site: str,
    scales: Tensor | Sequence[float] | float,
    input_shape: tuple[int, ...],
    *,
    input_scale: float = 0.0,
    normalize: bool = True,
) -> NoisyModel:
    """Return `model` with noise after its first layer, called `site` in its ``nn.Sequential``.

    Only there is it sure that the answer depends on the image through the noisy values alone. A custom forward may have a
    skip connection around any layer; build a `NoisyModel` from its layer and the rest.
    """
    names = [name for name, _ in model.named_modules() if name]
    if site not in names:
        raise ModelError(f"the model has no layer {site!r} to add noise after; its layers are {', '.join(names[:8])}, ...")
    if type(model) is not nn.Sequential:
        raise ModelError(
            f"{type(model).__name__} is not an nn.Sequential, so a skip connection around {site!r} cannot be excluded; "
            "build NoisyModel(first, rest, ...)"
        )
    children = dict(model.named_children())
    before = next(iter(children))
    if site != before:
        raise ModelError(
            f"layer {site!r} is not the first of the model, so its values are not linear in the image; use {before!r}"
        )
    first, rest = children.pop(site), nn.Sequential(OrderedDict(children))
    return NoisyModel(first, rest, scales, input_shape, input_scale=input_scale, normalize=normalize)
