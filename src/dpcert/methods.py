"""The methods of the paper as rows of one table: (views, regulariser, clip rule), and nothing else.

| method           | views    | regulariser | clip | in the paper                          |
|------------------|----------|-------------|------|---------------------------------------|
| regular          | none     | none        | none | Section 4.1, non-private baseline     |
| regular-gaussian | gaussian | none        | none | Cohen et al. 2019, upper bound        |
| dpsgd            | none     | none        | flat | Algorithm 1                           |
| psac             | none     | none        | psac | Section 4.1, Appendix on PSAC         |
| dp-gaussian      | gaussian | none        | flat | Algorithm 2, Table "Instantiations"   |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from . import losses
from ._validate import one_of
from .errors import ConfigError
from .privacy.clipping import CLIP_RULES, ClipRule
from .views import Gaussian, Original


class Views(Protocol):
    """How the views of an example are made."""

    @property
    def name(self) -> str:
        """The word for it in configs."""

    @property
    def sigma(self) -> float | None:
        """Standard deviation of the noisy views; None without any."""

    @property
    def copies(self) -> int:
        """K, the number of noisy copies (and of noises drawn)."""

    @property
    def count(self) -> int:
        """R, the number of views of an example."""

    def __call__(self, model: nn.Module, x: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """``x [b, ...]``, standard normal ``noise [b, K, ...]`` -> ``[b, R, ...]``."""


Regulariser = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Method:
    """One way to train: views, a regulariser of one example's logits (or None), and a clip rule."""

    views: Views
    regulariser: Regulariser | None = None
    clip: ClipRule | str = "flat"
    name: str = "custom"

    def __post_init__(self) -> None:
        if isinstance(self.clip, str):
            object.__setattr__(self, "clip", CLIP_RULES[one_of("clip rule", self.clip, CLIP_RULES)])

    @property
    def clip_rule(self) -> ClipRule:
        """The clip rule, as an object."""
        assert not isinstance(self.clip, str)
        return self.clip

    def loss(self, logits: Tensor, label: Tensor) -> Tensor:
        """The loss of one example: cross-entropy over its views, plus the regulariser."""
        value = losses.cross_entropy(logits, label)
        return value if self.regulariser is None else value + self.regulariser(logits, label)


@dataclass(frozen=True)
class Row:
    """A row of the table: the words for each part, and where the paper has it."""

    views: str
    regulariser: str
    clip: str
    source: str


METHODS: dict[str, Row] = {
    "regular": Row("none", "none", "none", "Section 4.1 (non-private baseline)"),
    "regular-gaussian": Row("gaussian", "none", "none", "Cohen et al. 2019 (non-private upper bound)"),
    "dpsgd": Row("none", "none", "flat", "Algorithm 1"),
    "psac": Row("none", "none", "psac", "Section 4.1, Appendix on PSAC"),
    "dp-gaussian": Row("gaussian", "none", "flat", "Algorithm 2"),
}

VIEWS = ("none", "gaussian")
REGULARISERS: dict[str, Regulariser | None] = {"none": None}


def make_views(name: str, *, sigma: float, copies: int, keep_original: bool) -> Views:
    """Views by their word."""
    one_of("views", name, VIEWS)
    return Original() if name == "none" else Gaussian(sigma, copies, keep_original)


def combine(
    *, views: str, regulariser: str, clip: str, sigma: float, copies: int, keep_original: bool, name: str = "custom"
) -> Method:
    """Any combination of the parts."""
    return Method(
        views=make_views(views, sigma=sigma, copies=copies, keep_original=keep_original),
        regulariser=REGULARISERS[one_of("regulariser", regulariser, REGULARISERS)],
        clip=CLIP_RULES[one_of("clip rule", clip, CLIP_RULES)],
        name=name,
    )


def method(name: str, *, sigma: float = 0.5, copies: int = 2, keep_original: bool = True) -> Method:
    """A named method of the paper. `sigma` is the noise of its views (unused by methods without noisy views)."""
    if name not in METHODS:
        raise ConfigError(f"method {name!r} is unknown; choose one of: {', '.join(METHODS)}")
    row = METHODS[name]
    return combine(
        views=row.views,
        regulariser=row.regulariser,
        clip=row.clip,
        sigma=sigma,
        copies=copies,
        keep_original=keep_original,
        name=name,
    )
