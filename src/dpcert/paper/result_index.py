"""The runs of a grid on disk; each is read once, when a table or figure needs it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..certification.metrics import earned_radius, reaches, standard_error
from ..report.tables import Certified, RunFacts, read_run
from ..store.metrics import is_worth
from ..store.records import AttackRow, CertificateRow
from ..store.runs import RunDirectory


@dataclass(frozen=True)
class Place:
    """A line of a table or figure: a run at one sigma. `change` says what differs from the preset, e.g. ``copies4``."""

    dataset: str
    method: str
    sigma: float
    seed: int = 0
    change: str = ""


@dataclass(frozen=True)
class Sample:
    """A test image with its three metrics and its certificate at the requested sigma."""

    gradient_norm: float
    hessian_norm: float
    lipschitz: float
    radius: float  # 0 if the class is wrong or the model abstains


@dataclass(frozen=True)
class Measured:
    """The measurements of one run at one sigma; `rows` is empty if it is not certified at this sigma."""

    place: Place
    facts: RunFacts
    rows: list[CertificateRow]

    @property
    def clean(self) -> float | None:
        """Clean accuracy in percent."""
        share = self.facts.metrics["clean_accuracy"]
        return None if share is None else 100.0 * float(share)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are stored, so that more can be measured."""
        return RunDirectory(self.facts.path).model.exists()

    @cached_property
    def _radius(self) -> np.ndarray:
        return np.array([row.radius for row in self.rows])

    @cached_property
    def _correct(self) -> np.ndarray:
        return np.array([bool(row.correct) for row in self.rows])

    @cached_property
    def earned(self) -> np.ndarray:
        """The radius of each image, 0 if the class is wrong."""
        return earned_radius(self._radius, self._correct)

    @property
    def acr(self) -> float:
        """Average certified radius."""
        return float(self.earned.mean())

    @property
    def acr_error(self) -> float:
        """Its standard error, from the spread over images."""
        return standard_error(self.earned)

    def certified_at(self, radius: float) -> np.ndarray:
        """Which images are correct and certified at a radius."""
        return reaches(self._radius, self._correct, radius)

    def share(self, radius: float) -> float:
        """Certified accuracy at a radius, as a fraction."""
        return float(self.certified_at(radius).mean())

    @cached_property
    def samples(self) -> list[Sample]:
        """The images of samples.tsv that are certified at this sigma, joined by index."""
        earned = {row.idx: float(radius) for row, radius in zip(self.rows, self.earned, strict=True)}
        joined = [(row, earned[row.idx]) for row in self.facts.samples if row.idx in earned]
        return [Sample(row.gradient_norm, row.hessian_norm, row.lipschitz, radius) for row, radius in joined]

    @cached_property
    def fgsm(self) -> dict[float, AttackRow]:
        """The base model under FGSM, by strength."""
        return {row.strength: row for row in self.facts.attacks if (row.attack, row.target) == ("fgsm", "base")}


@dataclass(frozen=True)
class Seeds:
    """The runs of one line with all seeds; every figure is the mean over them, as in the table."""

    runs: list[Measured]

    @property
    def place(self) -> Place:
        """The place of the first run."""
        return self.runs[0].place

    @property
    def clean(self) -> float | None:
        """Clean accuracy in percent; None if a run has none."""
        values = [run.clean for run in self.runs]
        return None if None in values else float(np.mean([value for value in values if value is not None]))

    @property
    def acr(self) -> float:
        """Average certified radius."""
        return float(np.mean([run.acr for run in self.runs]))

    def share(self, radius: float) -> float:
        """Certified accuracy at a radius, as a fraction."""
        return float(np.mean([run.share(radius) for run in self.runs]))

    @cached_property
    def earned(self) -> np.ndarray:
        """The radii of all images of all runs."""
        return np.concatenate([run.earned for run in self.runs])


def _counts(facts: RunFacts, certified: Certified, sigma: float) -> bool:
    """Whether a certification is one of the paper's. Rows without the votes of misclassified images count if the config of
    the run asks for them: tables and figures use radii and answers, never p_A."""
    return is_worth(certified.figures, sigma, may_skip=facts.setting("certify", "skip_misclassified") is True)


class ResultIndex:
    """All runs that tables and figures may need, and the directory of each."""

    def __init__(self, paths: dict[Place, Path]) -> None:
        self._paths = paths
        self._facts: dict[Path, RunFacts | None] = {}
        self._measured: dict[Place, Measured | None] = {}

    def get(self, dataset: str, method: str, sigma: float, change: str = "", seed: int = 0) -> Measured | None:
        """The run, certified at `sigma` or not; None if it is not there or not finished."""
        place = Place(dataset, method, sigma, seed, change)
        if place not in self._measured:
            facts = self._read(self._paths[place]) if place in self._paths else None
            entries = [] if facts is None else [c for c in facts.certified if _counts(facts, c, sigma)]
            best = max(entries, key=lambda entry: len(entry.rows), default=None)
            self._measured[place] = None if facts is None else Measured(place, facts, best.rows if best else [])
        return self._measured[place]

    def certified(self, dataset: str, method: str, sigma: float, change: str = "", seed: int = 0) -> Measured | None:
        """The run if it is certified at `sigma`."""
        run = self.get(dataset, method, sigma, change, seed)
        return run if run is not None and run.rows else None

    def seeds(self, dataset: str, method: str, sigma: float, change: str = "") -> Seeds | None:
        """The runs of every seed that is certified at `sigma`; None if there is none."""
        known = sorted({place.seed for place in self._paths})
        runs = [run for seed in known if (run := self.certified(dataset, method, sigma, change, seed))]
        return Seeds(runs) if runs else None

    def all_seeds(self, dataset: str, methods: Iterable[str], sigma: float) -> list[Seeds] | None:
        """The runs of every method, or None if one is missing."""
        by_method = [self.seeds(dataset, method, sigma) for method in methods]
        return [runs for runs in by_method if runs] if all(by_method) else None

    def all_certified(self, dataset: str, methods: Iterable[str], sigma: float) -> list[Measured] | None:
        """The run of seed 0 of every method, or None if one is missing."""
        by_method = [self.certified(dataset, method, sigma) for method in methods]
        return [run for run in by_method if run] if all(by_method) else None

    def models(self, dataset: str) -> list[str]:
        """The names of the models that were trained on a data set."""
        paths = {path for place, path in self._paths.items() if place.dataset == dataset}
        return sorted({str(facts.setting("model", "name")) for path in paths if (facts := self._read(path)) is not None})

    def _read(self, path: Path) -> RunFacts | None:
        if path not in self._facts:
            directory = RunDirectory(path)
            finished = directory.config.exists() and directory.metrics.exists()
            self._facts[path] = read_run(path) if finished else None
        return self._facts[path]
