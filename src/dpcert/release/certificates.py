"""Rows of certificates against what is said about them: their model, their own votes, the figures made from them."""

import math
from typing import Any

import numpy as np

from ..certification.bounds import certified_radius, confidence_interval, lower_confidence_bound
from ..certification.metrics import Estimate, average_certified_radius, certified_accuracy, is_about, largest_radius
from ..certification.smooth import ABSTAIN
from ..certification.sweep import PER_INPUT, SIMULTANEOUS, Request
from ..errors import VerifyError
from ..store.durable import parse_json, sha256_hex
from ..store.opened import open_facts, open_rows, open_settings
from ..store.public import PublicFiles
from ..store.records import AttackRow, CertificateRow, RobustRow, SampleRow
from ..store.runs import ATTACKS, METRICS, MODEL, ROBUST, SAMPLES, beside_of

_RADIUS_UNIT, _BOUND_UNIT = 1e-6, 1e-9  # what the rows are rounded down to
_ROUNDING = 1e-9  # two builds of SciPy differ by less
_SHARE_UNIT = 1e-6


class NotCheckedError(Exception):
    """A check that cannot be made with these files."""


def json_object(data: bytes, origin: str) -> dict[str, Any]:
    """A JSON object with finite numbers."""
    try:
        value = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise VerifyError(f"{origin} is not JSON ({error}); restore it from a copy") from error
    if not isinstance(value, dict):
        raise VerifyError(f"{origin} is not a JSON object; restore it from a copy")
    return value


def belongs(files: PublicFiles, entry: dict[str, Any]) -> str:
    """The sidecar is whole, names this model, and the settings that metrics.json states."""
    facts = open_settings(files, entry)
    if facts["alpha_is"] != entry.get("alpha_is", PER_INPUT):
        raise VerifyError(f"its .json says alpha is {facts['alpha_is']}, {METRICS} {entry.get('alpha_is', PER_INPUT)}")
    return _of_model(files, facts)


def side_file(files: PublicFiles, name: str) -> str:
    """Rows that metrics.json does not speak of: answers at one radius must be whole and of this model; others claim nothing."""
    if not name.startswith(f"{ROBUST}-") or not files.content.get(name, b"").endswith(b"\n"):
        raise NotCheckedError(f"{METRICS} has no figures of it: a sweep that was interrupted claims nothing")
    rows = open_rows(RobustRow, files, name)
    of_model = _of_model(files, open_facts(files, name))
    return f"{len(rows)} answers at one radius, {of_model}; they hold no counts to recompute"


def _of_model(files: PublicFiles, facts: dict[str, Any]) -> str:
    if MODEL not in files.content:
        raise NotCheckedError(f"it names the model {facts['model_sha256'][:12]}..., which is not here")
    return f"its .json names this model's SHA-256, {facts['dtype']}, alpha {facts['alpha_is']}"


def samples_follow(files: PublicFiles) -> str:
    """Every row of samples.tsv is whole and of this model, and has the radius and answer of the certificate it names."""
    facts, rows = open_facts(files, SAMPLES), open_rows(SampleRow, files, SAMPLES)
    name = str(facts["certificates"])
    if facts["certificates_sha256"] != sha256_hex(files.bytes_of(beside_of(name))):
        raise VerifyError(f"its .json names another {beside_of(name)} than the one that is here")
    certified = {row.idx: row for row in open_rows(CertificateRow, files, name)}
    for row in rows:
        own = certified.get(row.idx)
        if own is None or (row.label, row.radius, row.correct) != (own.label, own.radius, own.correct):
            raise VerifyError(f"row of example {row.idx}: {name} holds another certificate of it, or none")
    return f"{len(rows)} rows of this model, each with the certificate that {name} holds"


def attacks_follow(files: PublicFiles) -> str:
    """Every row of attacks.tsv is whole and of this model, and its interval is that of its accuracy."""
    open_facts(files, ATTACKS)
    rows = open_rows(AttackRow, files, ATTACKS)
    for row in rows:
        right = round(row.accuracy * row.examples)
        found = (right / row.examples, *confidence_interval(right, row.examples))
        pairs = zip((row.accuracy, row.low, row.high), found, strict=True)
        if not all(math.isclose(said, value, abs_tol=_SHARE_UNIT) for said, value in pairs):
            raise VerifyError(
                f"{row.attack} of strength {row.strength:g}: its accuracy and interval are not of {row.examples} images"
            )
    return f"{len(rows)} rows of this model, each with the interval of its accuracy"


