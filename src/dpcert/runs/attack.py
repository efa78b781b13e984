"""From a finished run to attacks.tsv: accuracy under attack, compared with certified accuracy. Glue code without math."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .._validate import integer_in
from ..attacks.kinds import STRENGTHS, Attack, attack, check_strength
from ..attacks.measure import Images, SmoothedTarget, base_right, smoothed_right
from ..certification.bounds import confidence_interval
from ..certification.metrics import certified_accuracy, even_subset
from ..certification.sweep import require_subset
from ..errors import ConfigError, RunError
from ..models.noisy import NoisyModel
from ..progress import Progress, silent
from ..rng import key_from_seed
from ..store.growing import append_missing_rows, drop, rows_so_far
from ..store.records import AttackRow
from ..store.runs import ATTACKS
from .certified import Certification, certification_at
from .certify import DEFAULT_EXAMPLES
from .config import Config
from .identity import images_sha256
from .loaded import LoadedRun
from .sidecar import check_or_write_sidecar, recorded_facts

BASE, SMOOTHED = "base", "smoothed"
HEADINGS = ("attack", "on", "strength", "accuracy", "95 % interval", "certified at this radius", "steps x starts", "images")
Key = tuple[str, str, float | None, float]
_CHOSEN = "floor(i * size / examples)"


@dataclass(frozen=True)
class AttackRequest:
    """Attacks, strengths and target. `smoothing=None` means the base model, `examples=None` means 500 (or all if fewer)."""

    attacks: tuple[tuple[Attack, tuple[float, ...]], ...]
    smoothing: SmoothedTarget | None = None
    examples: int | str | None = None
    seed: int = 0
    batch: int | None = None

    def __post_init__(self) -> None:
        for _, strengths in self.attacks:
            for strength in strengths:
                check_strength(strength)
        if self.batch is not None:
            integer_in("--batch", self.batch, 1)

    @property
    def target(self) -> str:
        """The attacked classifier."""
        return BASE if self.smoothing is None else SMOOTHED

    def count(self, size: int) -> int:
        """The number of test images to attack."""
        if self.examples is None:
            return min(DEFAULT_EXAMPLES, size)
        return size if isinstance(self.examples, str) else self.examples

    @property
    def wanted(self) -> dict[Key, tuple[Attack, float]]:
        """The attacks by the keys of their rows."""
        sigma = None if self.smoothing is None else _as_written(self.smoothing.sigma)
        each = [(how, _as_written(strength)) for how, strengths in self.attacks for strength in strengths]
        return {(how.name, self.target, sigma, strength): (how, strength) for how, strength in each}


def _as_written(value: float) -> float:
    """A strength or sigma as written in its row, so that lookups find the row."""
    return float(f"{value:g}")


def request_for(
    config: Config,
    names: tuple[str, ...],
    strengths: tuple[float, ...] | None = None,
    *,
    steps: int | None = None,
    starts: int | None = None,
    smoothed: bool = False,
    sigma: float | None = None,
    votes: int = 1000,
    examples: int | str | None = None,
    seed: int = 0,
    batch: int | None = None,
) -> AttackRequest:
    """Build a request from plain arguments; missing ones come from the config of the run or are defaults."""
    if not smoothed and sigma is not None:
        raise ConfigError(f"--sigma is {sigma:g}, but the base model has no smoothing noise; add --smoothed")
    kinds = [attack(name, steps, starts) for name in dict.fromkeys(names)]
    chosen = tuple((how, STRENGTHS[how.name] if strengths is None else tuple(strengths)) for how in kinds)
    smoothing = SmoothedTarget(config.certification_sigma if sigma is None else sigma, votes=votes) if smoothed else None
    return AttackRequest(chosen, smoothing, examples, seed, batch)


def numbers(text: str) -> tuple[float, ...]:
    """``0.1,0.5`` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--strengths is {text!r}, must be comma-separated numbers, for example 0.1,0.5") from error


@dataclass(frozen=True)
class Attacked:
    """The rows of a request as written to disk, and the certified accuracy of the same images at the strength of each row.

    It is None for the base model: certificates hold for the smoothed classifier only.
    """

    file: Path
    rows: list[AttackRow]
    certified: list[float | None]

    @property
    def contradictions(self) -> list[str]:
        """Attacks on the smoothed classifier that contradict its certificates beyond chance; there should be none.

        A certificate may fail with probability alpha, and a prediction from few votes is random.
        """
        pairs = zip(self.rows, self.certified, strict=True)
        return [
            f"{row.attack} of strength {row.strength:g} leaves accuracy {row.accuracy:.4f} (interval up to {row.high:.4f}), "
            f"below the certified accuracy {share:.4f}; repeat with more votes (--n): if this persists, one of the two is wrong"
            for row, share in pairs
            if share is not None and row.high < share
        ]


