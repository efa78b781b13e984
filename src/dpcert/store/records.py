"""Schemas of the rows passed between stages. All are public: computed after the noise was added, from the test set."""

import hashlib
import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, Self, TypeVar

from ..errors import RunError
from ..rounding import ceil_text, floor_text
from .durable import read_file

_LARGEST_RADIUS = 1e6


class Row(Protocol):
    """One line of a file of rows: fields, then a checksum."""

    columns: ClassVar[tuple[str, ...]]
    made_by: ClassVar[str]  # the command that regenerates the file

    @property
    def key(self) -> Hashable:
        """Unique in a file; for most rows the index of the example in its split."""

    def fields(self) -> tuple[str, ...]:
        """The line without its checksum."""

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """Parse the fields of a line."""


class ExampleRow(Row, Protocol):
    """A row about one example."""

    @property
    def idx(self) -> int:
        """The example's index in its split."""


@dataclass(frozen=True)
class CertificateRow:
    """A row of certificates-*.tsv, with the columns of Cohen et al., then ours. `count` is None if no votes were cast."""

    idx: int
    label: int
    predict: int
    radius: float
    correct: int
    time: float
    count: int | None
    n: int
    p_lower: float
    columns: ClassVar[tuple[str, ...]] = ("idx", "label", "predict", "radius", "correct", "time", "count", "n", "p_lower")
    made_by: ClassVar[str] = "dpcert certify"

    @property
    def key(self) -> int:
        """The example."""
        return self.idx

    def fields(self) -> tuple[str, ...]:
        """Radius and p_lower are rounded down: the text must not claim more than was proved."""
        count = "" if self.count is None else str(self.count)
        first = (str(self.idx), str(self.label), str(self.predict), floor_text(self.radius, 6), str(self.correct))
        return (*first, f"{self.time:.3f}", count, str(self.n), floor_text(self.p_lower, 9))

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """Parse the fields of a line."""
        idx, label, predict, radius, correct, time, count, n, p_lower = fields
        votes = int(count) if count else None
        radius_l2, seconds, bound = float(radius), float(time), float(p_lower)
        if not (0 <= radius_l2 < _LARGEST_RADIUS and 0 <= seconds < math.inf and 0 <= bound <= 1):  # also refuses NaN
            raise ValueError("a radius, time or probability is out of range")
        return cls(int(idx), int(label), int(predict), radius_l2, int(correct), seconds, votes, int(n), bound)


@dataclass(frozen=True)
class InnerNoiseRow(CertificateRow):
    """A row of certificates under another law than noise on the image: also the votes for each class, and PixelDP's radius.

    `votes` are joined with commas; empty if none were cast.
    """

    votes: str = ""
    radius_pixeldp: float = 0.0
    columns: ClassVar[tuple[str, ...]] = (*CertificateRow.columns, "votes", "radius_pixeldp")

    def fields(self) -> tuple[str, ...]:
        """Radii are rounded down."""
        return (*super().fields(), self.votes, floor_text(self.radius_pixeldp, 6))

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """Parse the fields of a line."""
        *first, votes, radius = fields
        known, radius_l2 = CertificateRow.from_fields(first), float(radius)
        if not 0 <= radius_l2 < _LARGEST_RADIUS or not all(text.isdecimal() for text in votes.split(",") if votes):
            raise ValueError("a radius or a number of votes is out of range")
        return cls(**vars(known), votes=votes, radius_pixeldp=radius_l2)

    @property
    def votes_by_class(self) -> tuple[int, ...]:
        """The estimation votes for each class."""
        return tuple(int(text) for text in self.votes.split(",")) if self.votes else ()


