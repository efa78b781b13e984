"""The one way from the files of a run to its figures: each file is checked when something is read from it.

All commands that show, use or share figures open files here (report, reproduce, attack, analyze, verify, export), so that
none of them believes a file that another one refuses. What stands on something is read with it: rows with the file beside
them and the model they name, epsilon with the ledger and the model it was stated for.
"""

import math
from typing import Any

from ..errors import LedgerError, RunError
from .chain import read_chain
from .durable import parse_checked_json, sha256_hex
from .metrics import parse_metrics
from .public import PublicFiles
from .records import AnyRow, CurveRow, parse_rows
from .runs import CONFIG, CURVE, LEDGER, METRICS, MODEL, beside_of
from .weights import read_facts

_CLOSE = 1e-6  # relative: epsilon recomputed by another build of the same accountant
_SETTINGS = ("sigma", "n0", "n", "alpha", "split", "together")  # named by metrics.json and beside the rows alike
_WITHOUT_CHECKSUM = frozenset(  # the oldest files beside certificates
    ("sigma", "n0", "n", "alpha", "alpha_is", "split", "dtype", "model_sha256", "seed", "noise_key")
)
_PLAN = ("delta", "noise_multiplier", "sampling_probability", "clip_norm", "relation")


def open_metrics(files: PublicFiles) -> dict[str, Any]:
    """metrics.json, of this config and of a training that is sound: whoever shows an epsilon has looked at its ledger."""
    metrics = parse_metrics(files.bytes_of(METRICS), files.place_of(METRICS))
    config = sha256_hex(files.bytes_of(CONFIG))
    if metrics.get("config_sha256", config) != config:  # older metrics name no config
        raise RunError(f"{files.place_of(CONFIG)} is not the config of this run (its SHA-256 differs); restore it from a copy")
    _require_sound_training(files, metrics["privacy"])
    return metrics


def _require_sound_training(files: PublicFiles, privacy: dict[str, Any]) -> None:
    """Raise unless the ledger is a whole, closed chain, the model was made with it, and both say what `privacy` says."""
    origin, ledger = files.place_of(LEDGER), files.bytes_of(LEDGER)
    entries = read_chain(ledger, origin)
    first, last = entries[0]["data"], entries[-1]["data"]
    if last.get("event") != "close":
        raise LedgerError(
            f"{origin} is not closed: the training is not finished, or the ledger was cut; restore it from a copy"
        )
    stated = {name: privacy[name] for name in _PLAN if name in privacy and name in first}
    if stated != {name: first[name] for name in stated} or privacy.get("steps", last.get("steps")) != last.get("steps"):
        raise RunError(f"{files.place_of(METRICS)} states another plan than {origin} holds; restore both from a copy")
    if MODEL in files.content:
        facts = read_facts(files.content[MODEL], files.place_of(MODEL))
        require_made_with(
            facts, entries[-1]["hash"], sha256_hex(ledger), sha256_hex(files.bytes_of(CONFIG)), files.place_of(CONFIG), origin
        )
        if not _same_epsilon(facts, privacy):
            raise RunError(
                f"{files.place_of(METRICS)} states another epsilon than {files.place_of(MODEL)}; restore both from a copy"
            )


def require_made_with(
    facts: dict[str, str], ledger_head: str, ledger_sha256: str, config_sha256: str | None, config: object, ledger: object
) -> None:
    """Raise unless a model's header (`facts`) names this ledger and this config."""
    if config_sha256 is not None and facts.get("config_sha256") != config_sha256:
        raise RunError(f"{config} is not the config {MODEL} was made with; restore it from a copy")
    # The hash chain does not cover the HMACs, and their key is destroyed: the whole file's digest does.
    # Models from before it was recorded name the head of the chain only.
    if facts.get("ledger_head") != ledger_head or facts.get("ledger_sha256", ledger_sha256) != ledger_sha256:
        raise LedgerError(f"{ledger} is not the ledger {MODEL} was made with; restore both")


def _same_epsilon(facts: dict[str, str], privacy: dict[str, Any]) -> bool:
    try:
        epsilon, delta = float(facts["epsilon"]), float(facts["delta"])
    except (KeyError, ValueError):
        return False
    stated = privacy["epsilon"] if privacy["private"] else math.inf
    return math.isclose(stated, epsilon, rel_tol=_CLOSE) and privacy.get("delta", delta) == delta


def open_curve(files: PublicFiles, steps: int | None) -> list[CurveRow]:
    """The rows of training.tsv, which must reach the last of the `steps` charged; none where there is no such file."""
    if CURVE not in files.content:
        return []
    rows = open_rows(CurveRow, files, CURVE)
    if rows and steps is not None and rows[-1].step != steps:
        raise RunError(f"{files.place_of(CURVE)} does not reach the last of {steps} steps: it was cut; restore it from a copy")
    return rows


def open_facts(files: PublicFiles, rows: str) -> dict[str, Any]:
    """The facts beside a file of rows: whole, and of the model that is here."""
    beside = beside_of(rows)
    remedy = f"restore it from a copy, or delete it and {rows} to make them again"
    if beside not in files.content:
        raise RunError(f"{files.place_of(rows)} has no {beside} beside it, which says how it was made; {remedy}")
    facts = parse_checked_json(files.content[beside], files.place_of(beside), remedy=remedy, unchecked_keys=_WITHOUT_CHECKSUM)
    if MODEL in files.content and facts.get("model_sha256") != sha256_hex(files.content[MODEL]):
        raise RunError(f"{files.place_of(rows)} was made for another model (its SHA-256 differs); {remedy}")
    return facts


def open_settings(files: PublicFiles, entry: dict[str, Any]) -> dict[str, Any]:
    """The facts beside the rows of an entry of metrics.json, which must name the settings that the entry names."""
    facts = open_facts(files, entry["file"])
    for name in _SETTINGS:
        if facts.get(name) != entry.get(name):
            raise RunError(
                f"{files.place_of(beside_of(entry['file']))} says {name} = {facts.get(name)}, {METRICS} {entry.get(name)}; "
                "restore both from a copy"
            )
    return facts


def open_rows(kind: type[AnyRow], files: PublicFiles, name: str, *, may_grow: bool = False) -> list[AnyRow]:
    """The rows of a file, each with its checksum right; in a file that `may_grow` a half-written last one is left out."""
    remedy = "restore it from a copy" if files.is_bundle else None
    return parse_rows(kind, files.bytes_of(name), files.place_of(name), allow_torn_end=may_grow, remedy=remedy)


def open_side_rows(kind: type[AnyRow], files: PublicFiles, name: str) -> list[AnyRow]:
    """The rows of samples.tsv or attacks.tsv, with the facts beside them; none where there is no such file.

    They grow: a kill may leave half a row, which the next dpcert analyze or attack drops.
    """
    if name not in files.content:
        return []
    open_facts(files, name)
    return open_rows(kind, files, name, may_grow=True)
