"""Repeat and select: the cost of releasing the best of a random number of trials (D20)."""

import json
import math
import secrets

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import integrate, stats

from dpcert.errors import BudgetError, LedgerError
from dpcert.privacy import selection as module
from dpcert.privacy.accounting import GaussianSteps, compose, gaussian_epsilon
from dpcert.privacy.clipping import CLIP_RULES
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import as_trial, make_plan, opening_facts
from dpcert.privacy.selection import LAWS, Selection, composed_epsilon, merged, trials_drawn
from dpcert.privacy.statement import state, state_of_file
from dpcert.tuning.space import uniform_of

DELTA = 1e-5
SMALL, LARGE = ((3.0, 0.02, 400),), ((4.0, 0.04, 300),)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [1.0, 2.5, 10.0])
def test_one_curve_equals_the_event_of_dp_accounting(law, mean):
    inner = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(3.0))
    event = RepeatAndSelectDpEvent(dp_accounting.SelfComposedDpEvent(inner, 400), mean, LAWS[law])
    accountant = dp_accounting.rdp.RdpAccountant(module._orders()).compose(event)
    assert Selection(law, mean, (SMALL,)).epsilon(SMALL, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)


def generating_function(law, mean):
    """P(K = k) summed with z^k, and its derivative: the law of the largest of K values."""
    chances = [(k, module._probability(law, mean, k)) for k in range(400)]
    return lambda z: sum(k * chance * z ** (k - 1) for k, chance in chances if k)


def delta_of_the_best(law, mean, mu, epsilon):
    """Exact delta(epsilon) of releasing the largest of K values N(mu, 1) against N(0, 1), by integration."""
    derivative = generating_function(law, mean)
    grid = np.linspace(-8, 8 + mu, 6001)
    densities = [derivative(stats.norm.cdf(grid - shift)) * stats.norm.pdf(grid - shift) for shift in (mu, 0.0)]
    pairs = [densities, densities[::-1]]
    return max(float(integrate.simpson(np.maximum(p - math.exp(epsilon) * q, 0.0), x=grid)) for p, q in pairs)


def covers_the_search(law, mean, mu, epsilon):
    return delta_of_the_best(law, mean, mu, epsilon) <= DELTA


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mu", [0.3, 1.0])
def test_the_bound_holds_for_the_largest_of_gaussian_values_and_that_of_one_trial_does_not(law, mu):
    """A trial releases N(mu, 1) or N(0, 1), and the largest value wins. The twin charges one trial only, and must fail."""
    curve = ((1.0 / mu, 1.0, 1),)
    assert covers_the_search(law, 10.0, mu, Selection(law, 10.0, (curve,)).epsilon(curve, DELTA))
    assert not covers_the_search(law, 10.0, mu, gaussian_epsilon(mu, DELTA))


@pytest.mark.parametrize("law", LAWS)
def test_a_search_costs_more_than_a_trial_and_more_trials_cost_more(law):
    one = compose([GaussianSteps(*SMALL[0])], DELTA)
    spent = [Selection(law, mean, (SMALL,)).epsilon(SMALL, DELTA) for mean in (1.0, 3.0, 10.0, 100.0)]
    assert one < spent[0] and spent == sorted(spent) and len(set(spent)) == 4


@pytest.mark.parametrize("law", LAWS)
def test_settings_of_different_cost_are_charged_by_the_pointwise_maximum(law):
    both = Selection(law, 5.0, (SMALL, LARGE))
    each = [Selection(law, 5.0, (curve,)).epsilon(curve, DELTA) for curve in (SMALL, LARGE)]
    assert both.epsilon(SMALL, DELTA) == both.epsilon(LARGE, DELTA) >= max(each)
    assert Selection(law, 5.0, (SMALL,)).epsilon(LARGE, DELTA) >= max(each), "a trial that is not listed is charged too"
    earlier = both.epsilon(SMALL, DELTA, SMALL)
    assert earlier > both.epsilon(SMALL, DELTA)


def test_the_profile_is_a_bound_that_contains_the_stated_point():
    search = Selection("geometric", 5.0, (SMALL, LARGE))
    epsilons, deltas = search.profile(SMALL)
    stated = search.epsilon(SMALL, DELTA)
    assert (np.diff(deltas) <= 1e-12).all() and epsilons[0] == 0.0
    assert deltas[epsilons >= stated][0] <= DELTA * (1 + 1e-6) and deltas[epsilons < stated][-1] >= DELTA


@pytest.mark.parametrize("law", LAWS)
def test_the_number_of_trials_follows_its_law(law):
    """From keys as a search draws them; the twin with another mean must be rejected."""
    drawn = [trials_drawn(law, 4.0, uniform_of(secrets.token_bytes(32))) for _ in range(4000)]
    edges = [0, 1, 2, 3, 4, 6, 9]

    def p_value(mean):
        chances = [module._probability(law, mean, k) for k in range(200)]
        expected = [sum(chances[a:b]) for a, b in zip(edges, [*edges[1:], 200], strict=True)]
        observed = [sum(a <= k < b for k in drawn) for a, b in zip(edges, [*edges[1:], 10**6], strict=True)]
        kept = [(o, 4000 * e) for o, e in zip(observed, expected, strict=True) if e > 0]
        assert all(e > 0 or o == 0 for o, e in zip(observed, expected, strict=True))
        return stats.chisquare([o for o, _ in kept], [e * 4000 / sum(e for _, e in kept) for _, e in kept]).pvalue

    assert p_value(4.0) > 1e-6 and p_value(6.0) < 1e-6
    assert (min(drawn) == 0) is (law == "poisson")


