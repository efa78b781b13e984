"""``dpcert report``."""

from pathlib import Path
from typing import Annotated

import typer

from . import _options as o


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Run directories.", show_default=False)],
    html: Annotated[
        Path | None, typer.Option(help="Also write a self-contained HTML page to this file.", show_default=False)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the table as Markdown to this file.", show_default=False)
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write figures (SVG, PNG) to this folder.", show_default=False)
    ] = None,
    data: o.Data = None,
) -> None:
    """Print a table of one or more runs; with --html, also write an HTML page about them.

    Reads stored results only and runs no model.

    Example:  dpcert report runs/mnist-dp-gaussian runs/mnist-dpsgd --html compare.html
    """
    from ..paper.comparison import figures_of
    from ..report.html import write_report
    from ..report.tables import HEADINGS, as_markdown, read_run, summary
    from ..runs.page import with_images
    from ..store.durable import write_atomically
    from ._show import print_table

    facts = [read_run(path) for path in runs]
    print_table(HEADINGS, summary(facts, figures_of))
    if markdown is not None:
        write_atomically(markdown, as_markdown(HEADINGS, summary(facts, figures_of)).encode())
    if html is not None or figures is not None:
        write_report(with_images(facts, data) if html is not None else facts, html, figures, figures_of)
    for name, path in (("table", markdown), ("figures", figures), ("report", html)):
        if path is not None:
            typer.echo(f"{name}: {path}")
