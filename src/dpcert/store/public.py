"""The public files of a run as names and bytes, read once, without following a link."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import RunError
from .durable import read_file
from .runs import ATTACKS, CERTIFICATES, CONFIG, CURVE, LEDGER, METRICS, MODEL, REPORT, ROBUST, SAMPLES, RunDirectory, beside_of

ROWS = re.compile(rf"({CERTIFICATES}|{ROBUST})-[A-Za-z0-9.+-]{{1,100}}\.(tsv|json)")
_NAMES = (CONFIG, LEDGER, METRICS, MODEL, REPORT, CURVE, SAMPLES, beside_of(SAMPLES), ATTACKS, beside_of(ATTACKS))
_MOST_BYTES = {MODEL: 2 << 30, LEDGER: 64 << 20, CONFIG: 1 << 20}
_MOST_BYTES_OF_OTHERS = 256 << 20


@dataclass(frozen=True)
class PublicFiles:
    """What an outsider has: names and bytes. `key_is_here` tells whether the run key lies beside them.

    `others` are names in a run directory that none of our files has: nothing is read from them.
    """

    origin: Path
    content: Mapping[str, bytes]
    is_bundle: bool = False
    key_is_here: bool = False
    others: tuple[str, ...] = ()

    def bytes_of(self, name: str) -> bytes:
        """The content of a file that must be there."""
        if name not in self.content:
            raise RunError(f"{self.place_of(name)} is not here; restore it from a copy")
        return self.content[name]

    def place_of(self, name: str) -> str:
        """A file in the words of an error: its path, or its name in a bundle."""
        return name if self.is_bundle else str(self.origin / name)


def most_bytes(name: str) -> int:
    """How large a file may be that is read."""
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
                raise RunError(f"{file} has {file.stat().st_size} bytes, at most {most_bytes(file.name)} are read")
            content[file.name] = read_file(file)
    if not {CONFIG, LEDGER, METRICS, MODEL} & set(content):
        raise RunError(f"{path} is not a run directory: it has no {CONFIG}, {LEDGER}, {METRICS} or {MODEL}")
    return PublicFiles(path, content, key_is_here=directory.key.exists(), others=tuple(others))
