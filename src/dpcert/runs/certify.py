"""From a finished run to certificates and their figures. Glue code without math."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..certification.bounds import confidence_interval
from ..certification.heads import Headed, headed, share
from ..certification.laws import Smoothing
from ..certification.metrics import (
    average_certified_radius,
    certified_accuracy,
    classes_are_mixed_alike,
    even_subset,
    is_about,
    largest_radius,
    pixeldp_figures,
    radii_to_show,
)
from ..certification.request import Request
from ..certification.sweep import Certificates, certify_to_files, check_radius, decide_to_file, require_subset
from ..errors import RunError
from ..progress import Progress, silent
from ..rng import KEY_BYTES, key_from_seed, secret_key
from ..scale.shards import leading, tell, told
from ..scale.world import ALONE, World
from ..store.durable import read_checked_json, read_file, write_checked_json
from ..store.growing import rows_so_far
from ..store.metrics import read_metrics
from ..store.records import AnyExampleRow, CertificateRow, RobustRow, read_rows
from ..store.runs import CERTIFICATES, ROBUST, SKIPPED, rows_stem
from ..training.curve import accuracy
from .config import Config
from .identity import images_sha256
from .loaded import LoadedRun

DEFAULT_EXAMPLES = 500
_FIGURES = "figures"  # in the last message of rank 0


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


def request_of(config: Config, law: Smoothing | None = None) -> CertifyRequest:
    """The certification a config asks for; `law` is that of the model, if it is known."""
    wanted, law = config.certify, law or Smoothing(config.certification_sigma)
    how = Request.under(law, wanted.n0, wanted.n, wanted.alpha, wanted.fresh_noise, wanted.skip_misclassified)
    return CertifyRequest(how, wanted.examples, wanted.seed)


@dataclass(frozen=True)
class _Task:
    """A finished run with the images of a request."""

    run: LoadedRun
    x: Tensor
    y: Tensor
    examples: int
    request: CertifyRequest
    images_sha256: str


def _task(run: LoadedRun, request: CertifyRequest, world: World) -> _Task:
    data = run.read_data(world)
    if request.split == "validation" and not data.held_out:
        raise RunError(f"{run.path} has no validation split; train with --set data.validation=10000")
    x, y = (data.x_validation, data.y_validation) if request.split == "validation" else (data.x_test, data.y_test)
    examples = request.count(len(x))
    require_subset(len(x), examples)
    return _Task(run, x, y, examples, request.resolved(len(x)), images_sha256(x, y))


def certify(run: LoadedRun, request: CertifyRequest, progress: Progress = silent, world: World = ALONE) -> dict[str, Any]:
    """Certify the test set (or validation split) of a run, and add the figures to metrics.json."""
    return certify_runs([(run, request)], progress, world=world)[0]


def certify_runs(
    asked: Sequence[tuple[LoadedRun, CertifyRequest]],
    progress: Progress = silent,
    say: Callable[[str], None] = lambda words: None,
    world: World = ALONE,
) -> list[dict[str, Any]]:
    """Certify several runs; return their figures in the same order. Each run gets the files that it gets alone.

    Runs that differ only in their last linear layer are certified in one pass if their requests and noise keys are equal. The
    others follow one after another. All runs stay locked until the last one is done.

    All ranks call this for the same runs and share the images of each pass. Rank 0 locks the runs, chooses the noise keys and
    writes the files.
    """
    _refuse_repeated([run for run, _ in asked])
    tasks = [_task(run, request, world) for run, request in asked]
    for run, _ in asked:
        run.directory.require(run.directory.metrics)  # fail before hours of voting, not after
    for task in tasks:
        task.run.agree(world, task.images_sha256, task.request)
    if not world.is_first:
        return _follow(tasks, world)
    with leading(world):
        figures = _lead(tasks, progress, say, world)
        tell(world, {_FIGURES: figures})
    return figures


def _lead(tasks: list[_Task], progress: Progress, say: Callable[[str], None], world: World) -> list[dict[str, Any]]:
    """Certify with the runs locked; what rank 0 does."""
    with contextlib.ExitStack() as locks:
        for task in tasks:
            locks.enter_context(task.run.directory.locked())
        for task in tasks:
            _existing_rows(task, task.request, CERTIFICATES)  # refuse before any file is written
        jobs = _jobs(tasks)
        passes = [one for group in _alike(jobs) for one in _passes(group)]
        if len(jobs) > 1:
            say(_in_words(passes))
        total, before = sum(len(one.images) for one in passes), 0
        for one in passes:
            one.run(_from(progress, before, total), world)
            before += len(one.images)
    return [job.entry for job in jobs]


def _follow(tasks: list[_Task], world: World) -> list[dict[str, Any]]:
    """Certify images for rank 0, pass by pass, until it has the figures."""
    while _FIGURES not in (order := told(world)):
        chosen = [tasks[place] for place in order["runs"]]
        model, first = chosen[0].run.model, chosen[0]
        if len(chosen) > 1:
            parts = [part for task in chosen if (part := headed(task.run.model, task.x)) is not None]
            shared = share(parts, first.x, first.request.how.sigma)
            if shared is None or len(parts) < len(chosen):
                raise RunError(f"rank {world.rank} computes other logits than rank 0 for these runs; certify them one by one")
            model = shared
        files = [(task.run.path, indices) for task, indices in zip(chosen, order["indices"], strict=True)]
        key = bytes.fromhex(order["key"])
        certify_to_files(model, first.x, first.y, files, first.request.how, key=key, world=world)
    figures: list[dict[str, Any]] = order[_FIGURES]
    return figures


def _refuse_repeated(runs: Sequence[LoadedRun]) -> None:
    paths = [run.path.resolve() for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise RunError(f"{run.path} is given {paths.count(path)} times; give each run once")


def _from(progress: Progress, before: int, of_all: int) -> Progress:
    """Show the progress of one pass as a part of all passes."""

    def show(done: int, total: int, **facts: str) -> None:
        progress(before + done, of_all, **facts)

    return show


class _Job:
    """One run of a call of `certify_runs`: the file of its rows, its noise key, its images, and in the end its figures."""

    def __init__(self, place: int, task: _Task, parts: Headed | None, new_key: bytes) -> None:
        self.place, self.task, self.parts = place, task, parts
        self.file, self.key = _rows_file(task, task.request, CERTIFICATES, new_key=new_key)
        _refuse_rows_of_others(CertificateRow, self.file, even_subset(len(task.x), task.examples), task.request.how)
        entries = read_metrics(task.run.directory.metrics)["certification"]
        self._published = next((entry for entry in entries if entry["file"] == self.file.name), None)
        self._kept = None if self._published is None else kept_indices(self._published, self.file, task.examples)
        least = task.examples if self._published is None else max(task.examples, self._published["examples"])
        self.indices = self._kept or indices_to_certify(CertificateRow, self.file, len(task.x), task.examples, least)
        self._held = read_file(self.file) if self.file.exists() else b""
        self.entry: dict[str, Any] = {}

    @property
    def missing(self) -> int:
        """The number of images without a row."""
        return len(set(self.indices) - rows_so_far(CertificateRow, self.file).keys())

    @property
    def kind(self) -> tuple[Any, ...]:
        """Jobs with equal kinds may share a pass."""
        task = self.task
        own = id(self) if self.parts is None else self.parts.sha256
        return own, task.request, self.key, task.images_sha256

    def finish(self, rows: list[CertificateRow], seconds: float) -> None:
        """Add the figures of the rows to metrics.json; `seconds` is what they took if some are new."""
        kept = self._published if self._kept else None
        self.entry = _figures(rows, self.task, self.file) if kept is None else kept
        _add_to_metrics(self.task, self.entry, None if read_file(self.file) == self._held else seconds)


def _jobs(tasks: list[_Task]) -> list[_Job]:
    """Prepare the files of all runs; runs that may share a pass, and have no noise key yet, get the same new one."""
    keys: dict[Any, bytes] = {}
    jobs = []
    for place, task in enumerate(tasks):
        may_share = len(tasks) > 1 and task.request.how.smoothing is None  # a shared trunk has no noise inside
        parts = headed(task.run.model, task.x) if may_share else None
        kind = (place if parts is None else parts.sha256, task.request)
        jobs.append(_Job(place, task, parts, keys.setdefault(kind, secret_key())))
    return jobs


@dataclass(frozen=True)
class _Pass:
    """Jobs that are done in one pass with one model: that of the only job, or the heads of all."""

    jobs: list[_Job]
    model: nn.Module

    @property
    def images(self) -> set[int]:
        """The images that any of the jobs wants."""
        return {index for job in self.jobs for index in job.indices}

    def run(self, progress: Progress, world: World) -> None:
        """Cast the missing votes, write the rows, and add the figures to each metrics.json."""
        first, began = self.jobs[0], time.perf_counter()
        lacking = sum(job.missing > 0 for job in self.jobs)
        files = [(job.file, job.indices) for job in self.jobs]
        how, x, y = first.task.request.how, first.task.x, first.task.y
        indices = [job.indices for job in self.jobs]
        tell(world, {"runs": [job.place for job in self.jobs], "key": first.key.hex(), "indices": indices})
        rows = certify_to_files(self.model, x, y, files, how, key=first.key, progress=progress, world=world)
        seconds = (time.perf_counter() - began) / max(1, lacking)  # the runs share the time of the pass
        for job, of_job in zip(self.jobs, rows, strict=True):
            job.finish(of_job, seconds)


def _alike(jobs: list[_Job]) -> list[list[_Job]]:
    groups: dict[tuple[Any, ...], list[_Job]] = {}
    for job in jobs:
        groups.setdefault(job.kind, []).append(job)
    return list(groups.values())


def _passes(jobs: list[_Job]) -> list[_Pass]:
    """One pass for jobs of one kind; one for each if the models cannot be certified together."""
    parts = [job.parts for job in jobs if job.parts is not None]
    first = jobs[0].task
    shared = share(parts, first.x, first.request.how.sigma) if len(jobs) > 1 else None
    return [_Pass([job], job.task.run.model) for job in jobs] if shared is None else [_Pass(jobs, shared)]


def _in_words(passes: list[_Pass]) -> str:
    """How the runs are grouped, in one line."""
    together = [str(len(one.jobs)) for one in passes if len(one.jobs) > 1]
    alone = sum(len(one.jobs) == 1 for one in passes)
    words = [f"{' + '.join(together)} runs share a trunk, sigma and noise: one pass each"] if len(together) > 1 else []
    words += [f"{together[0]} runs share a trunk, sigma and noise: one pass"] if len(together) == 1 else []
    words += [f"{alone} runs share none: one after another"] if alone > 1 or (alone and not together) else []
    words += ["1 run shares none: a pass of its own"] if alone == 1 and together else []
    return "; ".join(words)


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


def decide(
    run: LoadedRun, request: CertifyRequest, radius: float, progress: Progress = silent, world: World = ALONE
) -> dict[str, Any]:
    """Answer "is it robust at `radius`?" for a run's test set; rows in robust-*.tsv. The ranks share the images."""
    check_radius(radius, request.how.sigma)
    task = _task(run, request, world)
    run.agree(world, task.images_sha256, (task.request, radius))
    if not world.is_first:
        order = told(world)
        key, nowhere = bytes.fromhex(order["key"]), run.path
        decide_to_file(run.model, task.x, task.y, order["indices"], nowhere, task.request.how, radius, key=key, world=world)
        figures: dict[str, Any] = told(world)
        return figures
    with leading(world):
        figures = _decided(task, radius, progress, world)
        tell(world, figures)
    return figures


