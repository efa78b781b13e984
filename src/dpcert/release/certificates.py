"""Verify rows of certificates against their model, their votes and the figures computed from them."""

import math
from typing import Any

import numpy as np

from ..certification.bounds import confidence_interval, lower_confidence_bound, pixeldp_radius
from ..certification.laws import Smoothing, stored_smoothing
from ..certification.metrics import (
    Estimate,
    average_certified_radius,
    certified_accuracy,
    is_about,
    largest_radius,
    pixeldp_figures,
)
from ..certification.request import PER_INPUT, SIMULTANEOUS, Request
from ..certification.smooth import ABSTAIN
from ..errors import VerifyError
from ..store.durable import parse_json, sha256_hex
from ..store.metrics import INPUT
from ..store.opened import open_facts, open_rows, open_settings
from ..store.public import PublicFiles
from ..store.records import AttackRow, CertificateRow, InnerNoiseRow, RobustRow, SampleRow
from ..store.runs import ATTACKS, METRICS, MODEL, ROBUST, SAMPLES, sidecar_of

_RADIUS_UNIT, _BOUND_UNIT = 1e-6, 1e-9  # the rows are rounded down to these units
_ROUNDING = 1e-9  # different builds of SciPy differ by less
_SHARE_UNIT = 1e-6


class NotCheckedError(Exception):
    """A check that is not possible with these files."""


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
    """Check that the sidecar is intact and names this model and the settings in metrics.json."""
    facts = open_settings(files, entry)
    if facts["alpha_is"] != entry.get("alpha_is", PER_INPUT):
        raise VerifyError(f"its .json states alpha is {facts['alpha_is']}, {METRICS} states {entry.get('alpha_is', PER_INPUT)}")
    return _of_model(files, facts)


def side_file(files: PublicFiles, name: str) -> str:
    """Check rows that metrics.json does not list: answers at one radius must be intact and of this model."""
    if not name.startswith(f"{ROBUST}-") or not files.content.get(name, b"").endswith(b"\n"):
        raise NotCheckedError(f"{METRICS} has no figures for it: an interrupted sweep claims nothing")
    rows = open_rows(RobustRow, files, name)
    of_model = _of_model(files, open_facts(files, name))
    return f"{len(rows)} answers at one radius, {of_model}; the rows have no counts to recompute"


def _of_model(files: PublicFiles, facts: dict[str, Any]) -> str:
    if MODEL not in files.content:
        raise NotCheckedError(f"it names the model {facts['model_sha256'][:12]}..., which is missing")
    return f"its .json names this model's SHA-256, {facts['dtype']}, alpha {facts['alpha_is']}"


def samples_follow(files: PublicFiles) -> str:
    """Check that every row of samples.tsv is intact, of this model, and matches the certificate of its image."""
    facts, rows = open_facts(files, SAMPLES), open_rows(SampleRow, files, SAMPLES)
    name = str(facts["certificates"])
    if facts["certificates_sha256"] != sha256_hex(files.bytes_of(sidecar_of(name))):
        raise VerifyError(f"its .json refers to a different {sidecar_of(name)} than the present one")
    certified = {row.idx: row for row in open_rows(CertificateRow, files, name)}
    for row in rows:
        match = certified.get(row.idx)
        if match is None or (row.label, row.radius, row.correct) != (match.label, match.radius, match.correct):
            raise VerifyError(f"row of example {row.idx}: {name} has a different certificate for it, or none")
    return f"{len(rows)} rows of this model, each matches its certificate in {name}"


def attacks_follow(files: PublicFiles) -> str:
    """Check that every row of attacks.tsv is intact, of this model, and has the interval that follows from its accuracy."""
    open_facts(files, ATTACKS)
    rows = open_rows(AttackRow, files, ATTACKS)
    for row in rows:
        right = round(row.accuracy * row.examples)
        expected = (right / row.examples, *confidence_interval(right, row.examples))
        pairs = zip((row.accuracy, row.low, row.high), expected, strict=True)
        if not all(math.isclose(stated, value, abs_tol=_SHARE_UNIT) for stated, value in pairs):
            raise VerifyError(
                f"{row.attack} of strength {row.strength:g}: its accuracy and interval do not follow from {row.examples} images"
            )
    return f"{len(rows)} rows of this model, each with the interval of its accuracy"


def radii_follow(files: PublicFiles, entry: dict[str, Any]) -> str:
    """Check that class, bound and radius of every row follow from its count (Clopper-Pearson, and Cohen et al.'s formula)."""
    rows, alpha = open_rows(CertificateRow, files, entry["file"]), _alpha_each(entry)
    law = stored_smoothing(entry["sigma"], entry.get("smoothing"))
    for row in rows:
        wrong = _wrong(row, entry, alpha, law) or _wrong_by_class(row, alpha, law)
        if wrong is not None:
            raise VerifyError(f"row of example {row.idx}: {wrong}")
    return f"{len(rows)} radii recomputed from count, n = {entry['n']}, alpha = {alpha:g}, sigma = {entry['sigma']:g}"


