"""The report: one page that needs nothing but itself."""

from importlib import resources
from pathlib import Path

from ..store.durable import write_atomically
from . import figures
from .tables import HEADINGS, RunFacts, summary


def write_report(runs: list[RunFacts], page: Path, figures_folder: Path | None = None) -> Path:
    """Write the page (and, if asked, its figure as SVG and PNG)."""
    from jinja2 import Environment, select_autoescape

    curve = figures.certified_accuracy_curve(runs)
    svg = figures.as_svg(curve)
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=select_autoescape(default=True), trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(template).render(runs=runs, headings=HEADINGS, table=summary(runs), curve=svg)
    write_atomically(page, text.encode())
    if figures_folder is not None:
        figures_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(figures_folder / "certified_accuracy.svg", svg.encode())
        write_atomically(figures_folder / "certified_accuracy.png", figures.as_png(curve))
    return page
