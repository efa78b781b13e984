"""The certificates of a run that other rows are joined with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..certification.metrics import is_about
from ..errors import RunError
from ..store import metrics as store
from ..store.durable import sha256_hex
from ..store.metrics import main_sigma, read_metrics
from ..store.records import CertificateRow, read_rows
from ..store.runs import RunDirectory
from .run import images_sha256, read_config, read_facts


@dataclass(frozen=True)
class Certification:
    """One certification of the test set: its figures, its rows by example, and a digest of how they were made."""

    file: str
    sigma: float
    rows: dict[int, CertificateRow]
    request_sha256: str


def main_certification(directory: RunDirectory, model_sha256: str, x: Tensor, y: Tensor) -> Certification:
    """The one the run is spoken of by, as in the report; it must be of this model and images."""
    directory.require(directory.metrics)
    metrics = read_metrics(directory.metrics)
    sigma = main_sigma(metrics, read_config(directory.path).certification_sigma)
    entry = store.certification_at(metrics["certification"], sigma)
    if entry is None:
        make = f"dpcert certify {directory.path} --sigma {sigma:g}"
        raise RunError(f"{directory.path} has no certificates at its sigma {sigma:g}; make them with: {make}")
    return certification_of(directory.path, entry, model_sha256, x, y)


def certification_at(directory: RunDirectory, sigma: float, model_sha256: str, x: Tensor, y: Tensor) -> Certification | None:
    """The certification of the test set at `sigma`; None where there is none."""
    if not directory.metrics.exists():
        return None
    entry = store.certification_at(read_metrics(directory.metrics)["certification"], sigma)
    return None if entry is None else certification_of(directory.path, entry, model_sha256, x, y)


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
    rows = {row.idx: row for row in read_rows(CertificateRow, file) if is_about(entry, row.idx)}
    if len(rows) != entry["examples"] or max(rows) >= len(x):
        raise RunError(f"{file} holds {len(rows)} rows, metrics.json speaks of {entry['examples']}; run dpcert certify again")
    return Certification(file.name, float(entry["sigma"]), rows, sha256_hex(sidecar.read_bytes()))
