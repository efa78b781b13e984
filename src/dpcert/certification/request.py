"""How to certify: the smoothing law, the votes, and what alpha is about."""

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from .._validate import finite_in, integer_in
from ..errors import ConfigError
from ..rng import Purpose
from ..store.metrics import INPUT
from ..store.records import CertificateRow, InnerNoiseRow
from . import smooth
from .laws import Smoothing
from .smooth import Counter

PER_INPUT, SIMULTANEOUS = "per input", "simultaneous"


@dataclass(frozen=True)
class Request:
    """How to certify: CERTIFY's n0, n and alpha at one sigma.

    Alpha is per input, unless `together` gives the number of inputs that share it. Each then has alpha / together, and by
    the union bound all hold with probability 1 - alpha. It needs no independence, so a shared noise bank is fine.
    """

    sigma: float
    n0: int = 100
    n: int = 10_000
    alpha: float = 0.001
    fresh_noise: bool = False
    skip_misclassified: bool = False
    together: int | None = None
    smoothing: Smoothing | None = None

    @classmethod
    def under(cls, law: Smoothing, *settings: Any, **others: Any) -> "Request":
        """Return a request under any law; noise on the image is described by sigma alone."""
        return replace(cls(law.sigma, *settings, **others), smoothing=None if law.site == INPUT else law)

    @property
    def law(self) -> Smoothing:
        """The smoothing law."""
        return Smoothing(self.sigma) if self.smoothing is None else self.smoothing

    @property
    def row_kind(self) -> type[CertificateRow]:
        """The rows of this request: with the votes for all classes unless noise is on the image."""
        return CertificateRow if self.smoothing is None else InnerNoiseRow

    def __post_init__(self) -> None:
        finite_in("sigma", self.sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
        integer_in("n0", self.n0, 1, 10**9)
        integer_in("n", self.n, 1, 10**9)
        finite_in("alpha", self.alpha, 0.0, 0.5, open_low=True, open_high=True, remedy="the paper uses 0.001")
        if self.together is not None:
            integer_in("together", self.together, 1)
        if self.smoothing is not None and self.smoothing.sigma != self.sigma:
            raise ConfigError(f"sigma is {self.sigma:g}, the smoothing law is worth {self.smoothing.sigma:g}; omit sigma")

    @property
    def alpha_each(self) -> float:
        """The failure probability of one certificate."""
        return self.alpha if self.together is None else self.alpha / self.together

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that are stored with a certificate."""
        others = ("together", "smoothing")
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}
        settings |= {} if self.smoothing is None else {"smoothing": self.smoothing.facts}
        if self.together is None:
            return {**settings, "alpha_is": PER_INPUT}
        return {**settings, "alpha_is": SIMULTANEOUS, "together": self.together, "alpha_each": self.alpha_each}

    @property
    def votes(self) -> dict[Purpose, int]:
        """The number of noise samples for each purpose."""
        return {Purpose.CERTIFY_SELECTION: self.n0, Purpose.CERTIFY_ESTIMATION: self.n}

    def certify(self, counter: Counter, x: Tensor, label: int, index: int) -> smooth.Certificate:
        """Run CERTIFY for one example."""
        only_if = label if self.skip_misclassified else None
        return smooth.certify(counter, x, self.n0, self.n, self.alpha_each, index, only_if)

    def robust_at(self, counter: Counter, x: Tensor, radius: float, index: int) -> smooth.Decision:
        """Decide whether one example is robust at `radius`."""
        return smooth.robust_at(counter, x, radius, self.n0, self.n, self.alpha_each, index)
