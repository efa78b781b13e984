"""The page's bound on membership attacks is the statement's, and no page promises what the ledger does not prove."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from dpcert.privacy.ledger import Ledger
from dpcert.privacy.statement import state
from dpcert.report.html import _drawings, render
from dpcert.report.membership import membership_of
from dpcert.report.tables import read_run
from tests.fuzz.readers import chained
from tests.report.conftest import RUNS
from tests.report.reading import Page

PRIVATE, OPEN = "mnist-dp-gaussian", "mnist-regular"


def statement_of(name):
    return state(Ledger.load(RUNS / name / "ledger.jsonl"))


def test_the_page_says_what_the_statement_says(page):
    statement = statement_of(PRIVATE)
    shown = Page(page).with_key("membership")
    assert [element.text for element in shown] == [statement.membership]
    assert float(shown[0].attributes["data-value"]) == statement.trade_off.true_positive_rate(0.01)
    assert 0.03 < statement.trade_off.true_positive_rate(0.01) < 0.06  # epsilon 3 at delta 1e-5, far from e^3 times 1 %
    assert "<h2>What epsilon means</h2>" in page and 'id="figure-membership"' in page


def test_the_curve_is_the_statements_beside_guessing():
    axes = _drawings([("run", read_run(RUNS / PRIVATE))])["membership"].figure(legend=False).axes[0]
    curve, mark, guessing = (line.get_data() for line in axes.lines)
    trade_off = statement_of(PRIVATE).trade_off
    assert np.allclose(curve[1], 100 * trade_off.true_positive_rates(np.asarray(curve[0]) / 100))
    assert (mark[0][0], mark[1][0]) == (1.0, pytest.approx(100 * trade_off.true_positive_rate(0.01)))
    assert (
        np.array_equal(*guessing)
        and curve[0][0] == pytest.approx(0.1)
        and (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    )
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["5.19 % at 1 %"]


def test_a_run_that_is_not_private_has_no_curve_and_says_so(without_figures):
    text = render([read_run(RUNS / OPEN)])
    assert "No bound on membership attacks: the run is not private." in text
    assert "figure-membership" not in text and not Page(text).with_key("membership")


def test_several_runs_share_a_figure_and_equal_sentences_are_said_once(comparison):
    assert comparison.count(statement_of(PRIVATE).membership) == 1  # two of the three have the same ledger facts
    assert comparison.count("No bound on membership attacks") == 1
    legend = comparison.partition('id="figure-membership"')[2].partition("</ul>")[0]
    assert "dp-gaussian" in legend and "dpsgd" in legend and "regular" not in legend and "guessing" in legend


def test_a_page_never_promises_what_the_ledger_does_not_prove():
    """Metrics without privacy; and metrics that claim it beside a ledger that does not."""
    facts = read_run(RUNS / PRIVATE)
    denied = replace(facts, metrics={**facts.metrics, "privacy": {**facts.metrics["privacy"], "private": False}})
    claimed = replace(facts, ledger=(RUNS / OPEN / "ledger.jsonl").read_bytes())
    for run in (denied, claimed):
        assert membership_of(run).trade_off is None and "No bound" in membership_of(run).sentence


def hostile_ledger(settings):
    events = [json.loads(line)["data"] for line in (RUNS / PRIVATE / "ledger.jsonl").read_text().splitlines()]
    blocks = [
        {**events[1], "first_step": place, "steps": 1, "noise_multiplier": 1.0 + 1e-3 * place} for place in range(settings)
    ]
    return chained([events[0], *blocks, {"event": "close", "steps": settings}])


def test_a_ledger_that_cannot_be_accounted_for_costs_no_time_and_no_page(without_figures):
    facts = replace(read_run(RUNS / PRIVATE), ledger=hostile_ledger(1000))
    began = time.perf_counter()
    found = membership_of(facts)
    assert time.perf_counter() - began < 5 and found.trade_off is None
    assert "is not shown" in found.sentence and "1000 noise settings" in found.sentence
    assert "is not shown" in render([facts])
