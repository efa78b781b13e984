"""Certificates for a whole test set: row by row to disk, resumable at any example."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in
from ..errors import DataError, RunError
from ..progress import Progress, silent
from ..rng import Purpose, key_from_seed, secret_key
from ..store.growing import append_missing_rows
from ..store.records import CertificateRow, RobustRow
from ..workers import parallel_map
from . import smooth
from .metrics import Estimate, average_certified_radius, certified_accuracy, largest_radius
from .smooth import Counter
from .votes import Voter

PER_INPUT, SIMULTANEOUS = "per input", "simultaneous"
_NO_LABEL = -2  # neither a class nor "abstain"


@dataclass(frozen=True)
class Certificates:
    """Certificates by example, as tensors. `count` is -1 where no estimation vote was cast.

    `alpha` bounds the failure of each certificate, or of any of them where they are `simultaneous`.
    """

    predict: Tensor
    radius: Tensor
    correct: Tensor
    count: Tensor
    n: int
    p_lower: Tensor
    alpha: float | None = None
    simultaneous: bool = False
    sigma: float | None = None

    @property
    def acr(self) -> float:
        """Average certified radius: mean of radius * [prediction right]."""
        return self.acr_estimate.value

    @property
    def acr_estimate(self) -> Estimate:
        """ACR with its 95 % interval."""
        largest = None
        if self.sigma is not None and self.alpha is not None:
            share = self.alpha / len(self.radius) if self.simultaneous else self.alpha
            largest = largest_radius(self.n, share, self.sigma)
        return average_certified_radius(self.radius.numpy(), self.correct.numpy(), largest)

    def certified_accuracy(self, radius: float) -> float:
        """Share of examples that are right and certified at `radius`."""
        return self.certified_accuracy_estimate(radius).value

    def certified_accuracy_estimate(self, radius: float) -> Estimate:
        """Certified accuracy with its 95 % interval."""
        return certified_accuracy(self.radius.numpy(), self.correct.numpy(), radius)

    @property
    def abstained(self) -> int:
        """How many examples got no certificate."""
        return int((self.predict == smooth.ABSTAIN).sum())


@dataclass(frozen=True)
class Request:
    """How to certify: CERTIFY's n0, n and alpha at one sigma.

    Alpha is per input, unless `together` says how many inputs share it: each then has alpha / together, and by the union
    bound (which asks for no independence, so a shared bank of noise is no harm) all hold with probability 1 - alpha.
    """

    sigma: float
    n0: int = 100
    n: int = 10_000
    alpha: float = 0.001
    fresh_noise: bool = False
    skip_misclassified: bool = False
    together: int | None = None

    def __post_init__(self) -> None:
        finite_in("sigma", self.sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
        integer_in("n0", self.n0, 1, 10**9)
        integer_in("n", self.n, 1, 10**9)
        finite_in("alpha", self.alpha, 0.0, 0.5, open_low=True, open_high=True, remedy="the paper uses 0.001")
        if self.together is not None:
            integer_in("together", self.together, 1)

    @property
    def alpha_each(self) -> float:
        """The probability with which one certificate may fail."""
        return self.alpha if self.together is None else self.alpha / self.together

    @property
    def facts(self) -> dict[str, Any]:
        """What a certificate names about how it was made."""
        own = {name: value for name, value in asdict(self).items() if name != "together"}
        if self.together is None:
            return {**own, "alpha_is": PER_INPUT}
        return {**own, "alpha_is": SIMULTANEOUS, "together": self.together, "alpha_each": self.alpha_each}

    @property
    def votes(self) -> dict[Purpose, int]:
        """How many noises each purpose needs."""
        return {Purpose.CERTIFY_SELECTION: self.n0, Purpose.CERTIFY_ESTIMATION: self.n}

    def certify(self, counter: Counter, x: Tensor, label: int, index: int) -> smooth.Certificate:
        """CERTIFY for one example."""
        only_if = label if self.skip_misclassified else None
        return smooth.certify(counter, x, self.n0, self.n, self.alpha_each, index, only_if)

    def robust_at(self, counter: Counter, x: Tensor, radius: float, index: int) -> smooth.Decision:
        """The question "is it robust at `radius`?" for one example."""
        return smooth.robust_at(counter, x, radius, self.n0, self.n, self.alpha_each, index)


@dataclass(frozen=True)
class Decisions:
    """Answers to "is it robust at `radius`?" by input: `robust` is 1, 0, or -1 where the votes did not tell."""

    predict: Tensor
    robust: Tensor
    votes: Tensor
    radius: float
    alpha: float


class SmoothedClassifier:
    """The smoothed classifier g(x) = argmax_c P[f(x + N(0, sigma^2 I)) = c] of any model f that returns logits.

    Prepared once (the model is copied, cut and compiled on first use), then called as often as you like. Every call draws
    its own noise from the operating system, unless it is given a `seed`.
    """

    def __init__(self, model: nn.Module, sigma: float, *, fresh_noise: bool = False, batch: int | None = None) -> None:
        Request(sigma)  # checks sigma
        self.sigma, self.fresh_noise = sigma, fresh_noise
        self._voter = Voter(model, sigma, batch)

    def certify(
        self,
        x: Tensor,
        y: Tensor | Sequence[int] | None = None,
        *,
        n0: int = 100,
        n: int = 10_000,
        alpha: float = 0.001,
        seed: int | None = None,
        skip_misclassified: bool = False,
        simultaneous: bool = False,
        progress: Progress = silent,
    ) -> Certificates:
        """CERTIFY for each input ``x[i]``; see `dpcert.certify`. Without labels `y` none counts as correct."""
        x = check_inputs(x)
        together = len(x) if simultaneous else None
        request = Request(self.sigma, n0, n, alpha, self.fresh_noise, skip_misclassified, together)
        if y is None and skip_misclassified:
            raise DataError("skip_misclassified needs the labels; give y")
        labels = torch.full((len(x),), _NO_LABEL) if y is None else torch.as_tensor(y).cpu()
        if labels.shape != (len(x),):
            raise DataError(f"y has shape {list(labels.shape)}, must hold one label for each of the {len(x)} inputs")
        found: list[smooth.Certificate] = []
        with self.counters(x, request, _key(seed)) as counters:
            work = parallel_map(counters, lambda counter, i: request.certify(counter, x[i], int(labels[i]), i), range(len(x)))
            for certificate in work:
                found.append(certificate)
                progress(len(found), len(x))
        predicted = torch.tensor([c.predict for c in found])
        return Certificates(
            predict=predicted,
            radius=torch.tensor([c.radius for c in found], dtype=torch.float64),
            correct=predicted == labels,
            count=torch.tensor([-1 if c.count is None else c.count for c in found]),
            n=n,
            p_lower=torch.tensor([c.p_lower for c in found], dtype=torch.float64),
            alpha=alpha,
            simultaneous=simultaneous,
            sigma=self.sigma,
        )

    def predict(self, x: Tensor, *, n: int = 10_000, alpha: float = 0.001) -> Tensor:
        """PREDICT for each input: a class, or -1 = abstain. A wrong class has probability at most `alpha`."""
        Request(self.sigma, 1, n, alpha)
        x = check_inputs(x)
        with self._voter.counters(x, secret_key(), {}, fresh_noise=True) as counters:
            work = parallel_map(counters, lambda counter, i: smooth.predict(counter, x[i], n, alpha, i), range(len(x)))
            return torch.tensor(list(work))

    def robust_at(
        self, x: Tensor, radius: float, *, n0: int = 100, n: int = 10_000, alpha: float = 0.001, seed: int | None = None
    ) -> Decisions:
        """Whether the predicted class is constant within `radius` of each input; votes stop as soon as the answer is clear."""
        x = check_inputs(x)
        check_radius(radius, self.sigma)
        request = Request(self.sigma, n0, n, alpha, self.fresh_noise)
        with self.counters(x, request, _key(seed)) as counters:
            work = parallel_map(counters, lambda counter, i: request.robust_at(counter, x[i], radius, i), range(len(x)))
            found = list(work)
        return Decisions(
            predict=torch.tensor([d.predict for d in found]),
            robust=torch.tensor([_answer(d) for d in found]),
            votes=torch.tensor([d.votes for d in found]),
            radius=radius,
            alpha=alpha,
        )

    def counters(self, x: Tensor, request: Request, key: bytes) -> AbstractContextManager[list[Counter]]:
        """Counters for the inputs `x`, one a worker, whose noise is a function of `key`."""
        return self._voter.counters(x, key, request.votes, fresh_noise=self.fresh_noise)


def _key(seed: int | None) -> bytes:
    return secret_key() if seed is None else key_from_seed(seed, "certify")


def _answer(decision: smooth.Decision) -> int:
    return -1 if decision.robust is None else int(decision.robust)


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor | Sequence[int],
    *,
    sigma: float,
    n0: int = 100,
    n: int = 10_000,
    alpha: float = 0.001,
    seed: int | None = None,
    fresh_noise: bool = False,
    skip_misclassified: bool = False,
    simultaneous: bool = False,
    batch: int | None = None,
    progress: Progress = silent,
) -> Certificates:
    """CERTIFY for each input ``x[i]`` of any classifier that returns logits.

    `alpha` is per input; with `simultaneous` it is divided by the number of inputs, and all certificates of this call hold
    together with probability 1 - alpha.

    The noise comes from the operating system unless `seed` is given. All inputs share one bank of it where the model
    allows (each certificate is valid on its own); `fresh_noise` draws it anew for each input. `skip_misclassified` casts
    no estimation votes where the selected class is not the label.
    """
    classifier = SmoothedClassifier(model, sigma, fresh_noise=fresh_noise, batch=batch)
    return classifier.certify(
        x,
        y,
        n0=n0,
        n=n,
        alpha=alpha,
        seed=seed,
        skip_misclassified=skip_misclassified,
        simultaneous=simultaneous,
        progress=progress,
    )


def predict(
    model: nn.Module, x: Tensor, *, sigma: float, n: int = 10_000, alpha: float = 0.001, batch: int | None = None
) -> Tensor:
    """PREDICT for each input: the smoothed classifier's class, -1 = abstain. Always fresh noise."""
    return SmoothedClassifier(model, sigma, batch=batch).predict(x, n=n, alpha=alpha)


