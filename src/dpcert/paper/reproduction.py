"""Tables and figures of the paper compared with ours: for the terminal and as a Markdown page, from stored rows only."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..report.tables import as_markdown
from ..rounding import ceil_text
from ..store.durable import write_atomically
from . import prior, targets
from .claims import CLAIMS, SWEEPS, Judged, judge, swept
from .figures import draw, save
from .published import CIFAR10, CIFAR10_BACKBONE, COMPARED, NEEDS_CROSSVIT, OTHER_FORMULA, SIGMAS, TABLE_1, TITLES
from .result_index import Measured, ResultIndex, Seeds
from .sample_claims import SAMPLE_CLAIMS
from .verdicts import (
    NOT_COMPARABLE,
    NOT_RUN,
    OTHER_BACKBONE,
    RULES,
    Figure,
    accuracy_verdict,
    acr_of,
    acr_verdict,
    beside,
    certified_of,
    certified_verdict,
    clean_of,
    marked,
)

TABLE_HEADINGS = (
    *("sigma", "method", "runs x images", "clean accuracy %: ours / paper", "verdict"),
    *("ACR: ours / paper", "verdict", "certified % at 0.25: ours / paper", "verdict", "over seeds"),
)
CLAIM_HEADINGS = ("the paper says", "where", "data set", "sigma", "result", "figures")
_ONE_SEED_ONLY = (
    *(targets.METRIC_HISTOGRAMS, targets.METRIC_HISTOGRAMS_FULL, targets.METRICS_BY_RADIUS, targets.METRICS_SPLIT),
    targets.FGSM,
)


@dataclass(frozen=True)
class TargetRequest:
    """A requested target: its name, its place in the paper, its data sets, and its sigmas on CIFAR-10 and on the others."""

    name: str
    paper: str
    datasets: tuple[str, ...]
    sigmas: tuple[float, ...]
    cifar10: tuple[float, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """The data sets of a table; CIFAR-10 is always shown, unless another single data set was requested."""
        return self.datasets if len(self.datasets) == 1 else tuple(dict.fromkeys((*self.datasets, CIFAR10)))

    @property
    def from_scratch(self) -> tuple[str, ...]:
        """The data sets on which we train the paper's own model."""
        return tuple(name for name in self.datasets if name != CIFAR10)


@dataclass(frozen=True)
class Table:
    """A title, headings and rows."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Section:
    """Everything that is shown for one target."""

    request: TargetRequest
    tables: list[Table]
    judged: list[Judged]
    figures: dict[str, Any]
    notes: list[str]


def section(index: ResultIndex, request: TargetRequest, *, with_figures: bool) -> Section:
    """Build the section of one target from rows."""
    tables: list[Table] = []
    notes: list[str] = []
    if request.name == targets.TABLE_1:
        tables, notes = _table_1(index, request)
    elif request.name in SWEEPS:
        tables = [_sweep(index, request)]
    elif request.name == targets.PRIOR:
        return _prior(index, request, with_figures=with_figures)
    if request.name in _ONE_SEED_ONLY:
        notes = ["Metrics and attacks use the runs of seed 0 only."]
    judged = judge((*CLAIMS, *SAMPLE_CLAIMS), index, request.name, request.datasets, request.sigmas)
    figures: dict[str, Any] = {}
    if with_figures and request.from_scratch:
        figures = draw(index, request.name, request.from_scratch, request.sigmas)
    if with_figures and CIFAR10 in request.datasets:
        figures |= draw(index, request.name, (CIFAR10,), request.cifar10)
    about_cifar10 = CIFAR10 in (request.shown if tables else request.datasets)
    return Section(request, tables, judged, figures, [*notes, *(_about_backbones(index, request) if about_cifar10 else [])])


def _prior(index: ResultIndex, request: TargetRequest, *, with_figures: bool) -> Section:
    """The section of the quoted systems: accuracy by radius, then what each promises and costs, for each data set."""
    tables: list[Table] = []
    figures: dict[str, Any] = {}
    for dataset in request.datasets:
        sigma = (request.cifar10 if dataset == CIFAR10 else request.sigmas)[0]
        place = f"{TITLES[dataset]}, sigma {sigma:g}"
        tables.append(Table(f"{place}: certified accuracy, %", *prior.by_radius(index, dataset, sigma)))
        tables.append(Table(f"{place}: budget, result and cost", prior.OVERVIEW, prior.overview(index, dataset, sigma)))
        drawn = prior.figure(index, (dataset,), (sigma,)) if with_figures else None
        figures |= {} if drawn is None else {f"{request.name}-{dataset}": drawn}
    return Section(request, tables, [], figures, prior.NOTES)


def _about_backbones(index: ResultIndex, request: TargetRequest) -> list[str]:
    """What every page about CIFAR-10 says: which public weights the runs start from, and that they are not the paper's."""
    if request.name in SWEEPS:
        return [f"{TITLES[CIFAR10]}: the paper's rows are about {CIFAR10_BACKBONE}, which we do not train here."]
    used = {
        (known["name"], known["sha256"], known["data"])
        for method in COMPARED
        for sigma in request.cifar10
        if (run := index.get(CIFAR10, method, sigma)) is not None
        for known in run.facts.metrics["privacy"].get("public_inputs", ())
    }
    title = ", ".join((TITLES[CIFAR10], *index.models(CIFAR10)))
    notes = [
        f"{title}: the backbone differs from the paper's {CIFAR10_BACKBONE}, so these are other models. Their "
        "figures are above or below the paper's; none can agree with it."
    ]
    return notes + [
        f"Public weights {name} (SHA-256 {sha256}); epsilon does not cover the public data they were trained on: {data}."
        for name, sha256, data in sorted(used)
    ]