def _decided(task: _Task, radius: float, progress: Progress, world: World) -> dict[str, Any]:
    """Decide with the run locked; what rank 0 does."""
    run, request = task.run, task.request
    with run.directory.locked():
        file, key = _rows_file(task, request, ROBUST, radius)
        _refuse_rows_of_others(RobustRow, file, even_subset(len(task.x), task.examples), request.how)
        indices = indices_to_certify(RobustRow, file, len(task.x), task.examples)
        tell(world, {"key": key.hex(), "indices": indices})
        rows = decide_to_file(
            run.model, task.x, task.y, indices, file, request.how, radius, key=key, progress=progress, world=world
        )
    right = sum(row.robust == 1 and row.correct == 1 for row in rows)
    return {
        "radius": radius,
        "certified_accuracy": right / len(rows),
        "certified_accuracy_interval": list(confidence_interval(right, len(rows))),
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


def _rows_file(
    task: _Task, request: CertifyRequest, word: str, radius: float | None = None, new_key: bytes | None = None
) -> tuple[Path, bytes]:
    """The file and the noise key for this request. A new file without a seed gets `new_key`, which must be secret and new."""
    sidecar, facts, key = _existing_rows(task, request, word, radius)
    if key is None:
        key = (new_key or secret_key()) if request.seed is None else key_from_seed(request.seed, "certify")
        write_checked_json(sidecar, facts | {"seed": request.seed, "noise_key": key.hex()})
    return sidecar.with_suffix(".tsv"), key


def _existing_rows(
    task: _Task, request: CertifyRequest, word: str, radius: float | None = None
) -> tuple[Path, dict[str, Any], bytes | None]:
    """The sidecar for this request, the facts it must have, and its noise key if it exists. Changes nothing.

    Each other (n0, n, alpha) at the same sigma has a separate file.
    """
    how, run = request.how, task.run
    stem = rows_stem(word, how.sigma, of_validation=request.split == "validation", tag=how.law.tag)
    stem += "" if radius is None else f"-r{radius:g}"
    stem += ("-fresh" if how.fresh_noise else "") + (SKIPPED if how.skip_misclassified else "")
    stem += "" if how.together is None else f"-simultaneous{how.together}"
    facts: dict[str, Any] = {**how.facts, "split": request.split, "dtype": "float32"}
    facts |= {"model_sha256": run.model_sha256, "images_sha256": task.images_sha256}
    facts |= {} if radius is None else {"radius": radius}
    plain = run.directory.path / f"{stem}.json"
    other = f"{stem}{'' if how.n0 == 100 else f'-n0{how.n0}'}-n{how.n}-alpha{how.alpha:g}"
    votes = ("n0", "n", "alpha")
    taken = plain.exists() and any(read_facts(plain).get(name) != facts[name] for name in votes)
    sidecar = run.directory.path / f"{other}.json" if taken else plain
    if sidecar.exists():
        return sidecar, facts, _recorded_key(sidecar, facts, request.seed)
    if sidecar.with_suffix(".tsv").exists():
        raise RunError(
            f"{sidecar.with_suffix('.tsv')} has no {sidecar.name}, which contains its noise key; delete it to certify again"
        )
    return sidecar, facts, None


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
        **({} if (native := pixeldp_figures(rows, list(at))) is None else {"pixeldp": native}),
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
