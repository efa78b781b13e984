"""The paper's figures for the page of a run: the function that is passed to a report (`report.tables.Paper`)."""

from collections.abc import Sequence
from typing import Any

from ..report.tables import Certified, PaperFigures, RunFacts
from ..report.words import HEADLINE_RADIUS
from ..store.metrics import is_papers
from .published import BUDGET, OTHER_FORMULA, TABLE_1, TABLE_1_COPIES, VARIANTS

_PAPER = "The paper (“Augment then Smooth”, TMLR 2024, Table 1)"


def figures_of(run: RunFacts, certified: Certified) -> PaperFigures | None:
    """The paper's figures for the request of this run; None if the paper has none or used other settings."""
    place = (run.metrics["dataset"], run.metrics["method"], certified.figures["sigma"])
    if place not in TABLE_1 or not _is_request_of_the_paper(run, certified.figures):
        return None
    return PaperFigures(*TABLE_1[place], sentence=_sentence(run, certified.figures, *TABLE_1[place]))


def _is_request_of_the_paper(run: RunFacts, figures: dict[str, Any]) -> bool:
    """Whether data, budget, views and votes are the same. Learning rate, epochs and clip norm may differ."""
    name, sigma = run.metrics["method"], figures["sigma"]
    budget = tuple(run.setting("privacy", key) for key in ("epsilon", "delta"))
    views = tuple(run.setting("method", key) for key in ("sigma", "copies", "keep_original"))
    return (
        run.setting("data", "path") is None
        and (name == "regular" or (run.metrics["privacy"]["private"] and budget == BUDGET))
        and (name not in VARIANTS or views == (sigma, TABLE_1_COPIES, True))
        and is_papers(figures, sigma)
    )


def _sentence(run: RunFacts, ours: dict[str, Any], clean: float, acr: float, certified: float) -> str:
    """The paper's figures in words, compared with our intervals."""
    radius = f"{HEADLINE_RADIUS:.2f}"
    private = f" at ε = {BUDGET[0]:g}, δ = {BUDGET[1]:g}" if run.metrics["privacy"]["private"] else ""
    text = f"{_PAPER} reports for this method and σ{private} an average certified radius of {acr:.3f}"
    text += _against(acr, ours["acr_interval"])
    if radius in ours["certified_accuracy_interval"]:
        low, high = ours["certified_accuracy_interval"][radius]
        text += f", {certified:.1f} % certified at {HEADLINE_RADIUS}{_against(certified, [100 * low, 100 * high])}"
    other = " Its code computed another formula than the published one."
    return f"{text}, and an accuracy of {clean:.2f} %.{other if run.metrics['method'] in OTHER_FORMULA else ''}"


def _against(paper: float, interval: Sequence[float | None]) -> str:
    low, high = interval
    if low is None or high is None:
        return ""
    place = "below" if paper < low else "above" if paper > high else "within"
    return f" ({place} our 95 % interval)"
