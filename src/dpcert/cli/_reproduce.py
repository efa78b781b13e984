"""The steps of ``dpcert reproduce``: find out what the grid needs, run what is missing, show the results."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import typer

from ..data.registry import SOURCES, missing_files
from ..errors import RunError
from ..paper import reproduction
from ..paper.estimate import Estimator, as_words
from ..paper.grid import (
    ALL_DATASETS,
    FINE_TUNED,
    TARGETS,
    Cell,
    Need,
    Target,
    change_name,
    datasets_of,
    in_order,
    needs_of,
    targets_of,
)
from ..paper.pieces import Piece, check_examples, check_request, check_results, holds_rows_only, missing
from ..paper.published import NEEDS_CROSSVIT
from ..paper.result_index import Place, ResultIndex
from ..paper.runner import Failure, Runner
from ..paper.targets import ALL, LOGS
from ..scale.placement import PROCESSES, Placement
from ..store.runs import RunDirectory
from ._show import event_printer, print_table


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    names: list[str]
    dataset_names: list[str]
    examples: int | None
    results: Path
    place: Placement

    def __post_init__(self) -> None:
        check_examples(self.examples)
        targets_of(self.names or [ALL], self.datasets)
        check_results(self.results)

    @cached_property
    def datasets(self) -> list[str]:
        """The requested data sets."""
        return datasets_of(self.dataset_names)

    @cached_property
    def targets(self) -> list[Target]:
        """The requested targets."""
        return targets_of(self.names, self.datasets)

    @cached_property
    def estimator(self) -> Estimator:
        """Estimates run times from the timings in the results folder."""
        return Estimator(self.results, _all_cells())

    @property
    def jobs(self) -> int:
        """The number of tasks at once that an estimate assumes; what a cluster holds is known when it is used."""
        return self.place.jobs or 1

    def missing_of(self, targets: Sequence[Target]) -> list[list[Piece]]:
        """The pieces of work that are not done yet."""
        return missing(needs_of(targets, self.datasets), self.results, self.examples)

    @cached_property
    def without_data(self) -> list[str]:
        """The data sets that nobody named and that are not here. A data set that was named is downloaded when it is used."""
        return [] if self.dataset_names else [name for name in FINE_TUNED if missing_files(SOURCES[name])]


def _all_cells() -> list[Cell]:
    return [need.cell for need in needs_of(list(TARGETS.values()), ALL_DATASETS)]


def list_targets(request: Request) -> None:
    """Print every target: what it is in the paper, how much of it is done, how long the rest takes."""
    rows = []
    for target in TARGETS.values():
        needs = target.needs(request.datasets)
        chains = missing(needs, request.results, request.examples)
        left = request.estimator.left(chains, request.jobs)
        nothing = NEEDS_CROSSVIT if target.covered(request.datasets) else f"not about {' and '.join(request.datasets)}"
        time_left = as_words(left) if chains else "none" if needs else nothing
        name = target.name if target.in_all else f"{target.name} (not in all)"
        rows.append((name, target.paper, str(len(needs)), str(len(needs) - len(chains)), time_left))
    everything = request.missing_of(targets_of([ALL], request.datasets))
    total = needs_of(targets_of([ALL], request.datasets), request.datasets)
    in_all = as_words(request.estimator.left(everything, request.jobs)) if everything else "none"
    rows.append((ALL, "every unmarked target; runs are shared", str(len(total)), str(len(total) - len(everything)), in_all))
    print_table(("target", "in the paper", "runs", "done", "time left"), rows)
    for name in request.without_data:
        typer.echo(f"{name} is left out unless you name it: its files are not here; {_how_to_get(name)}")


def _how_to_get(name: str) -> str:
    return f"get them with: dpcert data fetch {name}"


def _with_data(request: Request, chains: list[list[Piece]]) -> list[list[Piece]]:
    """Leave out the runs whose data set is not here, and say how to get it."""
    for name in request.without_data:
        lost = sum(pieces[0].cell.dataset == name for pieces in chains)
        if lost:
            typer.echo(f"{name}: {lost} runs are left out, its files are not here; {_how_to_get(name)}", err=True)
    return [pieces for pieces in chains if pieces[0].cell.dataset not in request.without_data]


def do_missing(request: Request, *, dry_run: bool) -> list[Failure]:
    """Print what is missing and how long it takes, then run it unless this is a dry run."""
    needs = needs_of(request.targets, request.datasets)
    chains = _with_data(request, request.missing_of(request.targets))
    if not chains:
        return []
    for pieces in chains:
        bare = holds_rows_only(RunDirectory(request.results / pieces[0].cell.name))
        words = [piece.kind if piece.sigma is None else f"certify at {piece.sigma:g}" for piece in pieces]
        why = " (stored without weights, so it must be trained again)" if bare else ""
        typer.echo(f"missing: {pieces[0].cell.name}: {', '.join(words)}{why}", err=True)
    left = as_words(request.estimator.left(chains, request.jobs))
    if request.place.engine == PROCESSES or request.place.jobs is not None:
        pace = f"with --jobs {request.jobs}"
    else:
        pace = "of work for one task at a time"
    typer.echo(f"{len(chains)} of {len(needs)} runs are incomplete; about {left} {pace}", err=True)
    if dry_run:
        return []
    with event_printer() as print_event, request.place.open(request.results / LOGS, print_event) as executor:
        wanted = {pieces[0].cell for pieces in chains}
        resources = request.place.resources
        runner = Runner(request.results, request.examples, executor, resources, request.estimator, print_event)
        return runner.run([need for need in in_order(request.targets, request.datasets) if need.cell in wanted])


def show(request: Request, figures: Path | None, markdown: Path | None) -> None:
    """Show tables, claims and figures of the results folder; refuse a run whose settings do not match its name."""
    needs = needs_of(request.targets, request.datasets)
    for need in needs:
        check_request(RunDirectory(request.results / need.cell.name), need.cell)
    index = ResultIndex(_places(needs, request.results))
    sections = []
    for target in request.targets:
        datasets = target.covered(request.datasets)
        wanted = reproduction.TargetRequest(target.name, target.paper, datasets, target.sigmas, target.cifar10)
        sections.append(reproduction.section(index, wanted, with_figures=figures is not None))
    for part in sections:
        typer.echo(f"\n{part.request.name}: {part.request.paper}")
        for table in part.tables:
            print_table(table.headings, table.rows, table.title)
        for note in part.notes:
            typer.echo(f"  {note}")
        if part.judged:
            print_table(reproduction.CLAIM_HEADINGS, reproduction.claim_rows(part.judged))
    typer.echo(reproduction.summary(sections))
    if figures is not None:
        reproduction.save_figures(sections, figures)
        typer.echo(f"figures: {figures}")
    if markdown is not None:
        reproduction.write_markdown(sections, markdown, figures, _command(request, figures, markdown))
        typer.echo(f"page: {markdown}")


def _command(request: Request, figures: Path | None, markdown: Path) -> str:
    """The command that regenerates the page from the same rows."""
    words = [
        "dpcert",
        "reproduce",
        *request.names,
        *(word for name in request.dataset_names for word in ("--dataset", name)),
        "--show",
    ]
    words += [
        "--results",
        str(request.results),
        "--markdown",
        str(markdown),
        *([] if figures is None else ["--figures", str(figures)]),
    ]
    return shlex.join(words)


def _places(needs: Sequence[Need], results: Path) -> dict[Place, Path]:
    paths = {}
    for need in needs:
        cell = need.cell
        for sigma in need.sigmas or (cell.sigma,):
            change = change_name(cell.change).lstrip("-")
            paths[Place(cell.dataset, cell.method, sigma, cell.seed, change)] = results / cell.name
    return paths


def raise_if_failed(failures: Sequence[Failure], results: Path) -> None:
    """Fail the command if a piece of work failed, after everything else was run and shown."""
    if failures:
        first = failures[0]
        raise RunError(
            f"{len(failures)} tasks failed; the first: {first.piece}: {first.reason}; logs are in {results / LOGS}; "
            "rerun the same command to resume"
        )
