"""Losses of ONE example: logits ``[R, classes]`` of its R views, and its label.

No function here has a batch axis, so none can combine two examples. Symbols: F softmax of the logits, x_0 the original view,
x_1..x_K the noisy ones, y the label, KL(P || Q) = sum_c P_c log(P_c / Q_c), H entropy, Phi the normal distribution function.
All work on log-probabilities, so that a saturated softmax gives neither NaN nor Inf.

A regulariser learns from `for_views` which rows are noisy copies, and refuses views that it does not support.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ._validate import finite_in
from .errors import ConfigError

_SMALLEST_PROBABILITY = 1e-6  # Phi^-1 of it is -4.75: margins up to 9.5 can be resolved, more than MACER's 8
_FEW_COPIES_FOR_MACER = 4
_LARGEST_WEIGHT = 1e6


def cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Return the mean cross-entropy over the views: ``1/(K+1) sum_j L(theta; x^j, y)`` of Algorithm 2."""
    return -torch.where(_is_label(logits, label), F.log_softmax(logits, dim=1), 0.0).sum(dim=1).mean()


def _is_label(logits: Tensor, label: Tensor) -> Tensor:
    """Return ``[classes]``, true at the label. Unlike an index, it works under vmap without a loop."""
    return torch.arange(logits.shape[-1], device=logits.device) == label


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(P || Q) summed over the classes, from log-probabilities ``[..., classes]``."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


@dataclass(frozen=True)
class Stability:
    """gamma * mean_j KL( F(x_0) || F(x_j) ) over all R views; view 0 gives 0 (Algorithm 2; Li et al. 2019; gamma = 2).

    The gradient flows through both sides.
    """

    gamma: float = 2.0
    name: ClassVar[str] = "stability"

    def __post_init__(self) -> None:
        finite_in("method.stability_gamma", self.gamma, 0.0, _LARGEST_WEIGHT, remedy="the paper uses 2")

    def for_views(self, count: int, copies: int, sigma: float | None) -> "Stability":
        """Require the original and a noisy copy."""
        _require_copies(self.name, copies)
        if count == copies:
            raise ConfigError("method.keep_original is false, stability compares copies with the original; set it to true")
        return self

    def remarks(self) -> tuple[str, ...]:
        """No warnings."""
        return ()

    def __call__(self, logits: Tensor, label: Tensor) -> Tensor:
        """``[R, classes] -> scalar``."""
        log_f = F.log_softmax(logits, dim=1)
        return self.gamma * divergence(log_f[0], log_f).mean()


@dataclass(frozen=True)
class Consistency:
    """lambda * mean_j KL( Fbar || F(x_j) ) + eta * H(Fbar), Fbar the mean of F over the K noisy views (Jeong & Shin 2020).

    The default `lambda_` is that of the original: 10 up to sigma 0.25, 5 above. eta = 0 is the formula of the paper's appendix.
    """

    lambda_: float | None = None
    eta: float = 0.5
    first_noisy: int = 1
    copies: int = 2
    name: ClassVar[str] = "consistency"

    def __post_init__(self) -> None:
        if self.lambda_ is not None:
            finite_in("method.consistency_lambda", self.lambda_, 0.0, _LARGEST_WEIGHT, remedy="the original uses 5 to 20")
        finite_in("method.consistency_eta", self.eta, 0.0, _LARGEST_WEIGHT, remedy="the original uses 0.5")

    def for_views(self, count: int, copies: int, sigma: float | None) -> "Consistency":
        """Require noisy copies; use the original's lambda for their sigma if none is given."""
        _require_copies(self.name, copies)
        assert sigma is not None
        weight = self.lambda_ if self.lambda_ is not None else 10.0 if sigma <= 0.25 else 5.0
        return replace(self, lambda_=weight, first_noisy=count - copies, copies=copies)

    def remarks(self) -> tuple[str, ...]:
        """Warn about a single noisy view: it equals its mean."""
        if self.copies > 1:
            return ()
        return ("method.copies is 1: the consistency divergence of a single noisy view is always 0; use 2 or more",)

    def __call__(self, logits: Tensor, label: Tensor) -> Tensor:
        """``[R, classes] -> scalar``."""
        log_f = F.log_softmax(logits[self.first_noisy :], dim=1)
        log_mean = torch.logsumexp(log_f, dim=0) - math.log(len(log_f))
        entropy = -(log_mean.exp() * log_mean).sum()
        weight = 5.0 if self.lambda_ is None else self.lambda_
        return weight * divergence(log_mean, log_f).mean() + self.eta * entropy


