"""Checked access to the files of a run: each file is checked whenever it is read.

All commands that show, use or share figures open files here (report, reproduce, attack, analyze, verify, export), so that
they accept and refuse the same files. A file is read together with what it depends on: rows with their sidecar and the
model it names, epsilon with the ledger and the model it was stated for.
"""

import math
from typing import Any

from ..errors import LedgerError, RunError
from .chain import read_chain
from .durable import parse_checked_json, sha256_hex
from .metrics import parse_metrics
from .public import PublicFiles
from .records import AnyRow, CurveRow, parse_rows
from .runs import CONFIG, CURVE, LEDGER, METRICS, MODEL, sidecar_of
from .weights import read_facts

_CLOSE = 1e-6  # relative: epsilon recomputed by another build of the same accountant
_SETTINGS = ("sigma", "n0", "n", "alpha", "split", "together", "smoothing")  # in metrics.json and in the sidecar of the rows
_WITHOUT_CHECKSUM = frozenset(  # keys of the oldest sidecars of certificates
    ("sigma", "n0", "n", "alpha", "alpha_is", "split", "dtype", "model_sha256", "seed", "noise_key")
)
_PLAN = ("delta", "noise_multiplier", "sampling_probability", "clip_norm", "relation")


def open_metrics(files: PublicFiles) -> dict[str, Any]:
    """metrics.json, checked against the config, the ledger and the model: no epsilon is shown without checking its ledger."""
    metrics = parse_metrics(files.bytes_of(METRICS), files.place_of(METRICS))
    config = sha256_hex(files.bytes_of(CONFIG))
    if metrics.get("config_sha256", config) != config:  # older files do not record the config
        raise RunError(f"{files.place_of(CONFIG)} is not the config of this run (its SHA-256 differs); restore it from a copy")
    _require_sound_training(files, metrics["privacy"])
    return metrics


def _require_sound_training(files: PublicFiles, privacy: dict[str, Any]) -> None:
    """Raise unless the ledger is a complete, closed chain, the model was trained with it, and both agree with `privacy`."""
    origin, ledger = files.place_of(LEDGER), files.bytes_of(LEDGER)
    entries = read_chain(ledger, origin)
    first, last = entries[0]["data"], entries[-1]["data"]
    if last.get("event") != "close":
        raise LedgerError(
            f"{origin} is not closed: the training is not finished, or the ledger was truncated; restore it from a copy"
        )
    stated = {name: privacy[name] for name in _PLAN if name in privacy and name in first}
    if stated != {name: first[name] for name in stated} or privacy.get("steps", last.get("steps")) != last.get("steps"):
        raise RunError(f"{files.place_of(METRICS)} states a different plan than {origin}; restore both from a copy")
    if MODEL in files.content:
        facts = read_facts(files.content[MODEL], files.place_of(MODEL))
        require_made_with(
            facts, entries[-1]["hash"], sha256_hex(ledger), sha256_hex(files.bytes_of(CONFIG)), files.place_of(CONFIG), origin
        )
        if not _same_epsilon(facts, privacy):
            raise RunError(
                f"{files.place_of(METRICS)} states a different epsilon than {files.place_of(MODEL)}; restore both from a copy"
            )


def require_made_with(
    facts: dict[str, str], ledger_head: str, ledger_sha256: str, config_sha256: str | None, config: object, ledger: object
) -> None:
    """Raise unless a model's header (`facts`) names this ledger and this config."""
    if config_sha256 is not None and facts.get("config_sha256") != config_sha256:
        raise RunError(f"{config} is not the config {MODEL} was trained with; restore it from a copy")
    # The hash chain does not cover the HMACs, and their key is destroyed. The digest of the whole file covers them.
    # Older models record only the head of the chain.
    if facts.get("ledger_head") != ledger_head or facts.get("ledger_sha256", ledger_sha256) != ledger_sha256:
        raise LedgerError(f"{ledger} is not the ledger {MODEL} was trained with; restore both from a copy")


def _same_epsilon(facts: dict[str, str], privacy: dict[str, Any]) -> bool:
    try:
        epsilon, delta = float(facts["epsilon"]), float(facts["delta"])
    except (KeyError, ValueError):
        return False
    stated = privacy["epsilon"] if privacy["private"] else math.inf
    return math.isclose(stated, epsilon, rel_tol=_CLOSE) and privacy.get("delta", delta) == delta


def open_curve(files: PublicFiles, steps: int | None) -> list[CurveRow]:
    """The rows of training.tsv, which must end at the last of the charged `steps`; empty if there is no such file."""
    if CURVE not in files.content:
        return []
    rows = open_rows(CurveRow, files, CURVE)
    if rows and steps is not None and rows[-1].step != steps:
        raise RunError(
            f"{files.place_of(CURVE)} ends at step {rows[-1].step}, not {steps}; it is truncated: restore it from a copy"
        )
    return rows


def open_facts(files: PublicFiles, rows: str) -> dict[str, Any]:
    """The sidecar of a file of rows, which must be intact and name this model."""
    sidecar = sidecar_of(rows)
    remedy = f"restore it from a copy, or delete it and {rows} to compute them again"
    if sidecar not in files.content:
        raise RunError(f"{files.place_of(rows)} has no {sidecar}, which records its settings; {remedy}")
    facts = parse_checked_json(files.content[sidecar], files.place_of(sidecar), remedy=remedy, unchecked_keys=_WITHOUT_CHECKSUM)
    if MODEL in files.content and facts.get("model_sha256") != sha256_hex(files.content[MODEL]):
        raise RunError(f"{files.place_of(rows)} was computed with a different model (its SHA-256 differs); {remedy}")
    return facts


def open_settings(files: PublicFiles, entry: dict[str, Any]) -> dict[str, Any]:
    """The sidecar of the rows of a metrics.json entry; its settings must match the entry."""
    facts = open_facts(files, entry["file"])
    for name in _SETTINGS:
        if facts.get(name) != entry.get(name):
            raise RunError(
                f"{files.place_of(sidecar_of(entry['file']))} says {name} = {facts.get(name)}, {METRICS} {entry.get(name)}; "
                "restore both from a copy"
            )
    return facts


def open_rows(kind: type[AnyRow], files: PublicFiles, name: str, *, may_grow: bool = False) -> list[AnyRow]:
    """The rows of a file, with checksums verified; with `may_grow`, a partial last row is dropped."""
    remedy = "restore it from a copy" if files.is_bundle else None
    return parse_rows(kind, files.bytes_of(name), files.place_of(name), allow_torn_end=may_grow, remedy=remedy)


def open_side_rows(kind: type[AnyRow], files: PublicFiles, name: str) -> list[AnyRow]:
    """The rows of samples.tsv or attacks.tsv, with their sidecar checked; empty if there is no such file.

    These files grow: a kill may leave a partial row, which the next dpcert analyze or dpcert attack drops.
    """
    if name not in files.content:
        return []
    open_facts(files, name)
    return open_rows(kind, files, name, may_grow=True)
