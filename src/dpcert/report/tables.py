"""Run directories read into plain values, and the table of several runs."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..certification.metrics import is_about
from ..errors import RunError
from ..rounding import ceil_text
from ..store.durable import sha256_hex
from ..store.metrics import INPUT, PLACES, certification_at, main_sigma
from ..store.opened import open_curve, open_metrics, open_rows, open_settings, open_side_rows
from ..store.public import PublicFiles, read_directory
from ..store.records import AttackRow, CertificateRow, CurveRow, SampleRow
from ..store.runs import ATTACKS, CONFIG, LEDGER, METRICS, REPORT, SAMPLES, RunDirectory, is_of_validation

ABSTAIN = -1  # in the column `predict`


@dataclass(frozen=True)
class Certified:
    """One certification of a run: its figures, and the rows they are computed from."""

    figures: dict[str, Any]
    rows: list[CertificateRow]

    @property
    def alpha_is(self) -> str:
        """What alpha bounds: the failure of each certificate, or of any of them."""
        return f"for all {self.figures['examples']} images together" if self.is_simultaneous else "per image"

    @property
    def is_simultaneous(self) -> bool:
        """Whether all certificates hold at once with probability 1 - alpha."""
        return bool(self.figures.get("alpha_is") == "simultaneous")

    @property
    def site(self) -> str:
        """Where noise enters: ``input``, ``hidden`` or ``both``."""
        return str((self.figures.get("smoothing") or {}).get("site", INPUT))

    @property
    def mark(self) -> str:
        """Marks simultaneous certificates and noise inside the model, to distinguish them from the usual ones at a sigma."""
        return (f", {PLACES[self.site]}" if self.site in PLACES else "") + (", simultaneous" if self.is_simultaneous else "")

    @property
    def skips(self) -> bool:
        """Whether images that the first n0 votes misclassify got no further votes: they have no radius and no p_A."""
        return bool(self.figures.get("skip_misclassified"))

    @property
    def voted(self) -> "Certified":
        """The same with only the images that got all their votes: what shows p_A, or radii of wrong answers, uses these."""
        return replace(self, rows=[row for row in self.rows if row.count is not None]) if self.skips else self

    @property
    def is_of_test_set(self) -> bool:
        """Whether these are test images, and not held-out records of the training set."""
        return bool(self.figures.get("split", "test") == "test")

    @property
    def radius(self) -> np.ndarray:
        """Radii, in the order of the rows."""
        return np.array([row.radius for row in self.rows])

    @property
    def correct(self) -> np.ndarray:
        """Which answers of the smoothed model are correct."""
        return np.array([bool(row.correct) for row in self.rows])

    @property
    def abstained(self) -> np.ndarray:
        """Which inputs got no answer."""
        return np.array([row.predict == ABSTAIN for row in self.rows])


@dataclass(frozen=True)
class RunFacts:
    """The public facts of a run directory; `images` is the test split, if the caller passed it."""

    path: Path
    metrics: dict[str, Any]
    config: str
    certified: list[Certified]
    samples: list[SampleRow] = field(default_factory=list)
    attacks: list[AttackRow] = field(default_factory=list)
    curve: list[CurveRow] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # name -> SHA-256
    images: Sequence[np.ndarray] | None = None
    no_images: str = "the data set was not available when this page was generated"
    in_bundle: bool = False  # the page is for readers who only have the bundle
    ledger: bytes = field(default=b"", repr=False)

    @property
    def of_test(self) -> list[Certified]:
        """The certifications of test images. A page never shows those of held-out training records."""
        return [certified for certified in self.certified if certified.is_of_test_set]

    @property
    def main(self) -> Certified | None:
        """The certification that the page shows first: at the run's sigma or, if there is none, at the smallest."""
        configured = self.setting("certify", "sigma")
        sigma = main_sigma(self.metrics, self.setting("method", "sigma") if configured is None else configured)
        smallest = min((certified.figures["sigma"] for certified in self.of_test), default=None)
        return self.certified_at(sigma) or self.certified_at(smallest)

    def certified_at(self, sigma: float | None) -> Certified | None:
        """The certification that represents the test set at `sigma`; None if there is none."""
        entry = certification_at([certified.figures for certified in self.certified], sigma)
        return next((certified for certified in self.certified if certified.figures is entry), None)

    @property
    def analyzed(self) -> list[SampleRow]:
        """The per-image metrics, each with the radius and answer of the main certification."""
        main = self.main
        rows = {} if main is None else {row.idx: row for row in main.rows}
        joined = [(sample, rows[sample.idx]) for sample in self.samples if sample.idx in rows]
        return [replace(sample, radius=row.radius, correct=row.correct) for sample, row in joined]

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The sections of config.toml."""
        return {name: section for name, section in tomllib.loads(self.config).items() if isinstance(section, dict)}

    def setting(self, section: str, key: str) -> Any:
        """One value of config.toml; None if it is not set."""
        return self.settings.get(section, {}).get(key)

    @property
    def title(self) -> str:
        """Method and data set."""
        return f"{self.metrics['method']} on {self.metrics['dataset']}"

    @property
    def privacy(self) -> str:
        """The privacy claim in one line; never a number for a run that is not private."""
        privacy = self.metrics["privacy"]
        if not privacy["private"]:
            return f"epsilon = inf (not private: {privacy['reason']})"
        return f"epsilon = {ceil_text(privacy['epsilon'], 4)} at delta = {privacy['delta']:g}"

    @property
    def public_inputs(self) -> list[dict[str, str]]:
        """The public weights that training started from, each with `name`, `sha256` and `data`; epsilon does not cover them."""
        return list(self.metrics["privacy"].get("public_inputs", ()))

    @property
    def phases(self) -> list[dict[str, Any]]:
        """The phases of the training, if there were several."""
        return list(self.metrics["privacy"].get("phases", ()))

    @property
    def sentences(self) -> list[str]:
        """The stored sentences of the privacy statement; composed here for runs of versions that did not store them."""
        privacy = self.metrics["privacy"]
        if "sentences" in privacy:
            return list(privacy["sentences"])
        how = f"Neighbours: {privacy['relation']}. Accountant: {privacy['accountant'].upper()}. {privacy['steps']} steps of "
        how += f"Poisson sampling (q = {privacy['sampling_probability']:.6g}), clip norm {privacy['clip_norm']}, "
        how += f"noise multiplier {privacy['noise_multiplier']:g}."
        return [*([how] if privacy["private"] else []), *privacy.get("conditions", ())]


@dataclass(frozen=True)
class PaperFigures:
    """The paper's figures for the request of a run; accuracies in percent, as in the paper."""

    clean_accuracy: float
    acr: float
    certified_accuracy: float  # at radius 0.25
    sentence: str  # the same figures in words, compared with our intervals
    model: str | None = None  # the paper's model, if it is not that of the run: then the figures do not compare

    @property
    def label(self) -> str:
        """What a figure of the paper is labeled with."""
        return "paper" if self.model is None else f"paper, {self.model}"