def check_inputs(x: Tensor) -> Tensor:
    """Finite float inputs, one a row."""
    x = torch.as_tensor(x)
    if x.ndim < 2 or len(x) == 0:
        raise DataError(f"x has shape {list(x.shape)}, must be [inputs, ...] with at least one input")
    if not x.is_floating_point():
        raise DataError(f"x is {x.dtype}, must be float; divide uint8 images by 255")
    if not bool(torch.isfinite(x).all()):
        raise DataError("x holds a NaN or an infinity; a certificate of it would mean nothing")
    return x.float()


def certify_to_file(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    indices: Sequence[int],
    path: Path,
    request: Request,
    *,
    key: bytes,
    batch: int | None = None,
    progress: Progress = silent,
) -> list[CertificateRow]:
    """Certify ``x[i]`` for i in `indices`, a row each in `path`; examples already there are not done again.

    The noise is a function of the key (and of i, with fresh noise): a run that was cut anywhere goes on to the same rows.
    """

    def row(counter: Counter, index: int) -> CertificateRow:
        began, label = time.perf_counter(), int(y[index])
        c = request.certify(counter, x[index], label, index)
        seconds = time.perf_counter() - began
        return CertificateRow(index, label, c.predict, c.radius, int(c.predict == label), seconds, c.count, c.n, c.p_lower)

    def earned(row: CertificateRow) -> float:
        return row.radius if row.correct else 0.0

    classifier = SmoothedClassifier(model, request.sigma, fresh_noise=request.fresh_noise, batch=batch)
    with classifier.counters(x[list(indices)], request, key) as counters:
        return append_missing_rows(
            CertificateRow, path, indices, lambda todo: parallel_map(counters, row, todo), progress, mean_of=("acr", earned)
        )


