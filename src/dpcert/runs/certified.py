"""The certificates of a run, to join other rows with."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..certification.metrics import is_about
from ..errors import RunError
from ..store import metrics as store
from ..store.durable import sha256_hex
from ..store.metrics import main_sigma
from ..store.opened import open_metrics, open_rows, open_settings
from ..store.public import PublicFiles, read_directory
from ..store.records import CertificateRow
from ..store.runs import RunDirectory
from .identity import images_sha256
from .resolve import read_config


@dataclass(frozen=True)
class Certification:
    """One certification of the test set: its file, its sigma, its rows by example, and a digest of its settings."""

    file: str
    sigma: float
    rows: dict[int, CertificateRow]
    request_sha256: str


def main_certification(directory: RunDirectory, model_sha256: str, x: Tensor, y: Tensor) -> Certification:
    """The main certification of the run, as in the report; it must belong to this model and these images."""
    directory.require(directory.metrics)
    files = read_directory(directory.path)
    sigma = main_sigma(open_metrics(files), read_config(directory.path).certification_sigma)
    certification = _certification_at(files, sigma, model_sha256, x, y)
    if certification is None:
        command = f"dpcert certify {directory.path} --sigma {sigma:g}"
        raise RunError(f"{directory.path} has no certificates at its sigma {sigma:g}; create them with: {command}")
    return certification


def certification_at(
    directory: RunDirectory, sigma: float | None, model_sha256: str, x: Tensor, y: Tensor
) -> Certification | None:
    """The certification of the test set at `sigma`, or None."""
    if not directory.metrics.exists():
        return None
    return _certification_at(read_directory(directory.path), sigma, model_sha256, x, y)


def _certification_at(files: PublicFiles, sigma: float | None, model_sha256: str, x: Tensor, y: Tensor) -> Certification | None:
    """Check all certifications of the test set, not only the requested one: rows are joined with intact certificates only."""
    entries = [entry for entry in open_metrics(files)["certification"] if entry["split"] == "test"]
    certifications = {entry["file"]: certification_of(files, entry, model_sha256, x, y) for entry in entries}
    chosen = store.certification_at(entries, sigma)
    return None if chosen is None else certifications[chosen["file"]]


def certification_of(files: PublicFiles, entry: dict[str, Any], model_sha256: str, x: Tensor, y: Tensor) -> Certification:
    """The rows that an entry of metrics.json refers to."""
    file = files.origin / entry["file"]
    sidecar = file.with_suffix(".json")
    redo = f"delete {file.name} and {sidecar.name}, then run: dpcert certify {files.origin}"
    facts = open_settings(files, entry)
    if facts.get("model_sha256") != model_sha256:
        raise RunError(f"{file} was computed with a different model (its SHA-256 differs); {redo}")
    if facts.get("images_sha256") != images_sha256(x, y):
        raise RunError(f"{file} was computed for different images (their SHA-256 differs); restore the data set, or {redo}")
    rows = {row.idx: row for row in open_rows(CertificateRow, files, file.name) if is_about(entry, row.idx)}
    if len(rows) != entry["examples"] or max(rows) >= len(x):
        raise RunError(f"{file} has {len(rows)} rows, metrics.json states {entry['examples']}; rerun dpcert certify")
    return Certification(file.name, float(entry["sigma"]), rows, sha256_hex(files.bytes_of(sidecar.name)))
