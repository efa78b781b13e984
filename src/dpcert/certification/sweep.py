"""Certificates for a whole test set, written row by row and resumable at any example."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .._validate import finite_in
from ..errors import DataError, RunError
from ..progress import Progress, silent
from ..rng import Purpose, key_from_seed, secret_key
from ..scale.shards import SharedPass, Wire
from ..scale.world import ALONE, World
from ..store.growing import append_missing_rows, append_missing_rows_to_all
from ..store.metrics import INPUT
from ..store.records import CertificateRow, InnerNoiseRow, RobustRow
from ..workers import parallel_map
from . import smooth
from .bounds import pixeldp_radius
from .chosen import chosen
from .heads import heads_in
from .laws import OnImages, Smoothing, law_for, whitened
from .metrics import Estimate, average_certified_radius, certified_accuracy, largest_radius
from .request import Request
from .smooth import Counter
from .votes import FreshVotes, OneInput, Voter

_NO_LABEL = -2  # neither a class nor "abstain"
_CHECKED_BYTES = 64 << 20  # of inputs at a time
_PREPARED_WITH = 512  # inputs, if the hidden values of all of them could be too many to hold


@dataclass(frozen=True)
class Certificates:
    """Certificates by example, as tensors. `count` is -1 if no estimation votes were cast.

    `alpha` bounds the failure probability of each certificate, or of any of them if they are `simultaneous`.
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
        """Average certified radius: mean of radius * [correct]."""
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
        """Return the share of examples that are correct and certified at `radius`."""
        return self.certified_accuracy_estimate(radius).value

    def certified_accuracy_estimate(self, radius: float) -> Estimate:
        """Return the certified accuracy with its 95 % interval."""
        return certified_accuracy(self.radius.numpy(), self.correct.numpy(), radius)

    @property
    def abstained(self) -> int:
        """The number of examples without a certificate."""
        return int((self.predict == smooth.ABSTAIN).sum())


@dataclass(frozen=True)
class Decisions:
    """Whether each input is robust at `radius`: `robust` is 1, 0, or -1 if the votes were not enough."""

    predict: Tensor
    robust: Tensor
    votes: Tensor
    radius: float
    alpha: float


class SmoothedClassifier:
    """The smoothed classifier g(x) = argmax_c P[f(x + N(0, sigma^2 I)) = c] of any model f that returns logits.

    Without `sigma`, the noise is that inside the model, a `NoisyModel`: g(x) = argmax_c P[f(x, noise) = c]. `smoothing` is
    either law as a value. `sigma` is then what the law is worth: all radii are sigma * Phi^-1(p).

    The model is copied, split and compiled once, on first use. Every call draws new noise from the operating system, unless
    it gets a `seed`.
    """

    def __init__(
        self,
        model: nn.Module,
        sigma: float | None = None,
        *,
        smoothing: Smoothing | None = None,
        fresh_noise: bool = False,
        batch: int | None = None,
        world: World = ALONE,
    ) -> None:
        self.smoothing, self.fresh_noise = law_for(model, sigma, smoothing), fresh_noise
        self.sigma = self.smoothing.sigma
        Request(self.sigma)  # checks sigma
        self._whitened = whitened(model, self.smoothing)
        self._voter = Voter(self._whitened.voter, self._whitened.sigma, batch, world)

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
        """Run CERTIFY for each input ``x[i]``; see `dpcert.certify`. Without labels `y`, no prediction counts as correct."""
        x = check_inputs(x)
        together = len(x) if simultaneous else None
        request = Request.under(self.smoothing, n0, n, alpha, self.fresh_noise, skip_misclassified, together)
        if y is None and skip_misclassified:
            raise DataError("skip_misclassified needs labels; pass y")
        labels = torch.full((len(x),), _NO_LABEL) if y is None else torch.as_tensor(y).cpu()
        if labels.shape != (len(x),):
            raise DataError(f"y has shape {list(labels.shape)}, must have one label for each of the {len(x)} inputs")
        certificates: list[smooth.Certificate] = []
        with self.counters(x, request, _key(seed)) as counters:
            work = parallel_map(counters, lambda counter, i: request.certify(counter, x[i], int(labels[i]), i), range(len(x)))
            for certificate in work:
                certificates.append(certificate)
                progress(len(certificates), len(x))
        predicted = torch.tensor([c.predict for c in certificates])
        return Certificates(
            predict=predicted,
            radius=torch.tensor([c.radius for c in certificates], dtype=torch.float64),
            correct=predicted == labels,
            count=torch.tensor([-1 if c.count is None else c.count for c in certificates]),
            n=n,
            p_lower=torch.tensor([c.p_lower for c in certificates], dtype=torch.float64),
            alpha=alpha,
            simultaneous=simultaneous,
            sigma=self.sigma,
        )

    def predict(self, x: Tensor, *, n: int = 10_000, alpha: float = 0.001) -> Tensor:
        """Run PREDICT for each input: a class, or -1 = abstain. A wrong class has probability at most `alpha`."""
        Request(self.sigma, 1, n, alpha)
        x = check_inputs(x)
        with self.voting(x, secret_key(), {Purpose.PREDICT: n}, fresh_noise=True) as counters:
            work = parallel_map(counters, lambda counter, i: smooth.predict(counter, x[i], n, alpha, i), range(len(x)))
            return torch.tensor(list(work))

    def robust_at(
        self, x: Tensor, radius: float, *, n0: int = 100, n: int = 10_000, alpha: float = 0.001, seed: int | None = None
    ) -> Decisions:
        """Decide whether the predicted class is constant within `radius` of each input; stops voting once this is clear."""
        x = check_inputs(x)
        check_radius(radius, self.sigma)
        request = Request.under(self.smoothing, n0, n, alpha, self.fresh_noise)
        with self.counters(x, request, _key(seed)) as counters:
            work = parallel_map(counters, lambda counter, i: request.robust_at(counter, x[i], radius, i), range(len(x)))
            decisions = list(work)
        return Decisions(
            predict=torch.tensor([d.predict for d in decisions]),
            robust=torch.tensor([_answer(d) for d in decisions]),
            votes=torch.tensor([d.votes for d in decisions]),
            radius=radius,
            alpha=alpha,
        )

    def ready(self, x: Tensor) -> list[FreshVotes]:
        """Prepare for inputs like `x` in a service: return counters that last, one per worker, each for one thread at a time.

        Every answer must use its own secret key: ``counter.with_key(secret_key())``.
        """
        return self._voter.lasting(check_inputs(x), secret_key())

    def counters(self, x: Tensor, request: Request, key: bytes) -> AbstractContextManager[list[Counter]]:
        """Return counters for the inputs `x`, one per worker; their noise is a function of `key`."""
        return self.voting(x, key, request.votes, fresh_noise=self.fresh_noise)

    @contextmanager
    def voting(self, x: Tensor, key: bytes, votes: dict[Purpose, int], *, fresh_noise: bool = False) -> Iterator[list[Counter]]:
        """Yield counters of so many `votes` for images, whatever the law is; their noise is a function of `key`."""
        if self.smoothing.site == INPUT:
            with self._voter.counters(x, key, votes, fresh_noise=fresh_noise) as counters:
                yield counters
            return
        inputs = self._whitened.inputs
        with torch.inference_mode():
            some = inputs(x[:_PREPARED_WITH])
        with self._voter.counters(some, key, votes, fresh_noise=fresh_noise) as counters:
            yield [OnImages(counter, self.smoothing, inputs) for counter in counters]


