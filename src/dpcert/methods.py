"""The methods of the paper as rows of one table: (views, regulariser, clip rule), and nothing else.

| method                    | views     | regulariser | clip | in the paper                               |
|---------------------------|-----------|-------------|------|--------------------------------------------|
| regular                   | none      | none        | none | Section 4.1, non-private baseline          |
| regular-gaussian          | gaussian  | none        | none | Cohen et al. 2019, non-private upper bound |
| dpsgd                     | none      | none        | flat | Algorithm 1                                |
| psac                      | none      | none        | psac | Section 4.1, Appendix on PSAC              |
| dp-gaussian               | gaussian  | none        | flat | Algorithm 2                                |
| dp-smoothadv              | smoothadv | none        | flat | Algorithm 2, adversarial augmentation      |
| dp-stability              | gaussian  | stability   | flat | Algorithm 2, stability training            |
| dp-macer                  | gaussian  | macer       | flat | Algorithm 2, MACER training                |
| dp-gaussian+psac          | gaussian  | none        | psac | Appendix, ablation of PSAC                 |
| dp-smoothadv+psac         | smoothadv | none        | psac | Appendix, ablation of PSAC                 |
| dp-gaussian+consistency   | gaussian  | consistency | flat | Appendix, ablation of consistency          |
| dp-smoothadv+consistency  | smoothadv | consistency | flat | Appendix, ablation of consistency          |

The systems that the paper could only quote are rows of a second table, `PRIOR`. They need a model with noise inside
(`models.systems`), and what their loss sees of ONE example are still the outputs for its views.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from . import losses
from ._validate import one_of
from .errors import ConfigError
from .models.autoencoder import Reconstructing
from .privacy.clipping import CLIP_RULES, ClipRule
from .views import Gaussian, Inner, InnerOnce, Original, SharedStoBatch, SmoothAdv, StoBatch


class Views(Protocol):
    """How the views of an example are made. Views that change during training also have ``at(epoch) -> Views``.

    Views are images, and their noise has the shape of an image, unless the views have ``view_shape(model, input_shape)`` and
    ``noise_shape(model, input_shape)``.
    """

    @property
    def name(self) -> str:
        """Its name in configs."""

    @property
    def sigma(self) -> float | None:
        """Standard deviation of the noisy views; None without any."""

    @property
    def copies(self) -> int:
        """K, the number of noisy copies (and of noise samples)."""

    @property
    def count(self) -> int:
        """R, the number of views of an example."""

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``x [b, ...]``, standard normal ``noise [b, K, ...]`` -> ``[b, R, ...]``."""


