"""From a finished run to certificates and their figures. Glue code without math."""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..certification.bounds import confidence_interval
from ..certification.metrics import (
    average_certified_radius,
    certified_accuracy,
    classes_are_mixed_alike,
    even_subset,
    is_about,
    largest_radius,
    radii_to_show,
)
from ..certification.sweep import Certificates, Request, certify_to_file, check_radius, decide_to_file, require_subset
from ..errors import RunError
from ..progress import Progress, silent
from ..rng import KEY_BYTES, key_from_seed, secret_key
from ..store.durable import read_checked_json, read_file, write_checked_json
from ..store.growing import rows_so_far
from ..store.metrics import read_metrics
from ..store.records import AnyExampleRow, CertificateRow, RobustRow, read_rows
from ..store.runs import CERTIFICATES, ROBUST, rows_stem
from ..training.curve import accuracy
from .config import Config
from .identity import images_sha256
from .loaded import LoadedRun

DEFAULT_EXAMPLES = 500


@dataclass(frozen=True)
class CertifyRequest:
    """What to certify and how; `examples=None` means 500, or all if there are fewer.

    With `simultaneous` the examples share alpha: a different number of examples is a different statement, in another file.
    """

    how: Request
    examples: int | str | None = None
    seed: int | None = None
    split: str = "test"
    simultaneous: bool = False

    def count(self, size: int) -> int:
        """The number of examples out of `size`."""
        if self.examples is None:
            return min(DEFAULT_EXAMPLES, size)
        return size if isinstance(self.examples, str) else self.examples

    def is_for_fewer_than(self, examples: int) -> bool:
        """Whether the request is for fewer than `examples` existing certificates, which are then kept."""
        asked = DEFAULT_EXAMPLES if self.examples is None else self.examples
        return isinstance(asked, int) and asked < examples

    def resolved(self, size: int) -> "CertifyRequest":
        """The same request for a test set of `size` images, which decides the share of alpha of each image."""
        return replace(self, how=replace(self.how, together=self.count(size))) if self.simultaneous else self


def request_of(config: Config) -> CertifyRequest:
    """The certification a config asks for."""
    wanted = config.certify
    how = Request(config.certification_sigma, wanted.n0, wanted.n, wanted.alpha, wanted.fresh_noise, wanted.skip_misclassified)
    return CertifyRequest(how, wanted.examples, wanted.seed)


@dataclass(frozen=True)
class _Task:
    """A finished run with the images of a request."""

    run: LoadedRun
    x: Tensor
    y: Tensor
    examples: int
    request: CertifyRequest


def _task(run: LoadedRun, request: CertifyRequest) -> _Task:
    data = run.data
    if request.split == "validation" and not data.held_out:
        raise RunError(f"{run.path} has no validation split; train with --set data.validation=10000")
    x, y = (data.x_validation, data.y_validation) if request.split == "validation" else (data.x_test, data.y_test)
    examples = request.count(len(x))
    require_subset(len(x), examples)
    return _Task(run, x, y, examples, request.resolved(len(x)))


def certify(run: LoadedRun, request: CertifyRequest, progress: Progress = silent) -> dict[str, Any]:
    """Certify the test set (or validation split) of a run, and add the figures to metrics.json."""
    task = _task(run, request)
    request = task.request
    run.directory.require(run.directory.metrics)  # fail before hours of voting, not after
    with run.directory.locked():
        file, key = _rows_file(task, request, CERTIFICATES)
        _refuse_rows_of_others(CertificateRow, file, even_subset(len(task.x), task.examples), request.how)
        entries = read_metrics(run.directory.metrics)["certification"]
        published = next((entry for entry in entries if entry["file"] == file.name), None)
        kept = None if published is None else kept_indices(published, file, task.examples)
        least = task.examples if published is None else max(task.examples, published["examples"])
        indices = kept or indices_to_certify(CertificateRow, file, len(task.x), task.examples, least)
        held, began = read_file(file) if file.exists() else b"", time.perf_counter()
        rows = certify_to_file(run.model, task.x, task.y, indices, file, request.how, key=key, progress=progress)
        entry = published if kept and published is not None else _figures(rows, task, file)
        _add_to_metrics(task, entry, None if read_file(file) == held else time.perf_counter() - began)
    return entry


