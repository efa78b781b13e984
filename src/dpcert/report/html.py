"""The report: one self-contained page, and its figures as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..certification.metrics import largest_radius
from ..rounding import ceil_text, floor_text
from ..store.durable import write_atomically
from ..store.metrics import HIDDEN
from ..store.records import METRICS, CertificateRow
from . import figures, pictures, words
from .membership import Membership, membership_curve, membership_of
from .statistics import (
    CERTIFIED_WRONG,
    ClassFigures,
    ExampleGroup,
    Gain,
    MetricFigures,
    by_class,
    correlations,
    example_groups,
    gain,
    weakest,
)
from .tables import Certified, Paper, RunFacts, no_paper
from .theme import Drawing, Stroke, stroke

_CLASS_RADII = (0.0, 0.25, 0.5, 1.0, 1.5)
_EXAMPLES_OF_ONE_RUN, _EXAMPLES_OF_SEVERAL_RUNS = 6, 4


@dataclass(frozen=True)
class _Picture:
    """One example of the page; without the data set, it has a row but no picture."""

    row: CertificateRow
    image: str | None
    noisy: str | None


@dataclass(frozen=True)
class _Group:
    """A group of examples with their pictures."""

    facts: ExampleGroup
    pictures: list[_Picture]


@dataclass(frozen=True)
class _RunView:
    """One run as the page shows it."""

    name: str
    run: RunFacts
    stroke: Stroke
    lead: dict[str, str]
    classes: list[ClassFigures]
    weakest: ClassFigures | None
    groups: list[_Group]
    correlations: list[MetricFigures]
    gain: Gain | None  # over the first run of the page
    membership: Membership

    @property
    def labels(self) -> list[int]:
        """The classes that have an image."""
        return [entry.label for entry in self.classes]

    def share(self, label: int, radius: float) -> float | None:
        """The certified accuracy of a class."""
        return next((entry.certified[radius] for entry in self.classes if entry.label == label), None)

    def class_name(self, label: int) -> str:
        """The class label, with its name if it has one."""
        return words.class_name(self.run, label)


def write_report(runs: list[RunFacts], page: Path | None, figures_folder: Path | None = None, paper: Paper = no_paper) -> None:
    """Write the requested files: the page, and its figures as SVG and PNG; `paper` gives the paper's figures, if any."""
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, render(runs, paper).encode())
    if figures_folder is not None:
        figures_folder.mkdir(parents=True, exist_ok=True)
        for drawing in _drawings(list(zip(words.run_names(runs), runs, strict=True)), paper).values():
            for name, data in drawing.files().items():
                write_atomically(figures_folder / name, data, real_folder=True)