def noise_shape(views: Views, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the noise of one copy."""
    own = getattr(views, "noise_shape", None)
    return tuple(input_shape) if own is None else own(model, tuple(input_shape))


def view_shape(views: Views, model: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one view."""
    own = getattr(views, "view_shape", None)
    return tuple(input_shape) if own is None else own(model, tuple(input_shape))


Regulariser = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Method:
    """One way to train: views, a regulariser of one example's logits (or None), and a clip rule.

    If the regulariser has ``for_views(count, copies, sigma)``, it is called here, to learn which rows are noisy copies. If it
    has `columns`, the network that is differentiated has that many columns after the logits (see `network`).
    """

    views: Views
    regulariser: Regulariser | None = None
    clip: ClipRule | str = "flat"
    name: str = "custom"

    def __post_init__(self) -> None:
        if isinstance(self.clip, str):
            object.__setattr__(self, "clip", CLIP_RULES[one_of("clip rule", self.clip, CLIP_RULES)])
        if self.views.count < 1:
            raise ConfigError("the method has no views; set method.keep_original to true or method.copies to 1 or more")
        for_views = getattr(self.regulariser, "for_views", None)
        if for_views is not None:
            object.__setattr__(self, "regulariser", for_views(self.views.count, self.views.copies, self.views.sigma))

    @property
    def clip_rule(self) -> ClipRule:
        """The clip rule, as an object."""
        assert not isinstance(self.clip, str)
        return self.clip

    @property
    def remarks(self) -> tuple[str, ...]:
        """Settings that are allowed but probably unintended; shown as warnings before training."""
        remarks = getattr(self.regulariser, "remarks", None)
        return () if remarks is None else tuple(remarks())

    def views_at(self, epoch: float) -> Views:
        """Return the views at `epoch` (an adversary's radius may be ramped up)."""
        at = getattr(self.views, "at", None)
        views: Views = self.views if at is None else at(epoch)
        return views

    @property
    def columns(self) -> int:
        """The number of columns after the logits that the loss needs."""
        return int(getattr(self.regulariser, "columns", 0))

    def network(self, model: nn.Module) -> nn.Module:
        """Return what the engine differentiates: the model, or the model with the columns that the loss needs.

        It has the parameters of the model, in the same order.
        """
        return Reconstructing(model) if self.columns else model

    def loss(self, outputs: Tensor, label: Tensor) -> Tensor:
        """Return the loss of one example: cross-entropy over its views, plus the regulariser, which sees all columns."""
        logits = outputs[:, : -self.columns] if self.columns else outputs
        value = losses.cross_entropy(logits, label)
        return value if self.regulariser is None else value + self.regulariser(outputs, label)


@dataclass(frozen=True)
class Row:
    """A row of the table: the name of each part, the source in the paper, and the cost of a step relative to DPSGD.

    `cost` is measured (benchmarks/methods.py: MNIST's CNN, B = 512, K = 2, two CPU cores); it grows with K.
    """

    views: str
    regulariser: str
    clip: str
    source: str
    cost: float
    system: str | None = None  # the `model.system` that the method needs

    @property
    def noise_inside(self) -> bool:
        """Whether the views have noise inside the model, in every pass."""
        return self.views not in (Original.name, Gaussian.name, SmoothAdv.name)


METHODS: dict[str, Row] = {
    "regular": Row("none", "none", "none", "Section 4.1 (non-private baseline)", 1.0),
    "regular-gaussian": Row("gaussian", "none", "none", "Cohen et al. 2019 (non-private upper bound)", 2.6),
    "dpsgd": Row("none", "none", "flat", "Algorithm 1", 1.0),
    "psac": Row("none", "none", "psac", "Section 4.1, Appendix on PSAC", 1.0),
    "dp-gaussian": Row("gaussian", "none", "flat", "Algorithm 2", 2.6),
    "dp-smoothadv": Row("smoothadv", "none", "flat", "Algorithm 2, adversarial augmentation", 5.6),
    "dp-stability": Row("gaussian", "stability", "flat", "Algorithm 2, stability training", 2.7),
    "dp-macer": Row("gaussian", "macer", "flat", "Algorithm 2, MACER training", 2.7),
    "dp-gaussian+psac": Row("gaussian", "none", "psac", "Appendix, ablation of PSAC", 2.6),
    "dp-smoothadv+psac": Row("smoothadv", "none", "psac", "Appendix, ablation of PSAC", 5.6),
    "dp-gaussian+consistency": Row("gaussian", "consistency", "flat", "Appendix, ablation of consistency", 2.7),
    "dp-smoothadv+consistency": Row("smoothadv", "consistency", "flat", "Appendix, ablation of consistency", 5.6),
}

PRIOR: dict[str, Row] = {  # cost: processor time of views and gradients on one core, K = 2
    "pixeldp": Row("inner", "none", "flat", "Lecuyer et al. 2019, trained with DP-SGD", 2.6, "pixeldp"),
    "securesgd": Row("inner", "none", "flat", "Phan et al. 2019 (SecureSGD), sound", 2.6, "securesgd"),
    "dp-denoiser": Row("gaussian", "none", "flat", "TransDenoiser, without its noise credit", 24.0, "denoiser"),
    "stobatch": Row("stobatch", "reconstruction", "flat", "Phan et al. 2020 (StoBatch), sound", 14.0, "stobatch"),
    "securesgd-as-published": Row("inneronce", "none", "batchmean", "SecureSGD, as released", 2.6, "securesgd"),
    "stobatch-as-published": Row("stobatchonce", "reconstruction", "unperturbed", "StoBatch, as released", 14.0, "stobatch"),
}
ALL_METHODS = METHODS | PRIOR

VIEWS: dict[str, Callable[..., Views]] = {
    "none": Original,
    **{kind.name: kind for kind in (Gaussian, SmoothAdv, Inner, InnerOnce, StoBatch, SharedStoBatch)},
}
REGULARISERS: dict[str, Callable[..., Regulariser] | None] = {
    "none": None,
    "stability": losses.Stability,
    "consistency": losses.Consistency,
    "macer": losses.Macer,
    "reconstruction": losses.Reconstruction,
}


def settings_of(part: Any) -> dict[str, str]:
    """Return the settings of a part by config key, ``{"stability_gamma": "gamma"}``: the part's name and a field name."""
    excluded = {"sigma", "copies", "keep_original", "first_noisy", "strength"}  # set by other keys, the views or the epoch
    names = [field.name for field in dataclasses.fields(part) if field.name not in excluded]
    return {f"{part.name}_{name.rstrip('_')}": name for name in names}


def combine(
    *,
    views: str,
    regulariser: str,
    clip: str,
    sigma: float,
    copies: int,
    keep_original: bool,
    name: str = "custom",
    settings: Mapping[str, Any] | None = None,
) -> Method:
    """Combine any parts into a method; `settings` are the parts' settings by config key, e.g. ``{"stability_gamma": 1.0}``."""
    known: set[str] = set()

    def build(part: Any, **common: Any) -> Any:
        if part is None:
            return None
        keys = settings_of(part)
        known.update(keys)
        return part(**common, **{field: (settings or {})[key] for key, field in keys.items() if key in (settings or {})})

    noisy = {} if views == "none" else {"sigma": sigma, "copies": copies, "keep_original": keep_original}
    method = Method(
        views=build(VIEWS[one_of("views", views, VIEWS)], **noisy),
        regulariser=build(REGULARISERS[one_of("regulariser", regulariser, REGULARISERS)]),
        clip=build(type(CLIP_RULES[one_of("clip rule", clip, CLIP_RULES)])),
        name=name,
    )
    unused = sorted(set(settings or {}) - known)
    if unused:
        raise ConfigError(
            f"method.{unused[0]} is set, but views {views}, regulariser {regulariser}, clip {clip} do not use it; remove it"
        )
    return method


def method(name: str, *, sigma: float = 0.5, copies: int = 2, keep_original: bool | None = None, **settings: float) -> Method:
    """Return a method by name. `sigma` is the noise of its views (unused by methods without noisy views).

    `keep_original` adds a view without noise. It is the default for the paper's methods, and not for systems with noise inside.

    `settings` are those of its parts, e.g. ``stability_gamma=1.0`` or ``smoothadv_radius=0.5``.
    """
    row = ALL_METHODS[one_of("method", name, ALL_METHODS)]
    keep_original = not row.noise_inside if keep_original is None else keep_original
    return combine(
        views=row.views,
        regulariser=row.regulariser,
        clip=row.clip,
        sigma=sigma,
        copies=copies,
        keep_original=keep_original,
        name=name,
        settings=settings,
    )
