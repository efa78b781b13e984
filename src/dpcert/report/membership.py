"""What epsilon means: the bound on membership attacks in words, and its trade-off curve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import BudgetError, LedgerError
from ..privacy.statement import Statement, state_of_file
from ..privacy.tradeoff import TradeOff
from ..rounding import ceil_text
from ..store.runs import LEDGER
from .tables import RunFacts
from .theme import SOFT, Drawing, Stroke, stroke

_LEAST, _POINTS = 1e-3, 160  # the axis starts at 0.1 %


@dataclass(frozen=True)
class Membership:
    """The bound on membership attacks: a sentence and, if there is a bound, its curve."""

    sentence: str
    trade_off: TradeOff | None


def membership_of(run: RunFacts) -> Membership:
    """What the run's ledger proves about membership attacks, or why it proves nothing."""
    try:
        statement = _statement(run.ledger)
    except (LedgerError, BudgetError) as error:
        return Membership(f"The bound on membership attacks is not shown: {error}.", None)
    if not run.metrics["privacy"]["private"]:
        statement = replace(statement, private=False)
    return Membership(statement.membership, statement.trade_off)


@lru_cache(maxsize=16)  # the text and the figure of a page need the same statement
def _statement(ledger: bytes) -> Statement:
    return state_of_file(ledger, LEDGER)


def membership_curve(runs: Sequence[tuple[str, RunFacts]]) -> Drawing | None:
    """The largest detection rate of any attack by its false alarm rate, compared with guessing; None if no run has a bound."""
    # Runs with the same budget have almost the same curve: dashes keep the line below visible.
    bounds = [(stroke(name, place, dash=place), membership_of(run).trade_off) for place, (name, run) in enumerate(runs)]
    lines = [(s, bound) for s, bound in bounds if bound is not None]
    if not lines:
        return None
    alarms = np.geomspace(_LEAST, 1.0, _POINTS)
    guessing = Stroke("guessing", SOFT, dash=1)
    legend = [replace(s, label="no attack is above this line") if len(runs) == 1 else s for s, _ in lines]

    def draw(axes: Any) -> None:
        for s, bound in lines:
            axes.plot(100 * alarms, 100 * bound.true_positive_rates(alarms), **s.line)
            false, true = bound.mark
            axes.plot([100 * false], [100 * true], marker="o", color=s.color, markersize=7.0, linestyle="none")
            if len(lines) == 1:
                words = f"{ceil_text(100 * true, 2)} % at {100 * false:g} %"
                axes.annotate(words, (100 * false, 100 * true), (-8, 6), textcoords="offset points", ha="right", va="bottom")
        axes.plot(100 * alarms, 100 * alarms, **guessing.line)
        _percent_scale(axes.xaxis, axes.set_xscale)
        _percent_scale(axes.yaxis, axes.set_yscale)
        axes.set(xlabel="false alarms (%)", ylabel="records detected, at most (%)")
        axes.set(xlim=(100 * _LEAST, 100), ylim=(100 * _LEAST, 110))

    marks = "; ".join(f"{s.label}: {ceil_text(100 * b.mark[1], 2)} % at {100 * b.mark[0]:g} % false alarms" for s, b in lines)
    shows = f"The most that any membership attack detects, by its false alarms. {marks}."
    return Drawing("membership", shows, draw, [*legend, guessing], height=300.0)


def _percent_scale(axis: Any, set_scale: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    set_scale("log")
    axis.set_major_locator(FixedLocator([0.1, 0.3, 1, 3, 10, 30, 100]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