Paper = Callable[[RunFacts, Certified], PaperFigures | None]  # the only way for the paper's figures to get into a report


def no_paper(run: RunFacts, certified: Certified) -> PaperFigures | None:
    """The default: a report without the paper's figures. `dpcert.paper.comparison.figures_of` adds them."""
    return None


def read_run(path: Path) -> RunFacts:
    """Read all public facts of a run; every file is checked."""
    directory = RunDirectory(path)
    directory.require(directory.config, directory.metrics)
    return facts_of(read_directory(path))


def facts_of(files: PublicFiles) -> RunFacts:
    """Like `read_run`, for files that are already in memory."""
    metrics = open_metrics(files)
    text = _toml(files.place_of(CONFIG), files.bytes_of(CONFIG))
    certified = [Certified(entry, _rows(files, entry)) for entry in metrics["certification"]]
    samples = open_side_rows(SampleRow, files, SAMPLES)
    attacks = open_side_rows(AttackRow, files, ATTACKS)
    curve = open_curve(files, metrics["privacy"].get("steps"))
    return RunFacts(
        files.origin, metrics, text, certified, samples, attacks, curve, _digests(files), ledger=files.bytes_of(LEDGER)
    )


def _toml(path: str, data: bytes) -> str:
    try:
        text = data.decode("utf-8")
        tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not TOML ({error}); restore it from a copy") from error
    return text


def _digests(files: PublicFiles) -> dict[str, str]:
    """SHA-256 of the files that a run's guarantees rest on, except rows about held-out training records."""
    names = [name for name in sorted(files.content) if name != REPORT and not is_of_validation(name)]
    return {name: sha256_hex(files.content[name]) for name in names}


def _rows(files: PublicFiles, entry: dict[str, Any]) -> list[CertificateRow]:
    open_settings(files, entry)
    rows = [row for row in open_rows(CertificateRow, files, entry["file"]) if is_about(entry, row.idx)]
    if len(rows) < entry["examples"]:
        raise RunError(
            f"{files.place_of(entry['file'])} has {len(rows)} rows, {METRICS} says {entry['examples']}; "
            "run dpcert certify again"
        )
    return rows


HEADINGS = ("run", "sigma", "privacy", "clean accuracy", "ACR", "certified at 0.25", "images", "abstained")


def summary(runs: Sequence[RunFacts], paper: Paper = no_paper) -> list[tuple[str, ...]]:
    """One row per certification, or per run without any; the paper's figures are in brackets if it has them."""
    table: list[tuple[str, ...]] = []
    titles = [run.title for run in runs]
    for run in runs:
        name = run.title if titles.count(run.title) == 1 else f"{run.title}: {run.path.name}"
        name += "".join(f", from public {known['name']} (SHA-256 {known['sha256'][:16]}...)" for known in run.public_inputs)
        clean = run.metrics["clean_accuracy"]
        if not run.certified:
            table.append((name, "", run.privacy, _percent(clean), "not certified", "", "", ""))
        for certified in run.certified:
            f, printed = certified.figures, paper(run, certified)
            low, high = f["acr_interval"]
            interval = "" if high is None else f" ({low:.3f} to {high:.3f})"
            at, native = f["certified_accuracy"].get("0.25"), f.get("pixeldp")
            native_acr = f" [PixelDP's bound {native['acr']:.3f}]" if native else ""
            native_at = f" [PixelDP's bound {_percent(native['certified_accuracy'].get('0.25'))}]" if native else ""
            split = "" if f.get("split", "test") == "test" else f" ({f['split']})"
            table.append(
                (
                    name + split,
                    f"{f['sigma']:g}{certified.mark}",
                    run.privacy,
                    _percent(clean) + (f" [{printed.label} {printed.clean_accuracy:.2f} %]" if printed else ""),
                    f"{f['acr']:.3f}{interval}" + (f" [{printed.label} {printed.acr:.3f}]" if printed else "") + native_acr,
                    _percent(at) + (f" [{printed.label} {printed.certified_accuracy:.1f} %]" if printed else "") + native_at,
                    str(f["examples"]),
                    str(f["abstained"]),
                )
            )
    return table


def as_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.2f} %"
