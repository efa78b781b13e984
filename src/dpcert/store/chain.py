"""Hash-chained lines: each contains the hash of the previous one, so edits, deletions and reordering are detected."""

import hashlib
import json
from typing import Any

from ..errors import LedgerError
from .durable import canonical_json

GENESIS = "0" * 64
REMEDY = "restore the ledger from a copy; epsilon is computed from an intact ledger only"


def digest_of(previous: str, event: dict[str, Any]) -> str:
    """Hash of a line that follows the line with hash `previous`."""
    return hashlib.sha256(f"{previous}\n{canonical_json(event)}".encode()).hexdigest()


def lines_of(data: bytes, origin: str) -> list[str]:
    """The lines of a file, which must all be complete."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LedgerError(f"{origin} cannot be read: {error}") from error
    if not text.endswith("\n"):
        raise LedgerError(f"{origin} is truncated or empty; {REMEDY}")
    return text[:-1].split("\n")


def entry_of(line: str, head: str, where: str) -> dict[str, Any]:
    """Parse a line (`data`, `hash`, optionally `mac`) and check that it follows the line with hash `head`."""
    try:
        entry = json.loads(line)
        event, digest = entry["data"], entry["hash"]
        expected_keys = {"data", "previous", "hash"} | ({"mac"} if "mac" in entry else set())
        well_formed = set(entry) == expected_keys and canonical_json(entry) == line and isinstance(event, dict)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{where} is not a ledger entry; {REMEDY}") from error
    if not well_formed or entry["previous"] != head or digest != digest_of(head, event):
        raise LedgerError(f"{where} does not follow from the previous line (edited or reordered); {REMEDY}")
    return dict(entry)


def read_chain(data: bytes, origin: str) -> list[dict[str, Any]]:
    """All entries of a file; each must follow from the previous one."""
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines_of(data, origin), start=1):
        entries.append(entry_of(line, entries[-1]["hash"] if entries else GENESIS, f"{origin} line {number}"))
    return entries
