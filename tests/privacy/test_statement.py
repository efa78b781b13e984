"""Honest printing (D12): a finite epsilon only with clip and noise and Poisson and ledger and secret noise."""

import itertools
import json
import math

import pytest

from dpcert.errors import LedgerError
from dpcert.privacy.clipping import CLIP_RULES
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import make_plan, opening_facts
from dpcert.privacy.statement import Statement, installed_versions, recorded_versions, state


def facts(clip="flat", noise=1.0, sampling="poisson", secret=True, **changes):
    public = {"dataset_size": 1000, "size_given": True, "classes": 10, "classes_given": True, "held_out": 0}
    shape = {"batch_size": 10, "steps": 50, "clip_rule": clip, "clip_norm": 0.1, "delta": 1e-5, "sampling": sampling}
    source = {"noise_multiplier": noise, "sampling_probability": 0.01, "noise_source": "secret" if secret else "seeded"}
    return public | shape | source | changes


def ledger_of(**kinds):
    ledger = Ledger()
    ledger.open(facts(**kinds))
    ledger.authorise(0, 50, kinds.get("noise", 1.0), 0.01)
    ledger.close()
    return ledger


@pytest.mark.parametrize(
    ("clip", "noise", "sampling", "secret"),
    list(itertools.product(["flat", "none"], [1.0, 0.0], ["poisson", "shuffled"], [True, False])),
)
def test_every_wrong_combination_says_infinity_and_why(clip, noise, sampling, secret):
    statement = state(ledger_of(clip=clip, noise=noise, sampling=sampling, secret=secret))
    right = clip == "flat" and noise > 0 and sampling == "poisson" and secret
    assert statement.private is right
    assert math.isfinite(statement.epsilon) is right
    if right:
        assert statement.short.startswith("epsilon = ") and "delta = 1e-05" in statement.short
        assert statement.as_metrics()["epsilon"] == statement.epsilon
    else:
        assert statement.short == f"epsilon = inf (not private: {statement.reason})"
        assert statement.as_metrics()["epsilon"] is None and "not private" in str(statement)


def test_the_printed_epsilon_is_rounded_up():
    statement = state(ledger_of())
    printed = float(statement.short.split()[2])
    assert statement.epsilon <= printed <= statement.epsilon + 1e-4


def test_epsilon_counts_what_the_ledger_authorised():
    ledger = Ledger()
    ledger.open(facts())
    assert state(ledger).epsilon == 0.0
    spent = []
    for first in (0, 20, 40):
        ledger.authorise(first, 20, 1.0, 0.01)
        spent.append(state(ledger).epsilon)
    assert spent == sorted(spent) and len(set(spent)) == 3
    assert any("not finished" in condition for condition in state(ledger).conditions)


def test_without_a_ledger_there_is_no_statement():
    with pytest.raises(LedgerError, match="empty"):
        state(Ledger())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size_given": False}, "N = 1000, is treated as public"),
        ({"classes_given": False}, "number of classes, 10"),
        ({"held_out": 7}, "7 held-out validation records are not covered"),
        ({"delta": 1e-3}, "not below 1/N"),
    ],
)
def test_the_conditions_are_stated(changes, words):
    ledger = Ledger()
    ledger.open(facts(**changes))
    assert words in str(state(ledger))
    assert words not in str(state(ledger_of()))


def plan(size=1000, **changes):
    request = {
        "dataset_size": size,
        "size_given": True,
        "classes": 10,
        "classes_given": True,
        "held_out": 0,
        "batch_size": 10,
        "epochs": 2,
        "clip": CLIP_RULES["flat"],
        "clip_norm": 0.1,
        "epsilon": 3.0,
        "delta": 1e-5,
    }
    return make_plan(**(request | changes))


