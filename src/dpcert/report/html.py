"""The report: one page that needs nothing but itself."""

from importlib import resources
from pathlib import Path

from ..rounding import ceil_text
from ..store.durable import write_atomically
from . import figures
from .tables import HEADINGS, RunFacts, summary


def write_report(runs: list[RunFacts], page: Path | None, figures_folder: Path | None = None) -> None:
    """Write the page, and its figure as SVG and PNG, where they are asked for."""
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, render(runs).encode())
    if figures_folder is not None:
        curve = figures.certified_accuracy_curve(runs)
        figures_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(figures_folder / "certified_accuracy.svg", figures.as_svg(curve).encode())
        write_atomically(figures_folder / "certified_accuracy.png", figures.as_png(curve))


def render(runs: list[RunFacts]) -> str:
    """The page as text; the same facts give the same bytes."""
    from jinja2 import Environment, select_autoescape

    svg = figures.as_svg(figures.certified_accuracy_curve(runs))
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True)
    environment.filters["ceil_text"] = ceil_text
    return environment.from_string(template).render(runs=runs, headings=HEADINGS, table=summary(runs), curve=svg)
