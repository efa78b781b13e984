"""The HTML report of one or more runs, with the certified test images."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..data.dataset import Dataset
from ..report.html import write_report
from ..report.tables import Paper, RunFacts, no_paper, read_run
from .images import TestImages


def write_page(
    runs: Sequence[Path],
    html: Path,
    figures: Path | None = None,
    data: Dataset | Path | str | None = None,
    paper: Paper = no_paper,
) -> Path:
    """Write the report of `runs` (and their figures) and return its path; `data` provides images of custom data."""
    facts = [read_run(path) for path in runs]
    write_report(with_images(facts, data), html, figures, paper)
    return html


def with_images(runs: Sequence[RunFacts], data: Dataset | Path | str | None = None) -> list[RunFacts]:
    """Add the certified images to the runs: the report package reads rows only and loads no data set."""
    loader, shown = TestImages(data), []
    for run in runs:
        if run.main is not None:
            images, reason = loader.of(run.path, run.main.figures["file"])
            run = replace(run, images=images, no_images=reason)
        shown.append(run)
    return shown