@dataclass(frozen=True)
class Macer:
    """lambda sigma/2 * max(0, gamma - (Phi^-1(p_y) - Phi^-1(p_other))) where the smoothed prediction is right.

    MACER, Zhai et al. 2020. p = mean over the K noisy views of softmax(beta * logits), p_other its largest entry except y,
    right means p_y > p_other. The bracket is 2/sigma times the certified radius. lambda = 16, gamma = 8 and beta = 16 are
    from MACER. Phi^-1(p_y) is computed as -Phi^-1(1 - p_y), 1 - p_y summed over the other classes, to be accurate near 1.
    """

    lambda_: float = 16.0
    gamma: float = 8.0
    beta: float = 16.0
    first_noisy: int = 1
    copies: int = 2
    sigma: float = 0.5
    name: ClassVar[str] = "macer"

    def __post_init__(self) -> None:
        finite_in("method.macer_lambda", self.lambda_, 0.0, _LARGEST_WEIGHT, remedy="MACER uses 16")
        finite_in("method.macer_gamma", self.gamma, 0.0, 9.5, remedy="MACER uses 8")
        finite_in("method.macer_beta", self.beta, 0.0, _LARGEST_WEIGHT, open_low=True, remedy="MACER uses 16")

    def for_views(self, count: int, copies: int, sigma: float | None) -> "Macer":
        """Require noisy copies, whose sigma scales the radius."""
        _require_copies(self.name, copies)
        assert sigma is not None
        return replace(self, first_noisy=count - copies, copies=copies, sigma=float(sigma))

    def remarks(self) -> tuple[str, ...]:
        """Warn about few copies: their class probabilities are coarse."""
        if self.copies >= _FEW_COPIES_FOR_MACER:
            return ()
        return (
            f"method.copies is {self.copies}: MACER estimates class probabilities from the noisy copies; the original has 16",
        )

    def __call__(self, logits: Tensor, label: Tensor) -> Tensor:
        """``[R, classes] -> scalar``."""
        p = F.softmax(self.beta * logits[self.first_noisy :], dim=1).mean(dim=0)
        is_label = _is_label(logits, label)
        p_y, others = torch.where(is_label, p, 0.0).sum(), torch.where(is_label, 0.0, p)
        margin = -_quantile(others.sum()) - _quantile(others.amax())
        hinge = torch.clamp(self.gamma - margin, min=0.0)
        return self.lambda_ * self.sigma / 2 * torch.where(p_y > others.amax(), hinge, 0.0)


@dataclass(frozen=True)
class Reconstruction:
    """weight * mean_j E_j, the reconstruction errors of the views: one more column of the outputs of StoBatch's network.

    `columns` is the number of columns after the logits that the network of this objective has.
    """

    weight: float = 1.0
    name: ClassVar[str] = "reconstruction"
    columns: ClassVar[int] = 1

    def __post_init__(self) -> None:
        finite_in("method.reconstruction_weight", self.weight, 0.0, _LARGEST_WEIGHT, remedy="1 is typical")

    def __call__(self, outputs: Tensor, label: Tensor) -> Tensor:
        """``[R, classes + 1] -> scalar``."""
        return self.weight * outputs[:, -1].mean()


def _quantile(p: Tensor) -> Tensor:
    """Return Phi^-1, finite for p = 0 and p = 1."""
    quantile: Tensor = torch.special.ndtri(torch.clamp(p, _SMALLEST_PROBABILITY, 1.0 - _SMALLEST_PROBABILITY))
    return quantile


def _require_copies(regulariser: str, copies: int) -> None:
    if copies < 1:
        raise ConfigError(
            f"regulariser {regulariser} needs noisy copies; use views gaussian or smoothadv with method.copies >= 1"
        )
