"""The paper's figures for the page of a run: the function that is passed to a report (`report.tables.Paper`)."""

from collections.abc import Sequence
from typing import Any

from ..report.tables import Certified, PaperFigures, RunFacts
from ..report.words import HEADLINE_RADIUS
from ..store.metrics import is_papers
from .published import BUDGET, CIFAR10, CIFAR10_BACKBONE, CIFAR10_MODEL, OTHER_FORMULA, TABLE_1, TABLE_1_COPIES, VARIANTS

_PAPER = "The paper (“Augment then Smooth”, TMLR 2024, Table 1)"


def figures_of(run: RunFacts, certified: Certified) -> PaperFigures | None:
    """The paper's figures for the request of this run; None if the paper has none or used other settings."""
    place = (run.metrics["dataset"], run.metrics["method"], certified.figures["sigma"])
    if place not in TABLE_1 or not _is_request_of_the_paper(run, certified.figures):
        return None
    sentence = _sentence(run, certified.figures, *TABLE_1[place])
    return PaperFigures(*TABLE_1[place], sentence=sentence, model=CIFAR10_BACKBONE if _is_other_model(run) else None)


def _is_request_of_the_paper(run: RunFacts, figures: dict[str, Any]) -> bool:
    """Whether data, budget, views and votes are the same. Learning rate, epochs and clip norm may differ.

    For another backbone than the paper's (CIFAR-10) the number of copies may differ too: the sentence says it is another model.
    """
    name, sigma = run.metrics["method"], figures["sigma"]
    budget = tuple(run.setting("privacy", key) for key in ("epsilon", "delta"))
    views = tuple(run.setting("method", key) for key in ("sigma", "copies", "keep_original"))
    copies = views[1] if _is_other_model(run) else TABLE_1_COPIES[run.metrics["dataset"]]
    return (
        run.setting("data", "path") is None
        and (_is_other_model(run) or run.setting("model", "train") in (None, "all"))  # the paper fine-tunes all layers
        and (name == "regular" or (run.metrics["privacy"]["private"] and budget == BUDGET))
        and (name not in VARIANTS or views == (sigma, copies, True))
        and is_papers(figures, sigma, may_skip=run.setting("certify", "skip_misclassified") is True)
    )


def _is_other_model(run: RunFacts) -> bool:
    """Whether this is CIFAR-10 with another backbone than the paper's."""
    return bool(run.metrics["dataset"] == CIFAR10 and run.setting("model", "name") != CIFAR10_MODEL)


def _sentence(run: RunFacts, ours: dict[str, Any], clean: float, acr: float, certified: float) -> str:
    """The paper's figures in words, compared with our intervals."""
    radius = f"{HEADLINE_RADIUS:.2f}"
    other_model = _is_other_model(run)
    private = f" at ε = {BUDGET[0]:g}, δ = {BUDGET[1]:g}" if run.metrics["privacy"]["private"] else ""
    text = f"{_PAPER} reports for this method and σ{private} an average certified radius of {acr:.3f}"
    if other_model:
        text = f"{_PAPER} fine-tunes {CIFAR10_BACKBONE}: the backbone differs, so these are other models. For this method and "
        text += f"σ{private} it reports an average certified radius of {acr:.3f}"
    text += "" if other_model else _against(acr, ours["acr_interval"])
    if radius in ours["certified_accuracy_interval"]:
        low, high = ours["certified_accuracy_interval"][radius]
        place = "" if other_model else _against(certified, [100 * low, 100 * high])
        text += f", {certified:.1f} % certified at {HEADLINE_RADIUS}{place}"
    other = " Its code computed another formula than the published one."
    return f"{text}, and an accuracy of {clean:.2f} %.{other if run.metrics['method'] in OTHER_FORMULA else ''}"


def _against(paper: float, interval: Sequence[float | None]) -> str:
    low, high = interval
    if low is None or high is None:
        return ""
    place = "below" if paper < low else "above" if paper > high else "within"
    return f" ({place} our 95 % interval)"