def test_the_opening_line_of_a_plan_makes_a_private_statement():
    ledger = Ledger()
    made = plan()
    ledger.open(opening_facts(made, noise_is_secret=True))
    ledger.authorise(0, made.steps, made.noise_multiplier, made.sampling_probability)
    ledger.close()
    assert 2.97 <= state(ledger).epsilon <= 3.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 2000}, "batch_size is 2000"),
        ({"epochs": 0.001}, "less than one step"),
        ({"epsilon": 0.0}, "privacy.epsilon"),
        ({"delta": 2.0}, "privacy.delta"),
        ({"clip_norm": 0.0}, "privacy.clip_norm"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        plan(**changes)


def test_without_clipping_there_is_no_noise_and_no_promise():
    made = plan(clip=CLIP_RULES["none"])
    assert made.noise_multiplier == 0.0 and made.clip_norm is None and made.target_epsilon is None


VERSIONS = {"dpcert": "1", "torch": "2", "dp-accounting": "3"}


def test_the_statement_names_every_condition():
    statement = state(ledger_of(), VERSIONS)
    stored = statement.as_metrics()
    contract = {"private", "reason", "epsilon", "delta", "relation", "accountant", "noise_multiplier", "sampling_probability"}
    assert contract | {"steps", "clip_norm", "sampling", "noise_source", "tuning", "versions", "conditions"} <= set(stored)
    assert stored["sampling"] == "poisson" and stored["noise_source"] == "secret" and stored["versions"] == VERSIONS
    for words in ("adding or removing one record", "PLD", "50 steps of Poisson", "secret key", "torch 2", "dp-accounting 3"):
        assert words in str(statement), words
    assert str(statement).splitlines() == [statement.short, statement.membership, *stored["sentences"]]
    assert stored["tuning"] == "not charged"


def test_the_statement_says_what_epsilon_means():
    """The sentence follows from all that is charged, is printed, and is not in what is stored: old files keep their bytes."""
    statement = state(ledger_of())
    assert str(statement).splitlines()[1] == statement.membership and "At 1 % false alarms, no attack" in statement.membership
    assert statement.membership not in json.dumps(statement.as_metrics())
    before = state(ledger_of(earlier=[{"noise_multiplier": 0.5, "sampling_probability": 0.1, "steps": 5}]))
    assert before.trade_off.true_positive_rate(0.01) > 1.5 * statement.trade_off.true_positive_rate(0.01) > 0.015
    seeded = state(ledger_of(secret=False))
    assert seeded.trade_off is None and "No bound on membership attacks" in str(seeded)


def test_a_statement_is_made_without_the_curve(monkeypatch):
    """Whoever does not print it does not wait for it."""
    monkeypatch.setattr("dpcert.privacy.accounting.privacy_profile", None)
    statement = state(ledger_of())
    assert statement.epsilon > 0 and statement.as_metrics() and statement.short and statement.sentences


def says_that_tuning_is_not_charged(statement):
    return "looking at several runs is not charged" in str(statement)


def test_every_statement_says_that_tuning_is_not_charged(evidence, monkeypatch):
    """D14. The twin leaves the sentence out."""
    assert says_that_tuning_is_not_charged(state(ledger_of()))
    real = Statement.sentences.fget
    monkeypatch.setattr(Statement, "sentences", property(lambda self: tuple(s for s in real(self) if "charged" not in s)))
    assert not says_that_tuning_is_not_charged(state(ledger_of()))
    evidence("D14", figure="every private statement says in words that choosing among runs is not charged", trials=1,
             twin="a statement without the sentence: seen")  # fmt: skip


def test_the_stored_statement_is_the_same_in_any_order_of_the_versions():
    backwards = dict(reversed(VERSIONS.items()))
    first, second = (json.dumps(state(ledger_of(), versions).as_metrics()) for versions in (VERSIONS, backwards))
    assert first == second


def test_versions_are_read_from_the_models_header():
    header = {"statement": json.dumps(state(ledger_of(), VERSIONS).as_metrics())}
    assert recorded_versions(header) == VERSIONS
    for damaged in ({}, {"statement": "{"}, {"statement": "[]"}, {"statement": '{"versions": null}'}):
        assert recorded_versions(damaged) is None
    assert "Made with" not in str(state(ledger_of()))
    assert set(installed_versions()) == set(VERSIONS)


def test_neighbours_the_accountant_does_not_know_get_no_epsilon():
    ledger = Ledger()
    ledger.open(facts(relation="replace-one"))
    ledger.authorise(0, 50, 1.0, 0.01)
    ledger.close()
    assert not state(ledger).private and "replace-one" in state(ledger).short
