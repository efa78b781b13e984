"""Hash-chained lines: each holds the hash of the one before it, so an edit, a cut in the middle or a reordering is seen."""

import hashlib
import json
from typing import Any

from ..errors import LedgerError
from .durable import canonical_json

GENESIS = "0" * 64
REMEDY = "restore the ledger from a copy: no epsilon is computed from a doubtful one"


def digest_of(previous: str, event: dict[str, Any]) -> str:
    """The hash of a line, which follows the one with the hash `previous`."""
    return hashlib.sha256(f"{previous}\n{canonical_json(event)}".encode()).hexdigest()


def lines_of(data: bytes, origin: str) -> list[str]:
    """The lines of a file, all of them whole."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LedgerError(f"{origin} cannot be read: {error}") from error
    if not text.endswith("\n"):
        raise LedgerError(f"{origin} is cut off or empty; {REMEDY}")
    return text[:-1].split("\n")


def entry_of(line: str, head: str, where: str) -> dict[str, Any]:
    """What a line says (`data`, `hash`, perhaps a `mac`), which must follow from the line with the hash `head`."""
    try:
        entry = json.loads(line)
        event, digest = entry["data"], entry["hash"]
        expected_keys = {"data", "previous", "hash"} | ({"mac"} if "mac" in entry else set())
        well_formed = set(entry) == expected_keys and canonical_json(entry) == line and isinstance(event, dict)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{where} is not an entry; {REMEDY}") from error
    if not well_formed or entry["previous"] != head or digest != digest_of(head, event):
        raise LedgerError(f"{where} does not follow from the line before it (edited or reordered); {REMEDY}")
    return dict(entry)


def read_chain(data: bytes, origin: str) -> list[dict[str, Any]]:
    """All entries of a file; each follows from the one before it."""
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines_of(data, origin), start=1):
        entries.append(entry_of(line, entries[-1]["hash"] if entries else GENESIS, f"{origin} line {number}"))
    return entries