def render(runs: list[RunFacts], paper: Paper = no_paper) -> str:
    """The page as text; the same facts give the same bytes."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_packaged), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "ceil_text": ceil_text,
        "floor_text": floor_text,
        "percent": lambda share: f"{100 * share:.1f}",
        "signed": _signed,
    }
    names = words.run_names(runs)
    views = [_view(name, run, place, runs, paper) for place, (name, run) in enumerate(zip(names, runs, strict=True))]
    return environment.get_template("page.html").render(
        views=views,
        title=", ".join(names) if len(runs) <= 3 else f"{len(runs)} runs",
        drawings=_drawings(list(zip(names, runs, strict=True)), paper),
        paper=paper,
        with_paper=paper is not no_paper,
        radii=_radii_of_table([c for run in runs for c in run.of_test]),
        headline=words.HEADLINE_RADIUS,
        metric_names=METRICS,
        promises=_promises(views),
        how_they_hold=words.how_they_hold([c for run in runs for c in run.of_test]),
        where_it_ends=words.where_it_ends,
        differing=words.differing_settings(runs) if len(runs) > 1 else [],
        datasets=sorted({run.metrics["dataset"] for run in runs}),
    )


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _promises(views: Sequence[_RunView]) -> list[tuple[RunFacts, list[str]]]:
    """Each distinct privacy statement, with the names of the runs that share it."""
    grouped: dict[tuple[str, ...], tuple[RunFacts, list[str]]] = {}
    for view in views:
        grouped.setdefault((view.run.privacy, *view.run.sentences), (view.run, []))[1].append(view.name)
    return list(grouped.values())


def _packaged(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _drawings(runs: Sequence[tuple[str, RunFacts]], paper: Paper = no_paper) -> dict[str, Drawing]:
    """The figures that have rows, by name."""
    drawings: list[Drawing | None] = []
    if any(run.of_test for _, run in runs):
        drawings += [figures.certified_accuracy_curve(runs, paper)]
    if any(run.main for _, run in runs):
        drawings += [figures.radii(runs), figures.p_lower(runs)]
    if any(run.attacks for _, run in runs):
        drawings += [figures.attack_l2(runs), figures.attack_linf(runs)]
    if any(run.samples for _, run in runs):
        drawings += [*figures.sample_histograms(runs), *figures.metrics_by_radius(runs)]
    drawings += [membership_curve(runs), *figures.training_curves(runs)]
    return {drawing.name: drawing for drawing in drawings if drawing is not None}


def _view(name: str, run: RunFacts, place: int, runs: Sequence[RunFacts], paper: Paper) -> _RunView:
    main = run.main
    classes = by_class(main.rows, _class_radii(main)) if main else []
    return _RunView(
        name=name,
        run=run,
        stroke=stroke(name, place),
        lead=words.in_words(run, paper),
        classes=classes,
        weakest=weakest(classes, words.HEADLINE_RADIUS),
        groups=_groups(run, main, _EXAMPLES_OF_ONE_RUN if len(runs) == 1 else _EXAMPLES_OF_SEVERAL_RUNS) if main else [],
        correlations=correlations(run.analyzed),
        gain=_gain(run, runs[0]) if place > 0 else None,
        membership=membership_of(run),
    )


def _gain(run: RunFacts, first: RunFacts) -> Gain | None:
    """Computed only for the same data set, n and alpha, so that the difference is due to the models and their sigmas."""
    ours, theirs = run.main, first.main
    if ours is None or theirs is None or run.metrics["dataset"] != first.metrics["dataset"]:
        return None
    alike = [(c.figures["n"], c.figures.get("alpha_each", c.figures["alpha"])) for c in (ours, theirs)]
    largest = largest_radius(*alike[0], max(c.figures["sigma"] for c in (ours, theirs)))
    return gain(ours.rows, theirs.rows, largest) if alike[0] == alike[1] else None


def _class_radii(main: Certified) -> list[float]:
    """The radii that at least one image reaches, and always the headline radius."""
    furthest = max(words.HEADLINE_RADIUS, float(main.radius.max()))
    return [radius for radius in _CLASS_RADII if radius <= furthest]


def _groups(run: RunFacts, main: Certified, most: int) -> list[_Group]:
    law = main.figures.get("smoothing") or {}
    sigma: float = law.get("input_scale", main.figures["sigma"])

    def picture(row: CertificateRow) -> _Picture:
        if run.images is None or row.idx >= len(run.images):
            return _Picture(row, None, None)
        image = run.images[row.idx]
        noisy = None if main.site == HIDDEN else pictures.as_data_url(pictures.noisy(image, sigma, row.idx))
        return _Picture(row, pictures.as_data_url(image), noisy)

    groups = [group for group in example_groups(main.rows, most) if not (main.skips and group.key == CERTIFIED_WRONG)]
    return [_Group(group, [picture(row) for row in group.rows]) for group in groups]


def _radii_of_table(certified: Sequence[Certified]) -> list[str]:
    """The radii of the figures in metrics.json, up to the largest at which an image is certified."""
    reached: dict[str, Any] = {}
    for c in certified:
        for radius, share in c.figures["certified_accuracy"].items():
            reached[radius] = max(reached.get(radius, 0.0), share)
    radii = sorted(reached, key=float)
    last = max((place for place, radius in enumerate(radii) if reached[radius] > 0), default=0)
    return radii[: last + 1]
