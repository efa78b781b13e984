"""``dpcert report``."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Run directories.", show_default=False)],
    html: Annotated[Path | None, typer.Option(help="Also write a self-contained page.", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.", show_default=False)] = None,
    figures: Annotated[Path | None, typer.Option(help="Also write the figures as SVG and PNG.", show_default=False)] = None,
) -> None:
    """A table of one or more runs, and a page with the certified-accuracy curve; made from rows only.

    Example:  dpcert report runs/mnist-dp-gaussian runs/mnist-dpsgd --html compare.html
    """
    from ..report.html import write_report
    from ..report.tables import HEADINGS, as_markdown, read_run, summary
    from ..store.durable import write_atomically
    from ._show import print_table

    facts = [read_run(path) for path in runs]
    print_table(HEADINGS, summary(facts))
    if markdown is not None:
        write_atomically(markdown, as_markdown(HEADINGS, summary(facts)).encode())
    if html is not None or figures is not None:
        write_report(facts, html, figures)