def run_attacks(run: LoadedRun, request: AttackRequest, progress: Progress = silent, *, again: bool = False) -> Attacked:
    """Measure the accuracy of evenly spaced test images under attack, one row per attack in attacks.tsv; rows are reused.

    Existing rows with other steps, starts or images are an error, or are replaced if `again` is set.
    """
    request, data = _with_law_of(run, request), run.data
    examples = request.count(len(data.x_test))
    require_subset(len(data.x_test), examples)
    indices = even_subset(len(data.x_test), examples)
    images = Images(data.x_test[indices], data.y_test[indices], indices)
    sigma = None if request.smoothing is None else request.smoothing.sigma  # the base model has no certificates
    certified = certification_at(run.directory, sigma, run.model_sha256, data.x_test, data.y_test)
    with run.directory.locked():
        file = run.path / ATTACKS
        other = _of_other_images(file, len(data.x_test))
        if not other or again:
            check_or_write_sidecar(file, _facts(run, request, images_sha256(data.x_test, data.y_test)))
        wanted = request.wanted
        other |= _other_settings(file, wanted, examples)
        if other and not again:
            raise RunError(
                f"{file} contains {next(iter(other.values()))}; use the same settings, or --again to replace these rows"
            )
        if other:
            drop(AttackRow, file, other, _in_file)
        rows = append_missing_rows(
            AttackRow, file, list(wanted), lambda todo: _measured(run, images, request, todo, progress), silent, order=_in_file
        )
    return Attacked(file, rows, [_certified_at(row, certified, indices) for row in rows])


def _with_law_of(run: LoadedRun, request: AttackRequest) -> AttackRequest:
    """The request with what the noise inside the model is worth, if there is any; another sigma is refused."""
    target, stated = request.smoothing, run.config.certification_sigma
    if target is None or not isinstance(run.model, NoisyModel):
        return request
    law = run.smoothing(None if target.sigma == stated else target.sigma)
    return replace(request, smoothing=replace(target, sigma=law.sigma))


def _facts(run: LoadedRun, request: AttackRequest, images: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"seed": request.seed, "model_sha256": run.model_sha256, "images_sha256": images, "chosen": _CHOSEN}
    if request.smoothing is not None:
        facts |= {"draws": request.smoothing.draws, "votes": request.smoothing.votes}
    return facts


def _of_other_images(file: Path, size: int) -> dict[Key, str]:
    """Rows of an older version, which chose other images if their number does not divide the size; with a description."""
    if (recorded_facts(file) or {"chosen": _CHOSEN}).get("chosen") == _CHOSEN:
        return {}
    rows = rows_so_far(AttackRow, file)
    return {
        key: f"rows of the first images, not of evenly spaced ones ({row.examples} of {size})"
        for key, row in rows.items()
        if size % row.examples
    }


def _other_settings(file: Path, wanted: dict[Key, tuple[Attack, float]], examples: int) -> dict[Key, str]:
    """Existing rows with other steps, starts or images than wanted, with a description of the difference."""
    mismatches = {}
    for key, row in rows_so_far(AttackRow, file).items():
        if key not in wanted:
            continue
        how, _ = wanted[key]
        pairs = {"steps": (row.steps, how.steps), "starts": (row.starts, how.starts), "examples": (row.examples, examples)}
        differ = [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]
        if differ:
            mismatches[key] = f"{row.attack} of strength {row.strength:g} with other settings ({'; '.join(differ)})"
    return mismatches


def _in_file(key: Key) -> tuple[str, str, float, float]:
    name, target, sigma, strength = key
    return name, target, sigma or 0.0, strength


def _measured(
    run: LoadedRun, images: Images, request: AttackRequest, todo: list[Key], progress: Progress
) -> Iterator[AttackRow]:
    key, smoothing = key_from_seed(request.seed, "attack"), request.smoothing
    done, total = 0, sum(len(images.x) * request.wanted[name][0].starts for name in todo)
    for name in todo:
        how, strength = request.wanted[name]

        def report(count: int, words: str = f"{how.name} {strength:g}") -> None:
            nonlocal done
            done += count
            progress(done, total, now=words)

        if smoothing is None:
            right = base_right(run.model, images, how, strength, key, request.batch, report)
        else:
            right = smoothed_right(run.model, images, how, strength, key, smoothing, request.batch, report)
        low, high = confidence_interval(int(right.sum()), len(right))
        setting = (how.name, request.target, name[2], strength, how.steps, how.starts, len(right))
        yield AttackRow(*setting, float(right.double().mean()), low, high)


def _certified_at(row: AttackRow, certified: Certification | None, indices: list[int]) -> float | None:
    """Certified accuracy at the attack's radius, of the very images that were attacked; None where that is not known."""
    if row.attack != "pgd-l2" or certified is None or not certified.rows.keys() >= set(indices):
        return None
    radius = np.array([certified.rows[index].radius for index in indices])
    correct = np.array([bool(certified.rows[index].correct) for index in indices])
    return certified_accuracy(radius, correct, row.strength).value


def summary(attacked: Attacked) -> list[tuple[str, ...]]:
    """A line for each row."""
    return [
        (
            row.attack,
            row.target if row.sigma is None else f"{row.target}, sigma {row.sigma:g}",
            f"{row.strength:g}",
            f"{100 * row.accuracy:.2f} %",
            f"{100 * row.low:.2f} to {100 * row.high:.2f}",
            "" if share is None else f"{100 * share:.2f} %",
            f"{row.steps} x {row.starts}",
            str(row.examples),
        )
        for row, share in zip(attacked.rows, attacked.certified, strict=True)
    ]