def decide_to_file(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    indices: Sequence[int],
    path: Path,
    request: Request,
    radius: float,
    *,
    key: bytes,
    batch: int | None = None,
    progress: Progress = silent,
) -> list[RobustRow]:
    """Answer "is it robust at `radius`?" for ``x[i]``, i in `indices`, a row each in `path`; resumable like certificates."""
    check_radius(radius, request.sigma)

    def row(counter: Counter, index: int) -> RobustRow:
        began, label = time.perf_counter(), int(y[index])
        d = request.robust_at(counter, x[index], radius, index)
        return RobustRow(index, label, d.predict, _answer(d), int(d.predict == label), time.perf_counter() - began, d.votes)

    def votes(row: RobustRow) -> float:
        return float(row.votes)

    classifier = SmoothedClassifier(model, request.sigma, fresh_noise=request.fresh_noise, batch=batch)
    with classifier.counters(x[list(indices)], request, key) as counters:
        return append_missing_rows(
            RobustRow, path, indices, lambda todo: parallel_map(counters, row, todo), progress, mean_of=("votes each", votes)
        )


def check_radius(radius: float, sigma: float) -> None:
    """Refuse a radius that needs no votes, or that no number of votes can show (p_A would have to be 1)."""
    remedy = f"beyond 8 sigma nothing can be shown, at 0 ask for certificates (sigma is {sigma:g})"
    finite_in("radius", radius, 0.0, 8.0 * sigma, open_low=True, remedy=remedy)


def require_subset(size: int, examples: int) -> None:
    """Refuse a number of examples the test set does not have."""
    if not 1 <= examples <= size:
        raise RunError(f"--examples is {examples}, the test set has {size}; give 1 to {size} or all")