@pytest.mark.parametrize(
    ("law", "mean", "curves"),
    [
        ("uniform", 5.0, (SMALL,)),
        ("poisson", 0.5, (SMALL,)),
        ("poisson", math.nan, (SMALL,)),
        ("poisson", 1e9, (SMALL,)),
        ("poisson", 5.0, ()),
        ("poisson", 5.0, ((),)),
        ("poisson", 5.0, (((-1.0, 0.1, 5),),)),
        ("poisson", 5.0, (((1.0, 1.1, 5),),)),
        ("poisson", 5.0, (SMALL,) * 65),
    ],
)
def test_a_search_that_cannot_be_accounted_for_is_refused(law, mean, curves):
    with pytest.raises(BudgetError):
        Selection(law, mean, curves)


def test_without_noise_there_is_no_bound():
    assert math.isinf(Selection("geometric", 2.0, (((0.01, 0.1, 5),),)).epsilon(SMALL, DELTA))
    assert math.isinf(composed_epsilon([SMALL, ((0.0, 0.1, 5),)], DELTA))


def test_all_trials_together_cost_what_renyi_composition_says():
    accountant = dp_accounting.rdp.RdpAccountant(module._orders())
    for rho, q, steps in (*SMALL, *LARGE):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(rho)), steps)
    assert composed_epsilon([SMALL, LARGE], DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)


def plan(**changes):
    wanted = {"dataset_size": 1000, "size_given": True, "classes": 10, "classes_given": True, "held_out": 100}
    wanted |= {"batch_size": 50, "epochs": 4, "clip": CLIP_RULES["flat"], "clip_norm": 0.1, "epsilon": 1.0, "delta": DELTA}
    return make_plan(**{**wanted, **changes})


def trial(target=3.0, law="geometric", mean=4.0):
    made = plan()
    own = merged((e.noise_multiplier, e.sampling_probability, e.steps) for e in made.releases(made.steps))
    return as_trial(made, Selection(law, mean, (own, SMALL)), target)


def ledger_of(made):
    ledger = Ledger()
    ledger.open(opening_facts(made, noise_is_secret=True))
    ledger.authorise(0, 50, made.noise_multiplier, 0.05)
    ledger.authorise(50, 30, made.noise_multiplier, 0.05)
    ledger.close()
    return ledger


def test_the_statement_of_a_selected_trial_covers_the_search():
    ledger = ledger_of(trial())
    statement = state(ledger)
    alone = compose(ledger.releases(), DELTA)
    assert ledger.opening["format"] == 3 and statement.private
    assert statement.accountant == "rdp" and statement.tuning == "charged"
    assert alone <= 1.0 < statement.epsilon <= 3.0 and statement.epsilon > 1.3 * alone
    text = str(statement)
    for words in ("Accountant: RDP", "geometric law, mean 4", "100 held-out validation records are not covered", "no score"):
        assert words in text
    assert "looking at several runs is not charged" not in text
    stored = statement.as_metrics()
    assert stored["repeat_and_select"] == ledger.opening["repeat_and_select"] and stored["accountant"] == "rdp"
    assert 0.01 < statement.trade_off.true_positive_rate(0.01) < 1.0
    assert state_of_file(ledger.as_bytes(), "ledger").epsilon == statement.epsilon


def test_a_trial_must_be_listed_and_within_the_budget():
    made = plan()
    with pytest.raises(BudgetError, match="does not list"):
        as_trial(made, Selection("geometric", 4.0, (SMALL,)), 3.0)
    with pytest.raises(BudgetError, match="its budget is 1.2"):
        trial(target=1.2)


def test_runs_without_a_search_keep_their_bytes():
    facts = opening_facts(plan(), noise_is_secret=True)
    assert "repeat_and_select" not in facts and "selection" not in facts
    ledger = Ledger()
    ledger.open(facts)
    assert ledger.opening["format"] == 1 and ledger.selection is None


def _with(facts, **changes):
    ledger = Ledger()
    ledger._append({"event": "open", **facts, **changes})
    return ledger.as_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 1}, "out of order"),
        ({"format": 4}, "newer version"),
        ({"repeat_and_select": None}, "not a valid event"),
        ({"repeat_and_select": []}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric"}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": "4", "curves": [[[1.0, 0.1, 5]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 0.1, "curves": [[[1.0, 0.1, 5]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 4, "curves": [[[1.0, 0.1]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 4, "curves": [[["x", 0.1, 5]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 4, "curves": [[[1.0, 0.1, 5.5]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 4, "curves": [[["1.0", 0.1, 5]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 4, "curves": [[[True, 0.1, 5]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 4, "curves": [[[1.0, 0.1, True]]]}}, "not a valid event"),
        ({"repeat_and_select": {"law": "geometric", "mean": 4, "curves": 7}}, "not a valid event"),
    ],
)
def test_a_damaged_event_is_refused(changes, words):
    facts = {**opening_facts(trial(), noise_is_secret=True), "format": 3}
    Ledger.parse(_with(facts), "ledger")
    with pytest.raises(LedgerError, match=words):
        Ledger.parse(_with(facts, **changes), "ledger")


def test_a_search_without_noise_in_one_of_its_settings_is_not_private():
    facts = {**opening_facts(trial(), noise_is_secret=True), "format": 3}
    facts["repeat_and_select"] = {"law": "geometric", "mean": 4.0, "curves": [[[0.0, 0.1, 5]]]}
    statement = state(Ledger.parse(_with(facts), "ledger"))
    assert not statement.private and "no noise" in statement.reason and json.dumps(statement.as_metrics())
