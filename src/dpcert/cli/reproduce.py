"""``dpcert reproduce``."""

from pathlib import Path
from typing import Annotated

import typer

from ..paper.targets import RESULTS


def reproduce(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TARGET ...|all]", help="Tables and figures of the paper.", show_default="list them"),
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(metavar="mnist|fashion-mnist", help="Repeatable.", show_default="both")
    ] = None,
    examples: Annotated[int, typer.Option(help="Test images to certify, measure and attack in each run.")] = 1000,
    results: Annotated[Path, typer.Option(help="Where the runs are.")] = RESULTS,
    jobs: Annotated[int, typer.Option(help="Child processes at once.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is missing, do nothing, show what is there.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only show what is there; the rest is 'not run'.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Also draw the figures, as SVG and PNG.", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write a page of Markdown.", show_default=False)] = None,
) -> None:
    """Rebuild tables and figures of the paper, ours beside the paper's: do what is missing, skip what is done.

    Example:  dpcert reproduce table1 --dataset mnist --jobs 2
    """
    from . import _reproduce as work

    asked = work.Request(targets or [], dataset or [], examples, results, jobs)
    if not targets:
        work.list_targets(asked)
        return
    failures = [] if show else work.do_missing(asked, dry_run=dry_run)
    work.show(asked, figures, markdown)
    work.complain(failures, results)
