"""``dpcert reproduce``."""

from pathlib import Path
from typing import Annotated

import typer

from ..paper.targets import RESULTS
from . import _options as o


def reproduce(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET ...|all]", help="Tables and figures of the paper to rebuild.", show_default="list them"
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="mnist|fashion-mnist|cifar10", help="Data set to use. Repeatable.", show_default="all that are here"
        ),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            help="Number of test images to certify, measure and attack in each run.",
            show_default="1000; on cifar10 200 to 1000",
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder with the run directories.")] = RESULTS,
    jobs: o.Jobs = None,
    on: o.On = "processes",
    cpus_per_task: o.CpusPerTask = None,
    gpus_per_task: o.GpusPerTask = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would run, and show the stored results; run nothing.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Only show the stored results. What is missing appears as 'not run'.")
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(help="Also write figures (SVG, PNG) to this folder.", show_default=False)
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write a Markdown page to this file.", show_default=False)] = None,
) -> None:
    """Rebuild tables and figures of the paper and compare our results with the paper's.

    Without a target, lists all targets with the time they need. With a target, trains and measures what is missing.

    On cifar10 the packaged backbone is fine-tuned. It is not the paper's CrossViT-Tiny, so those figures are for other models.

    A task is one training, certification, analysis or attack of a run. Rerun the same command to resume, here or elsewhere.

    With --on ray, a task whose node dies resumes on another node, at most three times.

    Example:  dpcert reproduce table1 --dataset mnist --jobs 2

    Example:  dpcert reproduce table1 --results /shared/results --on ray://10.0.0.1:6379
    """
    from ..scale.placement import Placement
    from . import _reproduce as work

    place = Placement.parse(on, jobs, cpus_per_task, gpus_per_task)
    request = work.Request(targets or [], dataset or [], examples, results, place)
    if not targets:
        work.list_targets(request)
        return
    failures = [] if show else work.do_missing(request, dry_run=dry_run)
    work.show(request, figures, markdown)
    work.raise_if_failed(failures, results)
