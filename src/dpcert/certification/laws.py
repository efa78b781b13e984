"""Smoothing laws: where noise enters a classifier, and the radius that it is worth.

Let z = A x + c + noise with noise ~ N(0, S), and let the answer depend on the image x only through z. Whitened, y = S^(-1/2) z,
the noise is N(0, I), and the smoothed classifier is constant within Phi^-1(p_A) of y (Cohen et al. 2019). A change of x by r
moves y by at most r ||S^(-1/2) A||. So the class is constant within ``Phi^-1(p_A) / ||S^(-1/2) A||`` of x.

With noise of standard deviation s on x too, the covariance of z is S + s^2 A A^T. In whitened coordinates that is I + s^2 B B^T
with B = S^(-1/2) A, and ``||(I + s^2 B B^T)^(-1/2) B|| = b / sqrt(1 + s^2 b^2)`` for the largest singular value b of B. The
radius is ``Phi^-1(p_A) sqrt(s^2 + 1 / b^2)``: the noises add in quadrature.

So every law is worth one number, the standard deviation of noise on the image that would give the same radii. For an upper
bound on b it is a lower bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._validate import finite_in
from ..errors import ConfigError, ModelError
from ..models.noisy import NoisyModel, normalized_kernel
from ..operator_norm import Geometry, norm_of_weight
from ..rng import Purpose
from ..store.metrics import BOTH, HIDDEN, INPUT, PLACES
from .bounds import certified_radius
from .smooth import Counter

_DIGITS = Context(prec=9, rounding=ROUND_CEILING)  # of a norm: another machine, which rounds differently, finds the same
_LARGEST_SIDE = 4096  # of an image; a larger one in a file is damage, and would take all memory
_DOWN = 1.0 - 2.0**-48  # the products and roots below have a smaller error


@dataclass(frozen=True)
class Smoothing:
    """Gaussian noise on the image (`input_scale`), after the first linear layer (`whitened_norm`), or at both places.

    `whitened_norm` is an upper bound on ||S^(-1/2) A||_2; None: no noise after a layer. `geometry` is that of the layer, and
    `normalized` says whether the model divides its kernel by its norm: with them and the stored weights, anyone can compute
    the norm again.
    """

    input_scale: float
    whitened_norm: float | None = None
    geometry: Geometry = ()
    normalized: bool = False

    def __post_init__(self) -> None:
        if self.whitened_norm is None:
            finite_in("sigma", self.input_scale, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
            return
        finite_in("input_scale", self.input_scale, 0.0, 100.0)
        finite_in("the norm of the noisy layer", self.whitened_norm, 0.0, 1e9, open_low=True, error=ModelError)

    @property
    def site(self) -> str:
        """Where noise enters: ``input``, ``hidden`` or ``both``."""
        if self.whitened_norm is None:
            return INPUT
        return BOTH if self.input_scale > 0.0 else HIDDEN

    @property
    def sigma(self) -> float:
        """The standard deviation of noise on the image that gives the same radii; rounded down."""
        if self.whitened_norm is None:
            return self.input_scale
        return math.hypot(self.input_scale, 1.0 / self.whitened_norm) * _DOWN

    def radius(self, p_lower: float) -> float:
        """Return the certified L2 radius for a lower bound on the probability of the top class."""
        return certified_radius(p_lower, self.sigma)

    @property
    def tag(self) -> str:
        """The part of a file name that names the law, before its sigma: nothing for noise on the image."""
        return "" if self.site == INPUT else f"{self.site}-"

    @property
    def in_words(self) -> str:
        """The law in a few words."""
        return f"{PLACES[self.site]}, worth sigma {self.sigma:g}" if self.site in PLACES else f"sigma {self.sigma:g}"

    @property
    def facts(self) -> dict[str, Any]:
        """The law as it is stored with certificates. Noise on the image is described by sigma alone."""
        layer = {"geometry": [list(part) for part in self.geometry], "normalized": self.normalized}
        return {"site": self.site, "input_scale": self.input_scale, "whitened_norm": self.whitened_norm, **layer}


def stored_smoothing(sigma: float, facts: dict[str, Any] | None) -> Smoothing:
    """Return the law that an entry of metrics.json or a sidecar describes; `sigma` must be what it is worth."""
    if facts is None:
        return Smoothing(sigma)
    geometry = tuple(tuple(int(size) for size in part) for part in facts["geometry"])
    if geometry and ([len(part) for part in geometry] != [2, 2, 2, 2, 1] or not _is_possible(geometry)):
        raise ConfigError(f"the geometry of the noisy layer is {geometry}, which is impossible")
    law = Smoothing(float(facts["input_scale"]), float(facts["whitened_norm"]), geometry, bool(facts["normalized"]))
    if law.site != facts["site"] or not math.isclose(law.sigma, sigma, rel_tol=1e-12):
        raise ConfigError(
            f"the smoothing law is worth sigma {law.sigma:.9g} at {law.site}, stated are {sigma:.9g} at {facts['site']}"
        )
    return law


def _is_possible(geometry: Geometry) -> bool:
    size, paddings, *others = geometry
    return all(0 <= p <= _LARGEST_SIDE for p in paddings) and all(
        1 <= n <= _LARGEST_SIDE for part in (size, *others) for n in part
    )


def smoothing_of(model: NoisyModel) -> Smoothing:
    """Return the law of the noise inside a model, from its weights."""
    model.require_plain_layer()
    weight, scales = model.first.weight.detach().cpu(), model.scales.cpu()
    return law_of_layer(weight, scales, float(model.input_scale), model.geometry, normalized=model.normalize)


def law_of_layer(weight: Tensor, scales: Tensor, input_scale: float, geometry: Geometry, *, normalized: bool) -> Smoothing:
    """Return the law of noise with `scales` after a layer with this weight, and with `input_scale` on the image."""
    kernel = normalized_kernel(weight, scales, geometry) if normalized else weight
    norm = float(norm_of_weight(kernel, geometry, scales))
    rounded_up = float(_DIGITS.create_decimal(Decimal(norm))) if math.isfinite(norm) else norm
    return Smoothing(input_scale, rounded_up, geometry, normalized)


def law_for(model: nn.Module, sigma: float | None, smoothing: Smoothing | None) -> Smoothing:
    """Return the law that a user asks for: noise `sigma` on the image, or the noise inside the model (also if none is given).

    A law of inner noise must be that of the model: its norm is computed here, never taken from the caller.
    """
    if sigma is not None and smoothing is not None:
        raise ConfigError("sigma and smoothing are both given; pass one of them")
    if sigma is not None:
        return Smoothing(sigma)
    if smoothing is not None and smoothing.site == INPUT:
        return smoothing
    if not isinstance(model, NoisyModel):
        what = "sigma is missing" if smoothing is None else f"the smoothing law needs noise at {smoothing.site!r}"
        raise ConfigError(f"{what}, and {type(model).__name__} has no noise inside; pass sigma, or a NoisyModel")
    own = smoothing_of(model)
    if smoothing not in (None, own):
        raise ConfigError(f"the smoothing law is not that of the model ({own}); pass smoothing_of(model)")
    return own


@dataclass(frozen=True)
class Whitened:
    """A classifier in the coordinates in which its noise is ``sigma * N(0, I)``.

    ``voter(inputs(x) + noise)`` has the distribution of the noisy classifier's answers for the image x.
    """

    voter: nn.Module
    sigma: float
    inputs: Callable[[Tensor], Tensor]


def whitened(model: nn.Module, law: Smoothing) -> Whitened:
    """Return the classifier whose votes are counted under this law."""
    if law.site == INPUT:
        return Whitened(model, law.sigma, lambda x: x)
    assert isinstance(model, NoisyModel), "`law_for` refuses other models"
    plain = model.folded().requires_grad_(False)
    if law.site == BOTH:
        both = _BothSites(plain)
        return Whitened(both, 1.0, both.inputs)
    spread = _spread(plain.scales, len(plain.hidden_shape))
    scales = plain.scales.reshape(-1, *[1] * (len(plain.hidden_shape) - 1))
    return Whitened(nn.Sequential(spread, plain.rest), 1.0, lambda x: plain.hidden(x.to(scales.device)) / scales)


class _PerChannel(nn.Module):
    """Multiplies each value of a row by a constant."""

    factors: Tensor

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.factors


def _spread(scales: Tensor, dimensions: int) -> nn.Module:
    """Return a layer that multiplies each channel by its scale: a convolution, which noise banks recognize."""
    if dimensions != 3:
        return _PerChannel(scales)
    layer = nn.Conv2d(len(scales), len(scales), 1, groups=len(scales), bias=False, device="meta")  # draws no random numbers
    layer.weight = nn.Parameter(scales.reshape(-1, 1, 1, 1).clone(), requires_grad=False)
    return layer


class _BothSites(nn.Module):
    """A model with noise on the image and inside, as a function of packed rows whose image is divided by its noise scale."""

    def __init__(self, model: NoisyModel) -> None:
        super().__init__()
        self.model = model
        ones = model.scales.new_ones(model.noise_size)
        self.stretch = _PerChannel(torch.cat([model.input_scale.expand(model.image_size), ones]))

    def inputs(self, x: Tensor) -> Tensor:
        """Return the rows of images, without noise."""
        x = x.to(self.model.scales.device)
        return self.model.pack(x / self.model.input_scale, x.new_zeros((len(x), *self.model.hidden_shape)))

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.model(self.stretch(rows))
        return logits


@dataclass(frozen=True)
class OnImages:
    """A counter of whitened votes, as a counter for images: its sigma is what the law is worth."""

    counter: Counter
    law: Smoothing
    inputs: Callable[[Tensor], Tensor]

    @property
    def sigma(self) -> float:
        """The standard deviation of noise on the image that gives the same radii."""
        return self.law.sigma

    def count(self, x: Tensor, start: int, stop: int, purpose: Purpose, index: int) -> np.ndarray:
        """The contract of `Counter`, with the noise of the law."""
        return self.counter.count(self.inputs(x.unsqueeze(0))[0], start, stop, purpose, index)