def certificates_of(run: LoadedRun, entry: dict[str, Any]) -> Certificates:
    """The certificates of an entry of metrics.json as tensors, in the order of the images."""
    rows = [row for row in read_rows(CertificateRow, run.path / entry["file"]) if is_about(entry, row.idx)]
    rows.sort(key=lambda row: row.idx)
    return Certificates(
        predict=torch.tensor([row.predict for row in rows]),
        radius=torch.tensor([row.radius for row in rows], dtype=torch.float64),
        correct=torch.tensor([bool(row.correct) for row in rows]),
        count=torch.tensor([-1 if row.count is None else row.count for row in rows]),
        n=entry["n"],
        p_lower=torch.tensor([row.p_lower for row in rows], dtype=torch.float64),
        alpha=entry["alpha"],
        simultaneous="together" in entry,
        sigma=entry["sigma"],
    )


def decide(run: LoadedRun, request: CertifyRequest, radius: float, progress: Progress = silent) -> dict[str, Any]:
    """Answer "is it robust at `radius`?" for a run's test set; rows in robust-*.tsv."""
    check_radius(radius, request.how.sigma)
    task = _task(run, request)
    request = task.request
    with run.directory.locked():
        file, key = _rows_file(task, request, ROBUST, radius)
        _refuse_rows_of_others(RobustRow, file, even_subset(len(task.x), task.examples), request.how)
        indices = indices_to_certify(RobustRow, file, len(task.x), task.examples)
        rows = decide_to_file(run.model, task.x, task.y, indices, file, request.how, radius, key=key, progress=progress)
    low, high = confidence_interval(sum(row.robust == 1 and row.correct == 1 for row in rows), len(rows))
    return {
        "radius": radius,
        "certified_accuracy": sum(row.robust == 1 and row.correct == 1 for row in rows) / len(rows),
        "certified_accuracy_interval": [low, high],
        "undecided": sum(row.robust == -1 for row in rows),
        "votes": sum(row.votes for row in rows),
        "votes_of_certify": len(rows) * (request.how.n0 + request.how.n),
        "alpha_is": request.how.facts["alpha_is"],
        "examples": len(rows),
        "file": file.name,
    }


def kept_indices(published: dict[str, Any], file: Path, asked: int) -> list[int] | None:
    """The images of the published figures, if the request asks for fewer: such a request changes nothing. Otherwise None.

    All their rows must be in `file`.
    """
    held = [index for index in sorted(rows_so_far(CertificateRow, file)) if is_about(published, index)]
    return held if asked < published["examples"] == len(held) else None


def indices_to_certify(kind: type[AnyExampleRow], file: Path, size: int, asked: int, least: int = 0) -> list[int]:
    """The even subset of `size` images for a request of `asked` images; never smaller than what exists already.

    What exists is the larger of `least`, the number of images with published figures (even if rows were lost), and the
    largest even subset whose rows are all in `file`. If `file` has no rows, exactly `asked` images are chosen.
    """
    held = set(rows_so_far(kind, file))
    count = max(asked, least) if held else asked
    larger = (even_subset(size, more) for more in range(min(len(held), size), count, -1))
    return next((indices for indices in larger if held.issuperset(indices)), even_subset(size, count))


def _rows_file(task: _Task, request: CertifyRequest, word: str, radius: float | None = None) -> tuple[Path, bytes]:
    """The file and the noise key for this request; each other (n0, n, alpha) at the same sigma has a separate file."""
    how, run = request.how, task.run
    stem = rows_stem(word, how.sigma, of_validation=request.split == "validation")
    stem += "" if radius is None else f"-r{radius:g}"
    stem += ("-fresh" if how.fresh_noise else "") + ("-skipped" if how.skip_misclassified else "")
    stem += "" if how.together is None else f"-simultaneous{how.together}"
    facts: dict[str, Any] = {**how.facts, "split": request.split, "dtype": "float32"}
    facts |= {"model_sha256": run.model_sha256, "images_sha256": images_sha256(task.x, task.y)}
    facts |= {} if radius is None else {"radius": radius}
    plain = run.directory.path / f"{stem}.json"
    other = f"{stem}{'' if how.n0 == 100 else f'-n0{how.n0}'}-n{how.n}-alpha{how.alpha:g}"
    votes = ("n0", "n", "alpha")
    taken = plain.exists() and any(read_facts(plain).get(name) != facts[name] for name in votes)
    sidecar = run.directory.path / f"{other}.json" if taken else plain
    if sidecar.exists():
        return sidecar.with_suffix(".tsv"), _recorded_key(sidecar, facts, request.seed)
    if sidecar.with_suffix(".tsv").exists():
        raise RunError(
            f"{sidecar.with_suffix('.tsv')} has no {sidecar.name}, which contains its noise key; delete it to certify again"
        )
    key = secret_key() if request.seed is None else key_from_seed(request.seed, "certify")
    facts |= {"seed": request.seed, "noise_key": key.hex()}
    write_checked_json(sidecar, facts)
    return sidecar.with_suffix(".tsv"), key


