"""Export a bundle that is safe to share: the released files, the evidence for their guarantees, and nothing else.

Everything in it is a function of the released weights, the public settings and the test set. An allow-list leaves out:
``private/``; the HMACs of the ledger (they depend on the run key, and nobody can check them once it is destroyed); the key of
the certification noise; figures and rows of held-out training records, which epsilon does not cover; and the training time,
which depends on the training data without any noise.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..privacy.ledger import Ledger
from ..privacy.statement import Statement
from ..report.html import render
from ..report.tables import Paper, RunFacts, facts_of, no_paper
from ..store.durable import checked_json, readable_json, sha256_hex
from ..store.opened import open_facts
from ..store.public import ROWS, PublicFiles
from ..store.runs import (
    CONFIG,
    CURVE,
    LEDGER,
    METRICS,
    MODEL,
    PRIVATE,
    REPORT,
    ROBUST,
    RunDirectory,
    is_of_validation,
    sidecar_of,
)
from .files import MANIFEST, STATEMENT, bundle_bytes, read_public_files, write_new
from .verify import OK, Evidence, require_verified, verify

FORMAT = "dpcert-bundle-1"
_METRICS_TO_SHARE = ("dataset", "method", "sigma_train", "clean_accuracy", "privacy", "certification")
_SECRET_FACTS = ("noise_key",)


@dataclass(frozen=True)
class Exported:
    """What was written, and what was left out and why. `is_new` is False if the file already had the same bytes."""

    members: list[str]
    left_out: dict[str, str]
    statement: Statement
    data_path: str | None
    is_new: bool


def export(run: Path, file: Path, paper: Paper = no_paper) -> Exported:
    """Verify a finished run as an outsider would, and write its bundle; `paper` provides the reference values of the report."""
    directory = RunDirectory(run)
    _require_finished(directory)
    with directory.locked():
        evidence = Evidence(read_public_files(run))
        checks = verify(evidence.files)
        require_verified(evidence.files, checks)
        content = _content(evidence, {check.name for check in checks if check.outcome == OK}, paper)
        bundle = PublicFiles(file, content, is_bundle=True)
        require_verified(replace(bundle, origin=run), verify(bundle))  # verify the bundle itself too, not only its sources
        left_out = _left_out(directory, content)
    is_new = write_new(file, bundle_bytes(content))
    return Exported(sorted(content), left_out, evidence.statement, evidence.config.data.path, is_new)


def _require_finished(directory: RunDirectory) -> None:
    directory.require(directory.config)
    parts = (directory.ledger, directory.model, directory.metrics)
    finished = all(file.is_file() for file in parts) and Ledger.load(directory.ledger).is_closed
    if not finished or directory.key.exists():
        raise RunError(f"{directory.path} is not finished; resume it with: {directory.command_to_resume}, then export it")


def _content(evidence: Evidence, proved: set[str], paper: Paper) -> dict[str, bytes]:
    """The members of the bundle; `proved` names the checks of dpcert verify that the run passed."""
    files = evidence.files.content
    metrics = _public_metrics(evidence.metrics)
    content = {
        CONFIG: files[CONFIG],
        LEDGER: evidence.ledger.without_macs(),
        METRICS: readable_json(metrics),
        MODEL: files[MODEL],
        STATEMENT: f"{evidence.statement}\n".encode(),
    }
    if "training curve" in proved:  # depends on released values and the test set only
        content[CURVE] = files[CURVE]
    for name in _row_files(evidence, metrics, proved):
        content[name] = files[name]
        content[sidecar_of(name)] = _public_sidecar(open_facts(evidence.files, name))
    if REPORT in files:  # regenerated: the one in the directory may show what is left out here, or the path of the directory
        facts = facts_of(evidence.files)
        shown = [certified for certified in facts.certified if certified.figures in metrics["certification"]]
        digests = {name: sha256_hex(data) for name, data in sorted(content.items())}
        page = render([replace(_in_bundle(facts), metrics=metrics, certified=shown, files=digests)], paper)
        content[REPORT] = page.encode()
    digests = {name: sha256_hex(data) for name, data in sorted(content.items())}
    content[MANIFEST] = readable_json({"format": FORMAT, "sha256": digests})
    return content


def _in_bundle(facts: RunFacts) -> RunFacts:
    """The facts for the report of a bundle: only the parts whose rows are in the bundle."""
    why = "the report of a bundle shows no images of the data set"
    return replace(facts, path=Path("this bundle"), samples=[], attacks=[], images=None, no_images=why, in_bundle=True)


def _row_files(evidence: Evidence, metrics: dict[str, Any], proved: set[str]) -> list[str]:
    """The row files to include: verified certificates and answers at one radius, never those of held-out records."""
    named = [entry["file"] for entry in metrics["certification"]]
    robust = [name for name in evidence.files.content if name.startswith(f"{ROBUST}-") and name.endswith(".tsv")]
    return [name for name in (*named, *robust) if f"{name} belongs to the model" in proved and not is_of_validation(name)]


def _public_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    shared = {name: metrics[name] for name in _METRICS_TO_SHARE}
    shared["certification"] = [entry for entry in metrics["certification"] if entry.get("split", "test") == "test"]
    return {**shared, "timing": {}}


def _public_sidecar(facts: dict[str, Any]) -> bytes:
    """A sidecar without the noise key and with a new checksum; the checksum of the original was verified."""
    return checked_json({key: value for key, value in facts.items() if key not in _SECRET_FACTS})


def _left_out(directory: RunDirectory, content: dict[str, bytes]) -> dict[str, str]:
    reasons = {}
    for file in sorted(directory.path.iterdir()):
        if file.name in content or file.name.startswith("."):
            continue
        if file == directory.private:
            reasons[f"{PRIVATE}/"] = "never leaves the machine"
        elif ROWS.fullmatch(file.name) and is_of_validation(file.name):
            reasons[file.name] = "held-out training records, which epsilon does not cover"
        elif ROWS.fullmatch(file.name):
            reasons[file.name] = f"unfinished: {METRICS} has no figures for it"
        else:
            reasons[file.name] = "not part of a bundle"
    return reasons