def _alpha_each(entry: dict[str, Any]) -> float:
    """Alpha of one certificate: the stated alpha, or a share of it if the certificates hold simultaneously."""
    Request(entry["sigma"], entry["n0"], entry["n"], entry["alpha"])  # raises for invalid settings
    if entry.get("alpha_is", PER_INPUT) == PER_INPUT:
        return float(entry["alpha"])
    if entry["alpha_is"] != SIMULTANEOUS or entry["together"] != entry["examples"]:
        raise VerifyError(f"alpha is {entry['alpha_is']} for {entry.get('together')} inputs, but there are {entry['examples']}")
    share = float(entry["alpha"] / entry["together"])
    if entry["alpha_each"] != share:
        raise VerifyError(f"alpha_each is {entry['alpha_each']}, must be {share}")
    return share


def _wrong_by_class(row: CertificateRow, alpha: float, law: Smoothing) -> str | None:
    """What is wrong with the votes for each class and PixelDP's radius, or None. Rows of noise on the image have neither."""
    if isinstance(row, InnerNoiseRow) != (law.site != INPUT):
        return "it does not have the columns of its smoothing law"
    if not isinstance(row, InnerNoiseRow):
        return None
    votes, native = row.votes_by_class, 0.0
    if row.count is None:
        return None if not votes and row.radius_pixeldp == 0.0 else "it has votes without a count"
    if sum(votes) > row.n or row.count not in (votes[row.predict : row.predict + 1] if row.predict != ABSTAIN else votes):
        return "its votes do not agree with its count"
    if row.predict != ABSTAIN:
        native = pixeldp_radius(votes, row.predict, row.n, alpha, law.sigma)
    same = _rounded_down(row.radius_pixeldp, native, _RADIUS_UNIT)
    return None if same else f"its PixelDP radius is {row.radius_pixeldp}, its votes give {native:.6f}"


def _wrong(row: CertificateRow, entry: dict[str, Any], alpha: float, law: Smoothing) -> str | None:
    """What is wrong with a row, or None."""
    if row.n != entry["n"] or row.correct != int(row.predict == row.label):
        return "n or correct is inconsistent"
    if row.count is None:
        skipped = bool(entry.get("skip_misclassified")) and row.predict != row.label and row.radius == row.p_lower == 0.0
        return None if skipped else "it has no count"
    if not 0 <= row.count <= row.n:
        return f"{row.count} of {row.n} votes is impossible"
    bound = lower_confidence_bound(row.count, row.n, alpha)
    radius = law.radius(bound)
    if not _rounded_down(row.p_lower, bound, _BOUND_UNIT):
        return f"p_lower is {row.p_lower}, {row.count} of {row.n} votes give {bound:.9f}"
    if not _rounded_down(row.radius, radius, _RADIUS_UNIT):
        return f"its radius is {row.radius}, {row.count} of {row.n} votes give {radius:.6f}"
    return None if (row.predict == ABSTAIN) == (radius == 0.0) else "it abstains with a radius, or predicts without one"


def _rounded_down(stated: float, value: float, unit: float) -> bool:
    return value - unit - _ROUNDING <= stated <= value + _ROUNDING


def figures_follow(files: PublicFiles, entry: dict[str, Any]) -> str:
    """Recompute ACR, certified accuracy, their intervals and the abstentions from the rows, and compare."""
    rows = [row for row in open_rows(CertificateRow, files, entry["file"]) if is_about(entry, row.idx)]
    if len(rows) != entry["examples"] or not rows:
        raise VerifyError(f"it has {len(rows)} of the {entry['examples']} rows that {METRICS} states")
    radius, correct = np.array([row.radius for row in rows]), np.array([bool(row.correct) for row in rows])
    # Entries without a size are from a version that used the normal interval only.
    largest = largest_radius(entry["n"], _alpha_each(entry), entry["sigma"]) if "size" in entry else None
    _same("acr", entry["acr"], entry["acr_interval"], average_certified_radius(radius, correct, largest))
    for at, stated in entry["certified_accuracy"].items():
        interval = entry["certified_accuracy_interval"][at]
        _same(f"certified accuracy at {at}", stated, interval, certified_accuracy(radius, correct, float(at)))
    abstained = sum(row.predict == ABSTAIN for row in rows)
    if entry["abstained"] != abstained:
        raise VerifyError(f"{METRICS} states {entry['abstained']} abstentions, the rows have {abstained}")
    if entry.get("pixeldp") != pixeldp_figures(rows, [float(at) for at in entry["certified_accuracy"]]):
        raise VerifyError(f"{METRICS} states other figures of PixelDP's bound than the rows")
    return f"ACR {entry['acr']:.4f}, certified accuracy at {len(entry['certified_accuracy'])} radii, {abstained} abstentions"


def _same(name: str, stated: float, interval: list[float | None], recomputed: Estimate) -> None:
    pairs = zip((stated, *interval), (recomputed.value, recomputed.low, recomputed.high), strict=True)
    for claimed, value in pairs:
        if not math.isclose(math.inf if claimed is None else claimed, value, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            raise VerifyError(f"{METRICS} states {name} = {stated} {interval}, the rows give {recomputed.value:.6f}")