def _refuse_rows_of_others(kind: type[AnyExampleRow], file: Path, indices: list[int], how: Request) -> None:
    """Raise if `file` has rows of other images: certificates that share alpha are valid for exactly that many images."""
    if how.together is not None and not rows_so_far(kind, file).keys() <= set(indices):
        sidecar = file.with_suffix(".json").name
        raise RunError(
            f"{file} contains rows of other images, chosen by an earlier version; delete it and {sidecar} to certify again"
        )


def read_facts(sidecar: Path) -> dict[str, Any]:
    """The sidecar of a file of certificates, which records their settings."""
    return read_checked_json(sidecar, what="certificate facts", remedy="delete it and its .tsv to certify again")


def _recorded_key(sidecar: Path, facts: dict[str, Any], seed: int | None) -> bytes:
    recorded = read_facts(sidecar)
    for name, value in facts.items():
        if recorded.get(name) != value:
            raise RunError(
                f"{sidecar} records {name} = {recorded.get(name)}, the request has {value}; delete it and its "
                ".tsv to certify again"
            )
    if seed is not None and recorded.get("seed") != seed:
        raise RunError(
            f"{sidecar} records seed {recorded.get('seed')}, the request has --seed {seed}; omit --seed "
            "to resume, or delete it and its .tsv to certify again"
        )
    try:
        key = bytes.fromhex(recorded["noise_key"])
        if len(key) != KEY_BYTES:
            raise ValueError("wrong length")
    except (KeyError, ValueError, TypeError) as error:
        raise RunError(f"{sidecar} has no valid noise key; delete it and its .tsv to certify again") from error
    return key


def _figures(rows: list[CertificateRow], task: _Task, file: Path) -> dict[str, Any]:
    how, size = task.request.how, len(task.x)
    radius = np.array([row.radius for row in rows])
    correct = np.array([bool(row.correct) for row in rows])
    acr = average_certified_radius(radius, correct, largest_radius(how.n, how.alpha_each, how.sigma))
    at = {r: certified_accuracy(radius, correct, r) for r in radii_to_show(how.sigma)}
    return {
        **how.facts,
        "examples": len(rows),
        "subset": _subset_in_words([row.idx for row in rows], task.y, task.request.split),
        "split": task.request.split,
        "size": size,
        **({} if size % len(rows) else {"stride": size // len(rows)}),
        "acr": acr.value,
        "acr_interval": [acr.low, acr.high if math.isfinite(acr.high) else None],
        "certified_accuracy": {f"{r:.2f}": e.value for r, e in at.items()},
        "certified_accuracy_interval": {f"{r:.2f}": [e.low, e.high] for r, e in at.items()},
        "abstained": sum(row.predict == -1 for row in rows),
        "file": file.name,
    }


def _subset_in_words(indices: list[int], labels: Tensor, split: str) -> str:
    size, examples = len(labels), len(indices)
    stride = size // examples
    which = f"floor(i * {size} / {examples})" if size % examples else f"0, {stride}, {2 * stride}, ..."
    words = f"indices {which} of the {size} {split} images"
    if classes_are_mixed_alike(labels[indices].numpy(), labels.numpy()):
        return words
    return f"{words}, whose classes are not mixed as in the whole set: the figures and intervals are about these images only"


def _add_to_metrics(task: _Task, entry: dict[str, Any], seconds: float | None) -> None:
    """Add the figures to metrics.json; `seconds` is the time spent on new rows, None if there were none."""
    path = task.run.directory.metrics
    before = read_metrics(path)
    metrics = {**before, "timing": dict(before["timing"])}
    if entry["split"] == "test" and metrics.get("clean_accuracy") is None:
        metrics["clean_accuracy"] = accuracy(task.run.model, task.run.data.x_test, task.run.data.y_test)
    metrics["privacy"] = task.run.statement.as_metrics()
    others = [other for other in metrics["certification"] if other.get("file") != entry["file"]]
    metrics["certification"] = sorted([*others, entry], key=lambda e: (e["sigma"], e["n"], e["alpha"], e["file"]))
    if seconds is not None:
        metrics["timing"]["certify_seconds"] = round(seconds, 1)
    if metrics != before:
        write_checked_json(path, metrics)