def _table_1(index: ResultIndex, request: TargetRequest) -> tuple[list[Table], list[str]]:
    tables: list[Table] = []
    used: list[Measured] = []
    for dataset in request.shown:
        rows = []
        for sigma in SIGMAS:
            for method in COMPARED:
                seeds = index.seeds(dataset, method, sigma)
                used += [] if seeds is None else seeds.runs
                paper = TABLE_1[dataset, method, sigma]
                rows.append(
                    (f"{sigma:g}", TITLES[method], *_compared(seeds, paper, method, is_papers_model=dataset != CIFAR10))
                )
        tables.append(Table(TITLES[dataset], TABLE_HEADINGS, rows))
    return tables, _notes(used, with_verdicts=request.shown != (CIFAR10,))


def _compared(seeds: Seeds | None, paper: tuple[float, float, float], method: str, *, is_papers_model: bool) -> tuple[str, ...]:
    if seeds is None:
        pairs = (f"- / {paper[0]:.2f}", f"- / {paper[1]:.3f}", f"- / {paper[2]:.1f}")
        return ("", *(word for pair in pairs for word in (pair, NOT_RUN)), "")
    clean, acr, at = clean_of(seeds), acr_of(seeds), certified_of(seeds, 0.25)
    words = ("" if clean is None else beside(clean.value, paper[0]), beside(acr.value, paper[1]), beside(at.value, paper[2]))
    if is_papers_model:
        verdict = "" if clean is None else marked(method, accuracy_verdict(clean.value, paper[0]))
        words = (verdict, marked(method, acr_verdict(acr, paper[1])), marked(method, certified_verdict(at, paper[2])))
    images = sorted({len(run.rows) for run in seeds.runs})
    spread = [("clean", clean, 2), ("ACR", acr, 3), ("at 0.25", at, 1)]
    return (
        f"{len(seeds.runs)} x {' to '.join(str(count) for count in dict.fromkeys((images[0], images[-1])))}",
        "not measured" if clean is None else _pair(clean.value, paper[0]),
        words[0],
        f"{acr.value:.3f} ± {acr.error:.3f} / {paper[1]:.3f} ({100 * (acr.value / paper[1] - 1):+.1f} %)",
        words[1],
        f"{at.value:.1f} ± {at.error:.1f} / {paper[2]:.1f} ({at.value - paper[2]:+.1f})",
        words[2],
        "; ".join(_range(name, figure, digits) for name, figure, digits in spread if figure and figure.spread is not None),
    )


def _pair(ours: float, paper: float) -> str:
    return f"{ours:.2f} / {paper:.2f} ({ours - paper:+.2f})"


def _range(name: str, figure: Figure, digits: int) -> str:
    return f"{name} {min(figure.each):.{digits}f} to {max(figure.each):.{digits}f}"


def _notes(used: list[Measured], *, with_verdicts: bool) -> list[str]:
    private = [run.facts.metrics["privacy"] for run in used if run.facts.metrics["privacy"]["private"]]
    notes = []
    if private:
        epsilon, delta = (max(float(privacy[key]) for privacy in private) for key in ("epsilon", "delta"))
        notes.append(f"Private rows: at most (epsilon {ceil_text(epsilon, 4)}, delta {delta:g}). Regular is not private.")
    notes.append(
        "Figures are means over seeds; ±: standard error over images; over seeds: the smallest and the largest figure."
    )
    notes += RULES if with_verdicts else ()
    other = ", ".join(title for name, title in TITLES.items() if name in OTHER_FORMULA)
    kind = "not comparable: the" if with_verdicts else "The"
    notes.append(f"{kind} paper's figures of {other} were computed with formulas other than the published ones.")
    bare = sorted({run.facts.path.name for run in used if not run.has_weights})
    if bare:
        notes.append(f"Rows without weights (nothing more can be measured): {', '.join(bare)}.")
    return notes


