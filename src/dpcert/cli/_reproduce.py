"""What ``dpcert reproduce`` joins: the grid that says what is needed, the runner that does it, the report that shows it."""

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import typer

from .._validate import integer_in
from ..errors import RunError
from ..paper import reproduction
from ..paper.estimate import Estimator, as_words
from ..paper.grid import DATASETS, TARGETS, Cell, Need, Target, change_name, datasets_of, in_order, needs_of, targets_of
from ..paper.pieces import Piece, check_examples, check_request, check_results, holds_rows_only, missing
from ..paper.result_index import Place, ResultIndex
from ..paper.runner import Failure, Runner, Tell
from ..paper.targets import ALL, LOGS
from ..store.runs import RunDirectory
from ._show import print_table

_SECONDS_BETWEEN_LINES = 60.0


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    names: list[str]
    dataset_names: list[str]
    examples: int
    results: Path
    jobs: int

    def __post_init__(self) -> None:
        check_examples(self.examples)
        integer_in("--jobs", self.jobs, 1, 1024)
        targets_of(self.names or [ALL], self.datasets)
        check_results(self.results)

    @cached_property
    def datasets(self) -> list[str]:
        """The data sets asked for."""
        return datasets_of(self.dataset_names)

    @cached_property
    def targets(self) -> list[Target]:
        """The targets asked for."""
        return targets_of(self.names, self.datasets)

    @cached_property
    def estimator(self) -> Estimator:
        """Knows all timings in the results folder."""
        return Estimator(self.results, _all_cells())

    def missing_of(self, targets: Sequence[Target]) -> list[list[Piece]]:
        """What is not done yet."""
        return missing(needs_of(targets, self.datasets), self.results, self.examples)


def _all_cells() -> list[Cell]:
    return [need.cell for need in needs_of(list(TARGETS.values()), DATASETS)]


def list_targets(asked: Request) -> None:
    """Every target: what it is in the paper, how much of it is done, how long the rest takes."""
    rows = []
    for target in TARGETS.values():
        needs = target.needs(asked.datasets)
        chains = missing(needs, asked.results, asked.examples)
        left = asked.estimator.left(chains, asked.jobs)
        time_left = as_words(left) if chains else "nothing" if needs else "not run here: CIFAR-10"
        name = target.name if target.in_all else f"{target.name} (not in all)"
        rows.append((name, target.paper, str(len(needs)), str(len(needs) - len(chains)), time_left))
    everything = asked.missing_of(targets_of([ALL], asked.datasets))
    total = needs_of(targets_of([ALL], asked.datasets), asked.datasets)
    in_all = as_words(asked.estimator.left(everything, asked.jobs)) if everything else "nothing"
    rows.append((ALL, "every one above; runs are shared", str(len(total)), str(len(total) - len(everything)), in_all))
    print_table(("target", "in the paper", "runs", "done", "time left"), rows)


def do_missing(asked: Request, *, dry_run: bool) -> list[Failure]:
    """Say what is missing and how long it takes; do it unless told not to."""
    needs = needs_of(asked.targets, asked.datasets)
    chains = asked.missing_of(asked.targets)
    if not chains:
        return []
    for pieces in chains:
        bare = holds_rows_only(RunDirectory(asked.results / pieces[0].cell.name))
        words = [piece.kind if piece.sigma is None else f"certify at {piece.sigma:g}" for piece in pieces]
        why = " (its rows are here without weights)" if bare else ""
        typer.echo(f"missing: {pieces[0].cell.name}: {', '.join(words)}{why}", err=True)
    left = as_words(asked.estimator.left(chains, asked.jobs))
    typer.echo(f"{len(chains)} of {len(needs)} runs are not complete; about {left} with --jobs {asked.jobs}", err=True)
    if dry_run:
        return []
    with _telling() as tell:
        wanted = {pieces[0].cell for pieces in chains}
        runner = Runner(asked.results, asked.examples, asked.jobs, asked.estimator, tell)
        return runner.run([need for need in in_order(asked.targets, asked.datasets) if need.cell in wanted])


@contextlib.contextmanager
def _telling() -> Iterator[Tell]:
    """Events as lines; what is under way in one line that renews itself, or a line a minute where there is no terminal."""
    due = [0.0]

    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False)
        with console.status("") as status:

            def live(text: str, *, passing: bool = False) -> None:
                status.update(text) if passing else console.print(text)

            yield live
        return

    def lines(text: str, *, passing: bool = False) -> None:
        if not passing or time.monotonic() >= due[0]:
            due[0] = time.monotonic() + _SECONDS_BETWEEN_LINES if passing else due[0]
            print(text, file=sys.stderr, flush=True)

    yield lines


def show(asked: Request, figures: Path | None, markdown: Path | None) -> None:
    """Tables, claims and figures from what is in the results folder; a run under a name not its own is refused."""
    needs = needs_of(asked.targets, asked.datasets)
    for need in needs:
        check_request(RunDirectory(asked.results / need.cell.name), need.cell)
    index = ResultIndex(_places(needs, asked.results))
    sections = []
    for target in asked.targets:
        datasets = tuple(name for name in asked.datasets if name in target.datasets)
        wanted = reproduction.Asked(target.name, target.paper, datasets, target.sigmas)
        sections.append(reproduction.section(index, wanted, with_figures=figures is not None))
    for part in sections:
        typer.echo(f"\n{part.asked.name}: {part.asked.paper}")
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
        reproduction.write_markdown(sections, markdown, figures, _command(asked, figures, markdown))
        typer.echo(f"page: {markdown}")


def _command(asked: Request, figures: Path | None, markdown: Path) -> str:
    """The request that makes the page again from the same rows."""
    words = [
        "dpcert",
        "reproduce",
        *asked.names,
        *(word for name in asked.dataset_names for word in ("--dataset", name)),
        "--show",
    ]
    words += [
        "--results",
        str(asked.results),
        "--markdown",
        str(markdown),
        *([] if figures is None else ["--figures", str(figures)]),
    ]
    return shlex.join(words)


def _places(needs: Sequence[Need], results: Path) -> dict[Place, Path]:
    found = {}
    for need in needs:
        cell = need.cell
        for sigma in need.sigmas or (cell.sigma,):
            change = change_name(cell.change).lstrip("-")
            found[Place(cell.dataset, cell.method, sigma, cell.seed, change)] = results / cell.name
    return found


def complain(failures: Sequence[Failure], results: Path) -> None:
    """Pieces that failed make the command fail, after everything else was done and shown."""
    if failures:
        first = failures[0]
        raise RunError(
            f"{len(failures)} pieces failed, the first: {first.piece}: {first.reason}; logs are in {results / LOGS}; "
            "give the same command again to go on"
        )
