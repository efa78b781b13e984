"""metrics.json, validated: a value of the wrong type is reported by name instead of causing a crash later."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._validate import shown
from ..errors import RunError
from .durable import parse_checked_json, read_file

Check = Callable[[Any], bool]
INPUT, HIDDEN, BOTH = "input", "hidden", "both"  # where noise enters a smoothed classifier
PLACES = {HIDDEN: "noise after the first layer", BOTH: "noise on the image and after the first layer"}
PAPERS_N0, PAPERS_N, PAPERS_ALPHA = 100, 10_000, 0.001  # CERTIFY as the paper runs it

FORMAT = "dpcert-1"  # of run directories: in the header of a model, and in metrics.json if present
_WITHOUT_CHECKSUM = frozenset(
    ("dataset", "method", "sigma_train", "clean_accuracy", "validation_accuracy", "privacy", "certification", "timing")
)


def read_metrics(path: Path) -> dict[str, Any]:
    """`parse_metrics` of a file."""
    try:
        data = read_file(path)
    except FileNotFoundError as error:
        raise RunError(f"metrics {path} is missing") from error
    except OSError as error:
        raise RunError(f"metrics {path} cannot be read: {error.strerror}; restore it from a copy") from error
    return parse_metrics(data, str(path))


def parse_metrics(data: bytes, path: str) -> dict[str, Any]:
    """The content of a metrics.json: the checksum is verified, and every required key is present and has the right type.

    Everything except the timings follows from ledger, model and rows, so a damaged file can be regenerated.
    """
    metrics = parse_unread_metrics(data, path)
    wrong = _first_wrong(metrics, _METRICS)
    if wrong is None:
        wrong = _first_wrong(metrics["privacy"], _PRIVATE if metrics["privacy"].get("private") else _NOT_PRIVATE, "privacy.")
    for key, checks in {} if wrong else _OF_FINE_TUNING.items():
        listed = metrics["privacy"].get(key, [])
        wrong = wrong or (None if isinstance(listed, list) else f"privacy.{key}")
        for place, item in enumerate([] if wrong else listed):
            wrong = wrong or _first_wrong(item, checks, f"privacy.{key}[{place}].")
    for place, entry in enumerate([] if wrong else metrics["certification"]):
        wrong = wrong or _first_wrong(entry, _certification_checks(entry), f"certification[{place}].")
    if wrong is not None:
        raise RunError(f"{path} has no valid {wrong!r}; it is damaged or from another version")
    return metrics


def parse_unread_metrics(data: bytes, origin: str) -> dict[str, Any]:
    """A metrics.json with checksum and format verified, but not its values: for callers that check each value themselves."""
    remedy = "delete it and rerun dpcert train and dpcert certify, which regenerate it from model, ledger and rows"
    metrics = parse_checked_json(data, f"metrics {origin}", remedy=remedy, unchecked_keys=_WITHOUT_CHECKSUM)
    require_known_format(origin, metrics.get("format", FORMAT))
    return metrics


def is_papers(entry: dict[str, Any], sigma: float, *, may_skip: bool = False) -> bool:
    """Whether a certification uses the paper's settings at this sigma: n0, n, alpha per image, the test set.

    With `may_skip`, misclassified images may have been skipped: ACR and certified accuracy are the same, p_A is not known.
    """
    votes = (entry["n0"], entry["n"], entry["alpha"]) == (PAPERS_N0, PAPERS_N, PAPERS_ALPHA)
    is_plain = _is_plain({**entry, "skip_misclassified": False} if may_skip else entry)
    return bool(entry["sigma"] == sigma and votes and is_plain and entry["split"] == "test")


def is_worth(entry: dict[str, Any], sigma: float, *, may_skip: bool = False) -> bool:
    """Like `is_papers`, also for a certification with noise inside the model that is worth `sigma` at the input."""
    if not has_inner_noise(entry):
        return is_papers(entry, sigma, may_skip=may_skip)
    at_input = {**entry, "smoothing": None, "sigma": sigma}
    return _same_sigma(entry["sigma"], sigma) and is_papers(at_input, sigma, may_skip=may_skip)


def _is_plain(entry: dict[str, Any]) -> bool:
    special = entry.get("fresh_noise") or entry.get("skip_misclassified") or entry.get("alpha_is") == "simultaneous"
    return not special and not has_inner_noise(entry)


def has_inner_noise(entry: Mapping[str, Any]) -> bool:
    """Whether a certification has another smoothing law than noise on the image."""
    return entry.get("smoothing") is not None


def certification_at(entries: Sequence[dict[str, Any]], sigma: Any) -> dict[str, Any] | None:
    """The main certification of the test set at `sigma`: the paper's settings first, then other plain ones, then special ones.

    One with the noise inside the model comes before all with noise on the image. Ties go to the one with more votes, so that
    a later quick check does not replace it.
    """

    def place(entry: dict[str, Any]) -> tuple[Any, ...]:
        alike = {**entry, "smoothing": None}
        votes = (not is_papers(alike, entry["sigma"]), not _is_plain(alike), -entry["n"], entry["alpha"], entry["file"])
        return not has_inner_noise(entry), *votes

    of_test = [entry for entry in entries if entry["split"] == "test" and _same_sigma(entry["sigma"], sigma)]
    return min(of_test, key=place, default=None)


def _same_sigma(one: Any, other: Any) -> bool:
    """Compare as written: rows store six digits of sigma."""
    return _number(one) and _number(other) and f"{one:g}" == f"{other:g}"


def main_sigma(metrics: Mapping[str, Any], certification_sigma: Any) -> Any:
    """The main sigma of a run: the certification sigma of its config. The noisy views may have had more noise.

    For a model with noise inside, what that noise is worth.
    """
    inner = [entry["sigma"] for entry in metrics.get("certification", ()) if has_inner_noise(entry)]
    if inner:
        return inner[0]
    return certification_sigma if _number(certification_sigma) else metrics.get("sigma_train")


def require_known_format(origin: Path | str, stated: Any) -> None:
    """Raise unless this version can read the format of a file."""
    if stated != FORMAT:
        raise RunError(
            f"{origin} has the format {shown(stated)}, this version reads {FORMAT!r}; it is from a newer version, upgrade"
        )


def _first_wrong(table: Any, checks: Mapping[str, Check], prefix: str = "") -> str | None:
    if not isinstance(table, dict):
        return prefix.rstrip(".") or "table of figures"
    return next((prefix + key for key, good in checks.items() if key not in table or not good(table[key])), None)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _positive(value: Any) -> bool:
    return _count(value) and value > 0


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _number(value[0]) and _or_none(_number)(value[1])


def _interval(value: Any) -> bool:
    return _pair(value) and value[1] is not None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _table_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _plain_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value and "\0" not in value


def _certification_checks(entry: Any) -> dict[str, Check]:
    """An entry identifies its images by the size of the test set; older entries use a stride."""
    named_by = "stride" if isinstance(entry, dict) and "size" not in entry else "size"
    inner = _OF_INNER_NOISE if isinstance(entry, dict) and "smoothing" in entry else {}
    return {**_CERTIFICATION, named_by: _positive, **inner}


_METRICS: dict[str, Check] = {
    "dataset": _text,
    "method": _text,
    "clean_accuracy": _or_none(_number),
    "privacy": lambda value: isinstance(value, dict),
    "certification": lambda value: isinstance(value, list),
    "timing": lambda value: isinstance(value, dict),
}
_NOT_PRIVATE: dict[str, Check] = {
    "private": _truth,
    "reason": _text,
    "epsilon": lambda value: value is None,
    "conditions": _texts,
}
_PRIVATE: dict[str, Check] = {
    "private": _truth,
    "epsilon": _number,
    "delta": _number,
    "noise_multiplier": _number,
    "sampling_probability": _number,
    "steps": _count,
    "clip_norm": _number,
    "conditions": _texts,
}
_OF_FINE_TUNING: dict[str, dict[str, Check]] = {  # optional lists of tables in `privacy`
    "phases": {"trains": _text, "steps": _count, "batch_size": _positive, "sampling_probability": _number},
    "public_inputs": {"name": _text, "sha256": _text, "data": _text},
}
_CERTIFICATION: dict[str, Check] = {
    "sigma": _number,
    "n0": _count,
    "n": _count,
    "alpha": _number,
    "examples": _positive,
    "subset": _text,
    "split": _text,
    "acr": _number,
    "acr_interval": _pair,
    "certified_accuracy": _table_of(_number),
    "certified_accuracy_interval": _table_of(_interval),
    "abstained": _count,
    "file": _plain_name,
}
_OF_INNER_NOISE: dict[str, Check] = {
    "smoothing": lambda value: _first_wrong(value, {"site": _text, "input_scale": _number, "whitened_norm": _number}) is None,
    "pixeldp": lambda value: _first_wrong(value, {"acr": _number, "certified_accuracy": _table_of(_number)}) is None,
}