def _sweep(index: ResultIndex, request: TargetRequest) -> Table:
    table, key = SWEEPS[request.name]
    rows: list[tuple[str, ...]] = []
    for dataset in request.shown:
        for value, clean in swept(index, dataset, table, key).items():
            paper = table[dataset, value]
            ours = f"- / {paper:.2f}" if clean is None else _pair(clean, paper)
            missing = NEEDS_CROSSVIT if dataset == CIFAR10 else NOT_RUN
            rows.append((TITLES[dataset], f"{value:g}", ours, missing if clean is None else accuracy_verdict(clean, paper)))
    headings = ("data set", key.replace("_", " "), "clean accuracy %: ours / paper", "verdict")
    return Table("DP-Gaussian, sigma 0.25", headings, rows)


def claim_rows(judged: Sequence[Judged]) -> list[tuple[str, ...]]:
    """Claims as rows of a table."""
    return [
        (
            one.claim.sentence,
            one.claim.where,
            TITLES[one.dataset],
            "" if one.claim.everywhere else f"{one.sigma:g}",
            one.state,
            "" if one.finding is None else one.finding.figures,
        )
        for one in judged
    ]


def summary(sections: Sequence[Section]) -> str:
    """The number of each verdict and claim result in one line; verdicts on incomparable figures and on other models are
    counted separately."""
    words = [
        word
        for part in sections
        for table in part.tables
        for row in table.rows
        for heading, word in zip(table.headings, row, strict=True)
        if heading == "verdict" and word
    ]
    other = Counter(word.removeprefix(OTHER_BACKBONE) for word in words if word.startswith(OTHER_BACKBONE))
    verdicts = Counter(word for word in words if not word.endswith(NOT_COMPARABLE) and not word.startswith(OTHER_BACKBONE))
    apart = Counter(word.removesuffix(NOT_COMPARABLE) for word in words if word.endswith(NOT_COMPARABLE))
    states = Counter(one.state for part in sections for one in part.judged)
    counted = [
        f"{what}: {', '.join(f'{count} {word}' for word, count in sorted(counts.items()))}"
        for what, counts in (
            ("verdicts", verdicts),
            ("not comparable", apart),
            (OTHER_BACKBONE.removesuffix(": "), other),
            ("claims", states),
        )
        if counts
    ]
    return "; ".join(counted)


def save_figures(sections: Sequence[Section], folder: Path) -> None:
    """All figures as SVG and PNG."""
    for part in sections:
        for name, figure in part.figures.items():
            save(figure, folder, name)


def write_markdown(sections: Sequence[Section], file: Path, figures: Path | None, command: str) -> None:
    """Write the page of results with the `command` that generates it; hand-written text comes from ``<page>_reading.md``.

    A page that has the lines ``<!-- begin: TARGET -->`` and ``<!-- end: TARGET -->`` keeps its text: what is between them is
    replaced by the tables and figures of the target.
    """
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    marked_for = [part for part in sections if _begin(part) in text]
    if marked_for:
        for part in marked_for:
            text = _between_markers(text, part, _shown(part, file, figures), file)
    else:
        text = _whole_page(sections, file, figures, command)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode())


def _whole_page(sections: Sequence[Section], file: Path, figures: Path | None, command: str) -> str:
    reading = file.with_name(f"{file.stem}_reading.md")
    parts = [
        "# Results: ours compared with the paper's\n",
        f"Generated from stored rows by `{command}`. Only the discussion below is written by hand (`{reading.name}`).\n",
        f"{_first_upper(summary(sections))}.\n",
        *([reading.read_text(encoding="utf-8").strip() + "\n"] if reading.is_file() else []),
    ]
    for part in sections:
        parts += [f"## {part.request.name}\n\n{_first_upper(part.request.paper)}.\n", *_shown(part, file, figures)]
    return "\n".join(parts)


def _shown(part: Section, file: Path, figures: Path | None) -> list[str]:
    """The tables, notes, claims and figures of a section, as paragraphs of a page."""
    shown = [f"**{table.title}**\n\n{as_markdown(table.headings, table.rows)}" for table in part.tables]
    shown += ["\n".join(f"- {note}" for note in part.notes) + "\n"] if part.notes else []
    shown += [as_markdown(CLAIM_HEADINGS, claim_rows(part.judged))] if part.judged else []
    if figures is not None:
        base = os.path.relpath(figures, file.parent)
        shown += [f"![{name}]({Path(base, name).as_posix()}.png)\n" for name in part.figures]
    return shown


def _begin(part: Section) -> str:
    return f"<!-- begin: {part.request.name} -->\n"


def _between_markers(text: str, part: Section, shown: list[str], file: Path) -> str:
    """Return the page with `shown` between the markers of a section, and every other byte as it was."""
    end = f"<!-- end: {part.request.name} -->"
    before, _, rest = text.partition(_begin(part))
    _, found, after = rest.partition(end)
    if not found or _begin(part) in rest:
        raise ConfigError(f"{file} must have the line {_begin(part).strip()!r} once, and {end!r} after it; correct the page")
    return "\n".join([before + _begin(part), *shown, end + after])


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
