"""Certificates for a whole test set: row by row to disk, resumable at any example."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .._validate import finite_in, integer_in
from ..errors import DataError, RunError
from ..progress import Progress, silent
from ..rng import key_from_seed, secret_key
from ..store.durable import cannot_write, write_atomically
from ..store.records import CertificateRow, header, parse_certificate, read_certificates
from . import smooth
from .metrics import Estimate, average_certified_radius, certified_accuracy
from .votes import DEFAULT_BATCH, VoteCounter, evaluating

_SECONDS_BETWEEN_SYNCS = 2.0


@dataclass(frozen=True)
class Certificates:
    """Certificates by example, as tensors."""

    predict: Tensor
    radius: Tensor
    correct: Tensor
    count: Tensor
    n: int
    p_lower: Tensor

    @property
    def acr(self) -> float:
        """Average certified radius: mean of radius * [prediction right]."""
        return self.acr_estimate.value

    @property
    def acr_estimate(self) -> Estimate:
        """ACR with its 95 % interval."""
        return average_certified_radius(self.radius.numpy(), self.correct.numpy())

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


def check_request(*, sigma: float, n0: int, n: int, alpha: float) -> None:
    """Refuse a request that makes no sense, before any vote is cast."""
    finite_in("sigma", sigma, 0.0, 100.0, open_low=True, remedy="the paper uses 0.25, 0.5 and 1.0")
    integer_in("n0", n0, 1, 10**9)
    integer_in("n", n, 1, 10**9)
    finite_in("alpha", alpha, 0.0, 0.5, open_low=True, open_high=True, remedy="the paper uses 0.001")


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
    batch: int = DEFAULT_BATCH,
    progress: Progress = silent,
) -> Certificates:
    """CERTIFY for each input ``x[i]`` of any classifier that returns logits; `alpha` is per input.

    Noise is fresh from the operating system unless `seed` is given.
    """
    check_request(sigma=sigma, n0=n0, n=n, alpha=alpha)
    x = check_inputs(x)
    labels = torch.as_tensor(y)
    if labels.shape != (len(x),):
        raise DataError(f"y has shape {list(labels.shape)}, must hold one label for each of the {len(x)} inputs")
    key = secret_key() if seed is None else key_from_seed(seed, "certify")
    found = []
    with evaluating(model) as voter:
        counter = VoteCounter(voter, sigma, key, batch)
        for index, example in enumerate(x):
            found.append(smooth.certify(counter, example, n0, n, alpha, index))
            progress(index + 1, len(x))
    predicted = torch.tensor([c.predict for c in found])
    return Certificates(
        predict=predicted,
        radius=torch.tensor([c.radius for c in found], dtype=torch.float64),
        correct=predicted == labels.cpu(),
        count=torch.tensor([c.count for c in found]),
        n=n,
        p_lower=torch.tensor([c.p_lower for c in found], dtype=torch.float64),
    )


def predict(
    model: nn.Module, x: Tensor, *, sigma: float, n: int = 10_000, alpha: float = 0.001, batch: int = DEFAULT_BATCH
) -> Tensor:
    """PREDICT for each input: the smoothed classifier's class, -1 = abstain. Always fresh noise."""
    check_request(sigma=sigma, n0=1, n=n, alpha=alpha)
    with evaluating(model) as voter:
        counter = VoteCounter(voter, sigma, secret_key(), batch)
        classes = [smooth.predict(counter, example, n, alpha, i) for i, example in enumerate(check_inputs(x))]
    return torch.tensor(classes)


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
    *,
    sigma: float,
    n0: int,
    n: int,
    alpha: float,
    key: bytes,
    batch: int = DEFAULT_BATCH,
    progress: Progress = silent,
) -> list[CertificateRow]:
    """Certify ``x[i]`` for i in `indices`, appending a row each to `path`; examples already there are not done again.

    Noise of example i is a function of (key, i): a run that was cut anywhere goes on to the same rows.
    """
    check_request(sigma=sigma, n0=n0, n=n, alpha=alpha)
    done = {row.idx: row for row in read_certificates(path, allow_torn_end=True)} if path.exists() else {}
    todo = [index for index in indices if index not in done]
    if todo or not path.exists():
        _append_rows(model, x, y, todo, path, done, sigma, n0, n, alpha, key, batch, progress, len(indices))
    return [done[index] for index in indices]


def _append_rows(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    todo: Sequence[int],
    path: Path,
    done: dict[int, CertificateRow],
    sigma: float,
    n0: int,
    n: int,
    alpha: float,
    key: bytes,
    batch: int,
    progress: Progress,
    total: int,
) -> None:
    _write_all(path, done)  # drops a half-written last line
    first = total - len(todo)
    try:
        with path.open("a", encoding="ascii") as file, evaluating(model) as voter:
            counter = VoteCounter(voter, sigma, key, batch)
            synced = time.monotonic()
            for position, index in enumerate(todo, start=1):
                began = time.perf_counter()
                c = smooth.certify(counter, x[index], n0, n, alpha, index)
                label = int(y[index])
                row = CertificateRow(
                    index,
                    label,
                    c.predict,
                    c.radius,
                    int(c.predict == label),
                    time.perf_counter() - began,
                    c.count,
                    c.n,
                    c.p_lower,
                )
                text = row.text()
                done[index] = parse_certificate(text)  # what is on disk is what is reported
                file.write(text + "\n")
                file.flush()
                if time.monotonic() - synced > _SECONDS_BETWEEN_SYNCS:
                    os.fsync(file.fileno())
                    synced = time.monotonic()
                right = sum(r.radius for r in done.values() if r.correct)
                progress(first + position, total, acr=f"{right / len(done):.3f}")
    except OSError as error:
        raise cannot_write(path, error) from error
    _write_all(path, done)  # sorted by example and durable, whatever the order of the work was


def _write_all(path: Path, rows: dict[int, CertificateRow]) -> None:
    lines = [header(), *(rows[index].text() for index in sorted(rows))]
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def require_subset(size: int, examples: int) -> None:
    """Refuse a number of examples the test set does not have."""
    if not 1 <= examples <= size:
        raise RunError(f"--examples is {examples}, the test set has {size}; give 1 to {size} or all")
