"""The public files of a run as names and bytes, read once, without following a link."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import RunError
from .durable import read_file
from .runs import (
    ATTACKS,
    CERTIFICATES,
    CONFIG,
    CURVE,
    LEDGER,
    METRICS,
    MODEL,
    REPORT,
    ROBUST,
    SAMPLES,
    RunDirectory,
    sidecar_of,
)

ROWS = re.compile(rf"({CERTIFICATES}|{ROBUST})-[A-Za-z0-9.+-]{{1,100}}\.(tsv|json)")
_NAMES = (CONFIG, LEDGER, METRICS, MODEL, REPORT, CURVE, SAMPLES, sidecar_of(SAMPLES), ATTACKS, sidecar_of(ATTACKS))
_MOST_BYTES = {MODEL: 2 << 30, LEDGER: 64 << 20, CONFIG: 1 << 20}
_MOST_BYTES_OF_OTHERS = 256 << 20


@dataclass(frozen=True)
class PublicFiles:
    """The files an outsider can see: names and bytes. `key_is_here` tells whether the run key is in the directory.

    `others` are names in a run directory that dpcert does not use; those files are not read.
    """

    origin: Path
    content: Mapping[str, bytes]
    is_bundle: bool = False
    key_is_here: bool = False
    others: tuple[str, ...] = ()

    def bytes_of(self, name: str) -> bytes:
        """The content of a required file."""
        if name not in self.content:
            raise RunError(f"{self.place_of(name)} is missing; restore it from a copy")
        return self.content[name]

    def place_of(self, name: str) -> str:
        """How error messages refer to a file: by its path, or by its name in a bundle."""
        return name if self.is_bundle else str(self.origin / name)


def most_bytes(name: str) -> int:
    """The size limit for reading a file."""
    return _MOST_BYTES.get(name, _MOST_BYTES_OF_OTHERS)


def read_directory(path: Path) -> PublicFiles:
    """The public files of a run directory."""
    directory, content, others = RunDirectory(path), {}, []
    directory.refuse_links()
    for file in sorted(path.iterdir()):
        if file.name not in _NAMES and ROWS.fullmatch(file.name) is None:
            others.append(f"{file.name}/" if file.is_dir() else file.name)
        elif file.is_file():
            if file.stat().st_size > most_bytes(file.name):
                raise RunError(
                    f"{file} has {file.stat().st_size} bytes, the limit is {most_bytes(file.name)}; restore it from a copy"
                )
            content[file.name] = read_file(file)
    if not {CONFIG, LEDGER, METRICS, MODEL} & set(content):
        raise RunError(f"{path} is not a run directory: it has no {CONFIG}, {LEDGER}, {METRICS} or {MODEL}")
    return PublicFiles(path, content, key_is_here=directory.key.exists(), others=tuple(others))