def _key(seed: int | None) -> bytes:
    return secret_key() if seed is None else key_from_seed(seed, "certify")


def _answer(decision: smooth.Decision) -> int:
    return -1 if decision.robust is None else int(decision.robust)


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor | Sequence[int],
    *,
    sigma: float | None = None,
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
    """Run CERTIFY for each input ``x[i]`` of any classifier that returns logits.

    `sigma` is the standard deviation of noise on the input; without it, the noise is that inside the model (a `NoisyModel`).
    `alpha` is per input; with `simultaneous` it is divided by the number of inputs, and all certificates of this call hold
    together with probability 1 - alpha.

    The noise comes from the operating system unless `seed` is given. All inputs share one noise bank if the model allows
    it (each certificate is still valid individually); `fresh_noise` draws new noise for each input. `skip_misclassified`
    casts no estimation votes if the selected class is not the label.
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
    model: nn.Module, x: Tensor, *, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001, batch: int | None = None
) -> Tensor:
    """Run PREDICT for each input: the smoothed classifier's class, -1 = abstain. Always uses fresh noise."""
    return SmoothedClassifier(model, sigma, batch=batch).predict(x, n=n, alpha=alpha)


def check_inputs(x: Tensor) -> Tensor:
    """Return `x` as float32; it must be finite float inputs, one per row."""
    x = torch.as_tensor(x)
    if x.ndim < 2 or len(x) == 0:
        raise DataError(f"x has shape {list(x.shape)}, must be [inputs, ...] with at least one input")
    if not x.is_floating_point():
        raise DataError(f"x is {x.dtype}, must be float; divide uint8 images by 255")
    rows = max(1, _CHECKED_BYTES // (x.shape[1:].numel() * x.element_size() or 1))
    if not all(bool(torch.isfinite(x[start : start + rows]).all()) for start in range(0, len(x), rows)):
        raise DataError("x contains NaN or infinity; replace these values")
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
    """Certify ``x[i]`` for i in `indices`, one row each in `path`; rows that already exist are kept.

    The noise is a function of the key (and of i, with fresh noise): an interrupted run resumes with the same rows.
    """

    files = [(path, indices)]
    return certify_to_files(model, x, y, files, request, key=key, batch=batch, progress=progress)[0]


def certify_to_files(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    files: Sequence[tuple[Path, Sequence[int]]],
    request: Request,
    *,
    key: bytes,
    batch: int | None = None,
    progress: Progress = silent,
    world: World = ALONE,
) -> list[list[CertificateRow]]:
    """Like `certify_to_file` for the heads of a model, in one pass: a file and its indices for each head, in their order.

    Guarantee: a head gets the rows that it gets alone. The trunk runs for an image if any head needs its votes.

    All ranks call this with the same arguments and share the images. Rank 0 reads and writes the files, with the rows that
    one process writes (all but `time`); the others return no rows.
    """
    heads = heads_in(model)
    if heads != len(files):
        raise ValueError(f"{len(files)} files for {heads} heads")

    def rows(counter: Counter, item: tuple[int, list[int]]) -> list[tuple[int, CertificateRow]]:
        index, wanting = item
        began, label, votes = time.perf_counter(), int(y[index]), OneInput(counter, heads)
        found = [request.certify(votes.of_head(head), x[index], label, index) for head in wanting]
        seconds = (time.perf_counter() - began) / len(wanting)
        return [(head, _row(index, label, c, seconds, request)) for head, c in zip(wanting, found, strict=True)]

    wanted, kind = sorted({index for _, indices in files for index in indices}), request.row_kind
    sweep = SharedPass(world, _counters_for(model, x, wanted, request, key, batch, world), rows, _heads_and_rows(kind))
    if not world.is_first:
        sweep.serve()
        return []

    def missing(todo: list[list[int]]) -> Generator[list[tuple[int, CertificateRow]]]:
        lacking = [set(each) for each in todo]
        wanting = [(i, [head for head in range(heads) if i in lacking[head]]) for i in sorted(set().union(*lacking))]
        yield from sweep.results(wanting)

    def earned(row: CertificateRow) -> float:
        return row.radius if row.correct else 0.0

    found = append_missing_rows_to_all(kind, files, missing, progress, mean_of=("acr", earned))
    sweep.end()
    return found


def _counters_for(
    model: nn.Module, x: Tensor, wanted: Sequence[int], request: Request, key: bytes, batch: int | None, world: World
) -> Callable[[], AbstractContextManager[list[Counter]]]:
    """Return a function that prepares the model for voting on ``x[wanted]``, in the same way on all world."""

    def prepare() -> AbstractContextManager[list[Counter]]:
        law = request.law
        classifier = SmoothedClassifier(model, smoothing=law, fresh_noise=request.fresh_noise, batch=batch, world=world)
        return classifier.counters(chosen(x, wanted), request, key)

    return prepare


def _heads_and_rows(kind: type[CertificateRow]) -> Wire[tuple[int, list[int]], list[tuple[int, CertificateRow]]]:
    return Wire(
        item=lambda sent: (sent[0], sent[1]),
        pack=lambda found: [(head, astuple(row)) for head, row in found],
        unpack=lambda sent: [(head, kind(*values)) for head, values in sent],
    )


_ROBUST_ROWS: Wire[int, RobustRow] = Wire(item=int, pack=astuple, unpack=lambda values: RobustRow(*values))


def _row(index: int, label: int, c: smooth.Certificate, seconds: float, request: Request) -> CertificateRow:
    known = (index, label, c.predict, c.radius, int(c.predict == label), seconds, c.count, c.n, c.p_lower)
    if request.smoothing is None:
        return CertificateRow(*known)
    certified = c.predict != smooth.ABSTAIN and bool(c.votes)
    native = pixeldp_radius(c.votes, c.predict, c.n, request.alpha_each, request.sigma) if certified else 0.0
    return InnerNoiseRow(*known, ",".join(map(str, c.votes)), native)


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
    world: World = ALONE,
) -> list[RobustRow]:
    """Decide whether ``x[i]`` is robust at `radius` for i in `indices`, one row each in `path`; resumable.

    All ranks share the images, as in `certify_to_files`.
    """
    check_radius(radius, request.sigma)

    def row(counter: Counter, index: int) -> RobustRow:
        began, label = time.perf_counter(), int(y[index])
        d = request.robust_at(counter, x[index], radius, index)
        return RobustRow(index, label, d.predict, _answer(d), int(d.predict == label), time.perf_counter() - began, d.votes)

    def votes(row: RobustRow) -> float:
        return float(row.votes)

    sweep = SharedPass(world, _counters_for(model, x, indices, request, key, batch, world), row, _ROBUST_ROWS)
    if not world.is_first:
        sweep.serve()
        return []
    found = append_missing_rows(RobustRow, path, indices, sweep.results, progress, mean_of=("votes each", votes))
    sweep.end()
    return found


def check_radius(radius: float, sigma: float) -> None:
    """Refuse a radius that needs no votes, or that no number of votes can certify (p_A would have to be 1)."""
    remedy = f"at most 8 sigma can be certified (sigma is {sigma:g}); for radius 0 use certificates"
    finite_in("radius", radius, 0.0, 8.0 * sigma, open_low=True, remedy=remedy)


def require_subset(size: int, examples: int) -> None:
    """Refuse more examples than the test set has."""
    if not 1 <= examples <= size:
        raise RunError(f"--examples is {examples}, the test set has {size}; give 1 to {size} or all")