def radii_follow(files: PublicFiles, entry: dict[str, Any]) -> str:
    """Every row's class, bound and radius follow from its count by Clopper and Pearson and Cohen's formula."""
    rows, alpha = open_rows(CertificateRow, files, entry["file"]), _alpha_each(entry)
    for row in rows:
        wrong = _wrong(row, entry, alpha)
        if wrong is not None:
            raise VerifyError(f"row of example {row.idx}: {wrong}")
    return f"{len(rows)} radii recomputed from count, n = {entry['n']}, alpha = {alpha:g}, sigma = {entry['sigma']:g}"


def _alpha_each(entry: dict[str, Any]) -> float:
    """Alpha of one certificate: the stated one, or its share where they are said to hold all together."""
    Request(entry["sigma"], entry["n0"], entry["n"], entry["alpha"])  # raises for what no certificate can be made with
    if entry.get("alpha_is", PER_INPUT) == PER_INPUT:
        return float(entry["alpha"])
    if entry["alpha_is"] != SIMULTANEOUS or entry["together"] != entry["examples"]:
        raise VerifyError(f"alpha is {entry['alpha_is']} for {entry.get('together')} inputs, there are {entry['examples']}")
    share = float(entry["alpha"] / entry["together"])
    if entry["alpha_each"] != share:
        raise VerifyError(f"alpha of each is {entry['alpha_each']}, it must be {share}")
    return share


def _wrong(row: CertificateRow, entry: dict[str, Any], alpha: float) -> str | None:
    """What is wrong with a row, in words; None if it follows."""
    if row.n != entry["n"] or row.correct != int(row.predict == row.label):
        return "n or correct does not fit"
    if row.count is None:
        skipped = bool(entry.get("skip_misclassified")) and row.predict != row.label and row.radius == row.p_lower == 0.0
        return None if skipped else "it has no count"
    if not 0 <= row.count <= row.n:
        return f"{row.count} of {row.n} votes"
    bound = lower_confidence_bound(row.count, row.n, alpha)
    radius = certified_radius(bound, entry["sigma"])
    if not _rounded_down(row.p_lower, bound, _BOUND_UNIT):
        return f"p_lower is {row.p_lower}, {row.count} of {row.n} votes give {bound:.9f}"
    if not _rounded_down(row.radius, radius, _RADIUS_UNIT):
        return f"its radius is {row.radius}, {row.count} of {row.n} votes give {radius:.6f}"
    return None if (row.predict == ABSTAIN) == (radius == 0.0) else "it abstains with a radius, or answers without one"


def _rounded_down(stated: float, value: float, unit: float) -> bool:
    return value - unit - _ROUNDING <= stated <= value + _ROUNDING


def figures_follow(files: PublicFiles, entry: dict[str, Any]) -> str:
    """ACR, certified accuracy, their intervals and the abstentions, made anew from the rows."""
    rows = [row for row in open_rows(CertificateRow, files, entry["file"]) if is_about(entry, row.idx)]
    if len(rows) != entry["examples"] or not rows:
        raise VerifyError(f"it holds {len(rows)} of the {entry['examples']} rows {METRICS} speaks of")
    radius, correct = np.array([row.radius for row in rows]), np.array([bool(row.correct) for row in rows])
    # The entries that name no size are of a version whose interval was the normal one alone.
    largest = largest_radius(entry["n"], _alpha_each(entry), entry["sigma"]) if "size" in entry else None
    _same("acr", entry["acr"], entry["acr_interval"], average_certified_radius(radius, correct, largest))
    for at, stated in entry["certified_accuracy"].items():
        interval = entry["certified_accuracy_interval"][at]
        _same(f"certified accuracy at {at}", stated, interval, certified_accuracy(radius, correct, float(at)))
    abstained = sum(row.predict == ABSTAIN for row in rows)
    if entry["abstained"] != abstained:
        raise VerifyError(f"{METRICS} says {entry['abstained']} abstained, the rows {abstained}")
    return f"ACR {entry['acr']:.4f}, certified accuracy at {len(entry['certified_accuracy'])} radii, {abstained} abstentions"


def _same(name: str, stated: float, interval: list[float | None], found: Estimate) -> None:
    pairs = zip((stated, *interval), (found.value, found.low, found.high), strict=True)
    for said, value in pairs:
        if not math.isclose(math.inf if said is None else said, value, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            raise VerifyError(f"{METRICS} says {name} = {stated} {interval}, the rows give {found.value:.6f}")
