"""Schemas of the rows between stages. All of them are public: made after the noise, from the test set."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, Self, TypeVar

from ..errors import RunError
from ..rounding import floor_text

_LARGEST_RADIUS = 1e6


class Row(Protocol):
    """One line of a file of rows: fields, then a checksum."""

    columns: ClassVar[tuple[str, ...]]

    @property
    def idx(self) -> int:
        """The example's index in its split."""

    def fields(self) -> tuple[str, ...]:
        """The line without its checksum."""

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """The row of a line."""


@dataclass(frozen=True)
class CertificateRow:
    """A row of certificates-*.tsv, in the columns of the field's own scripts, then ours. `count` is None if none was cast."""

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

    def fields(self) -> tuple[str, ...]:
        """Radius and p_lower are rounded down: printing must not promise more than was proved."""
        count = "" if self.count is None else str(self.count)
        first = (str(self.idx), str(self.label), str(self.predict), floor_text(self.radius, 6), str(self.correct))
        return (*first, f"{self.time:.3f}", count, str(self.n), floor_text(self.p_lower, 9))

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """The row of a line."""
        idx, label, predict, radius, correct, time, count, n, p_lower = fields
        votes = int(count) if count else None
        found = float(radius), float(time), float(p_lower)
        if not (0 <= found[0] < _LARGEST_RADIUS and 0 <= found[1] < math.inf and 0 <= found[2] <= 1):  # NaN is none of these
            raise ValueError("a radius, time or probability is out of range")
        return cls(int(idx), int(label), int(predict), found[0], int(correct), found[1], votes, int(n), found[2])


@dataclass(frozen=True)
class RobustRow:
    """A row of robust-*.tsv: is the example robust at the radius asked for? `robust` is 1, 0, or -1 (not decided)."""

    idx: int
    label: int
    predict: int
    robust: int
    correct: int
    time: float
    votes: int
    columns: ClassVar[tuple[str, ...]] = ("idx", "label", "predict", "robust", "correct", "time", "votes")

    def fields(self) -> tuple[str, ...]:
        """The line without its checksum."""
        first = (str(value) for value in (self.idx, self.label, self.predict, self.robust, self.correct))
        return (*first, f"{self.time:.3f}", str(self.votes))

    @classmethod
    def from_fields(cls, fields: list[str]) -> Self:
        """The row of a line."""
        idx, label, predict, robust, correct, time, votes = fields
        return cls(int(idx), int(label), int(predict), int(robust), int(correct), float(time), int(votes))


AnyRow = TypeVar("AnyRow", bound=Row)


def header(kind: type[Row]) -> str:
    """The first line of a file of rows."""
    return "\t".join((*kind.columns, "check"))


def text_of(row: Row) -> str:
    """A row as a line, with a checksum at its end."""
    body = "\t".join(row.fields())
    return f"{body}\t{_check(body)}"


def row_of(kind: type[AnyRow], line: str) -> AnyRow:
    """A line as a row; a wrong checksum is an error."""
    body, _, check = line.rpartition("\t")
    fields = body.split("\t")
    if check != _check(body) or len(fields) != len(kind.columns):
        raise ValueError("its checksum is wrong")
    return kind.from_fields(fields)


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def read_rows(kind: type[AnyRow], path: Path, *, allow_torn_end: bool = False) -> list[AnyRow]:
    """All rows, in the order of the file. A half-written last line is an interruption: dropped where that is allowed."""
    try:
        text = path.read_bytes().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}; delete it and certify again") from error
    lines = text.split("\n")
    torn = lines.pop()
    if torn and not allow_torn_end:
        raise RunError(f"{path} ends in the middle of a row; certification was interrupted: run dpcert certify again")
    if not lines and allow_torn_end:
        return []
    if not lines or lines[0] != header(kind):
        raise RunError(f"{path} does not start with the columns of a certificate file; delete it and certify again")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(row_of(kind, line))
        except ValueError as error:
            raise RunError(f"{path} line {number} is damaged ({error}); delete the file and certify again") from error
    if len({row.idx for row in rows}) != len(rows):
        raise RunError(f"{path} holds an example twice; delete the file and certify again")
    return rows
