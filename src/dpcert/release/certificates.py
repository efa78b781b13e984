"""Rows of certificates against what is said about them: their model, their own votes, the figures made from them."""

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from ..certification.bounds import certified_radius, lower_confidence_bound
from ..certification.metrics import Estimate, average_certified_radius, certified_accuracy, is_about, largest_radius
from ..certification.smooth import ABSTAIN
from ..certification.sweep import PER_INPUT, SIMULTANEOUS, Request
from ..errors import VerifyError
from ..store.durable import canonical_json, parse_json, sha256_hex
from ..store.records import AnyRow, CertificateRow, RobustRow, header, row_of

Content = Mapping[str, bytes]
_RADIUS_UNIT, _BOUND_UNIT = 1e-6, 1e-9  # what the rows are rounded down to
_ROUNDING = 1e-9  # two builds of SciPy differ by less
_NAMED = ("sigma", "n0", "n", "alpha", "split")  # by the sidecar and by metrics.json alike


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


def checked_object(data: bytes, origin: str) -> dict[str, Any]:
    """A JSON object without its checksum, which must be right where there is one (the oldest files have none)."""
    value = json_object(data, origin)
    if "check" in value and value.pop("check") != sha256_hex(canonical_json(value).encode()):
        raise VerifyError(f"{origin} is edited or damaged (its checksum is wrong)")
    return value


def belongs(content: Content, entry: dict[str, Any], model_sha256: str | None) -> str:
    """The sidecar is whole, names this model, and the settings that metrics.json states."""
    facts = _sidecar(content, entry["file"])
    for name in _NAMED:
        if facts[name] != entry[name]:
            raise VerifyError(f"its .json says {name} = {facts[name]}, metrics.json {entry[name]}")
    if facts.get("together") != entry.get("together"):
        raise VerifyError(f"its .json says {facts.get('together')} inputs share alpha, metrics.json {entry.get('together')}")
    if facts["alpha_is"] != entry.get("alpha_is", PER_INPUT):
        raise VerifyError(f"its .json says alpha is {facts['alpha_is']}, metrics.json {entry.get('alpha_is', PER_INPUT)}")
    return _of_model(facts, model_sha256)


def side_file(content: Content, name: str, model_sha256: str | None) -> str:
    """Rows that metrics.json does not speak of: answers at one radius must be whole and of this model; others claim nothing."""
    if not name.startswith("robust-") or not content[name].endswith(b"\n"):
        raise NotCheckedError("metrics.json has no figures of it: a sweep that was interrupted claims nothing")
    rows = rows_of(RobustRow, content, name)
    of_model = _of_model(_sidecar(content, name), model_sha256)
    return f"{len(rows)} answers at one radius, {of_model}; they hold no counts to recompute"


def _of_model(facts: dict[str, Any], model_sha256: str | None) -> str:
    if model_sha256 is None:
        raise NotCheckedError(f"it names the model {facts['model_sha256'][:12]}..., which is not here")
    if facts["model_sha256"] != model_sha256:
        raise VerifyError("it was made for another model (its .json names another SHA-256)")
    return f"its .json names this model's SHA-256, {facts['dtype']}, alpha {facts['alpha_is']}"


def _sidecar(content: Content, name: str) -> dict[str, Any]:
    beside = PurePath(name).with_suffix(".json").name
    if beside not in content:
        raise VerifyError(f"{beside} is not here; restore it from a copy")
    return checked_object(content[beside], beside)


def radii_follow(content: Content, entry: dict[str, Any]) -> str:
    """Every row's class, bound and radius follow from its count by Clopper and Pearson and Cohen's formula."""
    rows, alpha = rows_of(CertificateRow, content, entry["file"]), _alpha_each(entry)
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


def figures_follow(content: Content, entry: dict[str, Any]) -> str:
    """ACR, certified accuracy, their intervals and the abstentions, made anew from the rows."""
    rows = [row for row in rows_of(CertificateRow, content, entry["file"]) if is_about(entry, row.idx)]
    if len(rows) != entry["examples"]:
        raise VerifyError(f"it holds {len(rows)} of the {entry['examples']} rows metrics.json speaks of")
    radius, correct = np.array([row.radius for row in rows]), np.array([bool(row.correct) for row in rows])
    # The entries that name no size are of a version whose interval was the normal one alone.
    largest = largest_radius(entry["n"], _alpha_each(entry), entry["sigma"]) if "size" in entry else None
    _same("acr", entry["acr"], entry["acr_interval"], average_certified_radius(radius, correct, largest))
    for at, stated in entry["certified_accuracy"].items():
        interval = entry["certified_accuracy_interval"][at]
        _same(f"certified accuracy at {at}", stated, interval, certified_accuracy(radius, correct, float(at)))
    abstained = sum(row.predict == ABSTAIN for row in rows)
    if entry["abstained"] != abstained:
        raise VerifyError(f"metrics.json says {entry['abstained']} abstained, the rows {abstained}")
    return f"ACR {entry['acr']:.4f}, certified accuracy at {len(entry['certified_accuracy'])} radii, {abstained} abstentions"


def _same(name: str, stated: float, interval: list[float | None], found: Estimate) -> None:
    pairs = zip((stated, *interval), (found.value, found.low, found.high), strict=True)
    for said, value in pairs:
        if not math.isclose(math.inf if said is None else said, value, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            raise VerifyError(f"metrics.json says {name} = {stated} {interval}, the rows give {found.value:.6f}")


def rows_of(kind: type[AnyRow], content: Content, name: str) -> list[AnyRow]:
    """The rows of a file, each with its checksum right."""
    if name not in content:
        raise VerifyError(f"{name} is not here; restore it from a copy")
    lines = content[name].decode("ascii").split("\n")
    if lines.pop() != "" or not lines or lines[0] != header(kind):
        raise VerifyError(f"{name} is cut off or does not start with the columns of its kind")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(row_of(kind, line))
        except ValueError as error:
            raise VerifyError(f"{name} line {number} is edited or damaged ({error})") from error
    if len({row.key for row in rows}) != len(rows):
        raise VerifyError(f"{name} holds {kind.columns[0]} twice")
    return rows