@dataclass(frozen=True)
class RobustRow:
    """A row of robust-*.tsv: is the example robust at the requested radius? `robust` is 1, 0, or -1 (not decided)."""

    idx: int
    label: int
    predict: int
    robust: int
    correct: int
    time: float
    votes: int
    columns: ClassVar[tuple[str, ...]] = ("idx", "label", "predict", "robust", "correct", "time", "votes")
    made_by: ClassVar[str] = "dpcert certify --radius"

    @property
    def key(self) -> int:
        """The example."""
        return self.idx

    def fields(self) -> tuple[str, ...]:
        """The line without its checksum."""
        first = (str(value) for value in (self.idx, self.label, self.predict, self.robust, self.correct))
        return (*first, f"{self.time:.3f}", str(self.votes))

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """Parse the fields of a line."""
        idx, label, predict, robust, correct, time, votes = fields
        return cls(int(idx), int(label), int(predict), int(robust), int(correct), float(time), int(votes))


METRICS = {  # columns of samples.tsv, with the paper's names for them
    "gradient_norm": "input-gradient norm",
    "hessian_norm": "input-Hessian spectral norm",
    "lipschitz": "local Lipschitz constant",
}


@dataclass(frozen=True)
class SampleRow:
    """A row of samples.tsv: per-sample metrics of one test image, with its certificate."""

    idx: int
    label: int
    predict: int  # of the base model
    gradient_norm: float
    hessian_norm: float
    hessian_residual: float
    lipschitz: float
    sigma: float
    radius: float
    correct: int  # of the smoothed model
    columns: ClassVar[tuple[str, ...]] = (
        *("idx", "label", "predict", "gradient_norm", "hessian_norm", "hessian_residual", "lipschitz"),
        *("sigma", "radius", "correct"),
    )
    made_by: ClassVar[str] = "dpcert analyze"

    @property
    def key(self) -> int:
        """The example."""
        return self.idx

    def fields(self) -> tuple[str, ...]:
        """The line without its checksum."""
        metrics = (self.gradient_norm, self.hessian_norm, self.hessian_residual, self.lipschitz)
        certificate = (f"{self.sigma:g}", floor_text(self.radius, 6), str(self.correct))
        return (str(self.idx), str(self.label), str(self.predict), *(f"{value:.6g}" for value in metrics), *certificate)

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """Parse the fields of a line."""
        idx, label, predict = (int(text) for text in fields[:3])
        gradient, hessian, residual, lipschitz, sigma, radius = metrics = [float(text) for text in fields[3:9]]
        if not all(0 <= value < math.inf for value in metrics):
            raise ValueError("a metric is out of range")
        return cls(idx, label, predict, gradient, hessian, residual, lipschitz, sigma, radius, int(fields[9]))


@dataclass(frozen=True)
class AttackRow:
    """A row of attacks.tsv: accuracy under one attack of one strength, with its 95 % interval. The base model has no sigma."""

    attack: str
    target: str
    sigma: float | None
    strength: float
    steps: int
    starts: int
    examples: int
    accuracy: float
    low: float
    high: float
    columns: ClassVar[tuple[str, ...]] = (
        *("attack", "target", "sigma", "strength", "steps", "starts", "examples"),
        *("accuracy", "low", "high"),
    )
    made_by: ClassVar[str] = "dpcert attack"

    @property
    def key(self) -> tuple[str, str, float | None, float]:
        """A file has one row per attack, target and strength."""
        return self.attack, self.target, self.sigma, self.strength

    def fields(self) -> tuple[str, ...]:
        """The line without its checksum."""
        which = (self.attack, self.target, "" if self.sigma is None else f"{self.sigma:g}", f"{self.strength:g}")
        counts = (str(self.steps), str(self.starts), str(self.examples))
        return (*which, *counts, f"{self.accuracy:.6f}", f"{self.low:.6f}", f"{self.high:.6f}")

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """Parse the fields of a line."""
        attack, target, sigma, strength, steps, starts, examples, accuracy, low, high = fields
        shares = float(accuracy), float(low), float(high)
        if not (all(0 <= share <= 1 for share in shares) and 0 <= float(strength) < math.inf):
            raise ValueError("an accuracy or a strength is out of range")
        where = None if not sigma else float(sigma)
        return cls(attack, target, where, float(strength), int(steps), int(starts), int(examples), *shares)


