"""The certificates of a run that other rows are joined with."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import RunError
from ..store.durable import sha256_hex
from ..store.metrics import read_metrics
from ..store.records import CertificateRow, read_rows
from ..store.runs import RunDirectory
from .run import images_sha256, read_facts


@dataclass(frozen=True)
class Certification:
    """One certification of the test set: its figures, its rows by example, and a digest of how they were made."""

    file: str
    sigma: float
    rows: dict[int, CertificateRow]
    request_sha256: str


def main_certification(directory: RunDirectory, model_sha256: str, x: Tensor, y: Tensor) -> Certification:
    """The one at the training sigma (for a method without noisy views: the first), which must be of this model and images."""
    directory.require(directory.metrics)
    metrics = read_metrics(directory.metrics)
    sigma = metrics.get("sigma_train")
    entries = [entry for entry in metrics["certification"] if entry["split"] == "test"]
    entries = [entry for entry in entries if sigma in (None, entry["sigma"])]
    if not entries:
        at = "" if sigma is None else f" at the training sigma {sigma:g}"
        raise RunError(f"{directory.path} has no certificates{at}; make them with: dpcert certify {directory.path}")
    return certification_of(directory.path, min(entries, key=_is_special), model_sha256, x, y)


def certification_at(directory: RunDirectory, sigma: float, model_sha256: str, x: Tensor, y: Tensor) -> Certification | None:
    """The certification of the test set at `sigma`; None where there is none."""
    if not directory.metrics.exists():
        return None
    metrics = read_metrics(directory.metrics)
    entries = [entry for entry in metrics["certification"] if entry["split"] == "test" and entry["sigma"] == sigma]
    return certification_of(directory.path, min(entries, key=_is_special), model_sha256, x, y) if entries else None


def _is_special(entry: dict[str, Any]) -> bool:
    """Whether other certificates at this sigma came first and have the plain name; `min` keeps the first of equals."""
    return re.fullmatch(r"certificates-sigma[0-9.]+\.tsv", entry["file"]) is None


def certification_of(path: Path, entry: dict[str, Any], model_sha256: str, x: Tensor, y: Tensor) -> Certification:
    """The rows that an entry of metrics.json speaks of."""
    file = path / entry["file"]
    sidecar = file.with_suffix(".json")
    again = f"delete {file.name} and {sidecar.name}, then: dpcert certify {path}"
    facts = read_facts(sidecar)
    if facts.get("model_sha256") != model_sha256:
        raise RunError(f"{file} was made for another model (its SHA-256 differs); {again}")
    if facts.get("images_sha256") != images_sha256(x, y):
        raise RunError(f"{file} was made for other images (their SHA-256 differs); restore the data set, or {again}")
    chosen = range(0, entry["stride"] * entry["examples"], entry["stride"])
    rows = {row.idx: row for row in read_rows(CertificateRow, file) if row.idx in chosen}
    if len(rows) != entry["examples"] or max(rows) >= len(x):
        raise RunError(f"{file} holds {len(rows)} rows, metrics.json speaks of {entry['examples']}; run dpcert certify again")
    return Certification(file.name, float(entry["sigma"]), rows, sha256_hex(sidecar.read_bytes()))
