"""Schemas of the rows between stages. All of them are public: made after the noise, from the test set."""

import hashlib
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from pathlib import Path

from ..errors import RunError

CERTIFICATE_COLUMNS = ("idx", "label", "predict", "radius", "correct", "time", "count", "n", "p_lower", "check")


@dataclass(frozen=True)
class CertificateRow:
    """One line of certificates-*.tsv, in the columns of the field's own scripts, then ours."""

    idx: int
    label: int
    predict: int
    radius: float
    correct: int
    time: float
    count: int
    n: int
    p_lower: float

    def text(self) -> str:
        """The line, with a checksum at its end. Radius and p_lower are rounded down: printing must not promise more."""
        fields = (
            str(self.idx),
            str(self.label),
            str(self.predict),
            _floor(self.radius, 6),
            str(self.correct),
            f"{self.time:.3f}",
            str(self.count),
            str(self.n),
            _floor(self.p_lower, 9),
        )
        body = "\t".join(fields)
        return f"{body}\t{_check(body)}"


def _floor(value: float, digits: int) -> str:
    """Rounded down in decimal, so that a row read and written again keeps its bytes."""
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_DOWN))


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:12]


def parse_certificate(line: str) -> CertificateRow:
    """One row; a wrong checksum is an error."""
    body, _, check = line.rpartition("\t")
    fields = body.split("\t")
    if check != _check(body) or len(fields) != len(CERTIFICATE_COLUMNS) - 1:
        raise ValueError("its checksum is wrong")
    idx, label, predict, radius, correct, time, count, n, p_lower = fields
    return CertificateRow(
        int(idx), int(label), int(predict), float(radius), int(correct), float(time), int(count), int(n), float(p_lower)
    )


def header() -> str:
    """The first line of a certificate file."""
    return "\t".join(CERTIFICATE_COLUMNS)


def read_certificates(path: Path, *, allow_torn_end: bool = False) -> list[CertificateRow]:
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
    if not lines or lines[0] != header():
        raise RunError(f"{path} does not start with the columns of a certificate file; delete it and certify again")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(parse_certificate(line))
        except ValueError as error:
            raise RunError(f"{path} line {number} is damaged ({error}); delete the file and certify again") from error
    if len({row.idx for row in rows}) != len(rows):
        raise RunError(f"{path} holds an example twice; delete the file and certify again")
    return rows