@dataclass(frozen=True)
class CurveRow:
    """A row of training.tsv, about one per epoch, from released weights and noised gradients only, never a training loss."""

    step: int
    epoch: float
    epsilon: float  # of the steps so far; inf if the run is not private
    gradient_norm: float | None  # of the noised mean gradient of this step; None if no noise was added
    test_accuracy: float | None  # None while settings are chosen on a validation split: the test set is not used then
    columns: ClassVar[tuple[str, ...]] = ("step", "epoch", "epsilon", "gradient_norm", "test_accuracy")
    made_by: ClassVar[str] = "dpcert train"

    @property
    def key(self) -> int:
        """The step."""
        return self.step

    def fields(self) -> tuple[str, ...]:
        """Epsilon is rounded up: the text must not claim more than was proved."""
        norm = "" if self.gradient_norm is None else f"{self.gradient_norm:.6g}"
        tested = "" if self.test_accuracy is None else f"{self.test_accuracy:.6f}"
        return (str(self.step), f"{self.epoch:.4f}", ceil_text(self.epsilon, 6), norm, tested)

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """Parse the fields of a line."""
        step, epoch, epsilon = int(fields[0]), float(fields[1]), float(fields[2])
        norm, tested = (float(text) if text else None for text in fields[3:5])
        if not (step >= 0 and epoch >= 0 and epsilon >= 0 and (norm or 0.0) >= 0) or not 0 <= (tested or 0.0) <= 1:
            raise ValueError("a value is out of range")
        return cls(step, epoch, epsilon, norm, tested)


AnyRow = TypeVar("AnyRow", bound=Row)
AnyExampleRow = TypeVar("AnyExampleRow", bound=ExampleRow)


def header(kind: type[Row]) -> str:
    """The first line of a file of rows."""
    return "\t".join((*kind.columns, "check"))


def text_of(row: Row) -> str:
    """A row as a line that ends with a checksum."""
    body = "\t".join(row.fields())
    return f"{body}\t{_check(body)}"


def row_of(kind: type[AnyRow], line: str) -> AnyRow:
    """Parse a line; a wrong checksum is an error."""
    body, _, check = line.rpartition("\t")
    fields = body.split("\t")
    if check != _check(body) or len(fields) != len(kind.columns):
        raise ValueError("its checksum is wrong")
    return kind.from_fields(fields)


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def read_rows(kind: type[AnyRow], path: Path, *, allow_torn_end: bool = False) -> list[AnyRow]:
    """All rows, in file order. An interrupted run leaves a partial last line; `allow_torn_end` drops it."""
    rerun = f"rerun {kind.made_by}"
    try:
        data = read_file(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}; delete it and {rerun}") from error
    return parse_rows(kind, data, str(path), allow_torn_end=allow_torn_end)


def parse_rows(
    kind: type[AnyRow], data: bytes, origin: str, *, allow_torn_end: bool = False, remedy: str | None = None
) -> list[AnyRow]:
    """`read_rows` for bytes, such as a member of a bundle; `remedy` says what to do if they are damaged."""
    rerun = f"rerun {kind.made_by}"
    remedy = f"delete the file and {rerun}" if remedy is None else remedy
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise RunError(f"{origin} cannot be read: {error}; {remedy}") from error
    lines = text.split("\n")
    torn = lines.pop()
    if torn and not allow_torn_end:
        raise RunError(f"{origin} ends in the middle of a row (the run was interrupted); {rerun} to resume")
    if not lines and allow_torn_end:
        return []
    wider = (each for each in (kind, *kind.__subclasses__()) if lines and lines[0] == header(each))  # with more columns
    found = next(wider, None)
    if found is None:
        raise RunError(f"{origin} does not start with the columns {', '.join(kind.columns)}; {remedy}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(row_of(found, line))
        except ValueError as error:
            raise RunError(f"{origin} line {number} is damaged ({error}); {remedy}") from error
    if len({row.key for row in rows}) != len(rows):
        raise RunError(f"{origin} contains a {kind.columns[0]} twice; {remedy}")
    return rows
