"""What epsilon means: no membership attack is above the trade-off curve, and the curve is not far above the best one."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpcert.privacy import accounting
from dpcert.privacy.accounting import GaussianSteps
from dpcert.privacy.tradeoff import FALSE_ALARMS, TradeOff, membership_sentence

RATES = np.array([1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.999])
ONE_STEP = [(1.0, 0.1), (0.7, 0.3), (2.0, 0.5), (0.5, 0.02)]  # (rho, q)


def trade_off(*events):
    return TradeOff(*accounting.privacy_profile([GaussianSteps(*event) for event in events]))


def present(rho, q):
    """The law of one step's released value along the record's gradient, when the record is in the training set."""
    return lambda x: (1 - q) * norm.cdf(x / rho) + q * norm.cdf((x - 1) / rho)


def exact_detection(rho, q, rates):
    """The best test of one step by Neyman and Pearson: the likelihood ratio grows with x, so the test is a threshold."""
    return 1 - present(rho, q)(rho * norm.isf(rates))


def exact_detection_of_absence(rho, q, rates):
    """The same attack turned round: its alarm is "the record is not there". A threshold from above."""
    grid = np.linspace(-40 * rho, 1 + 40 * rho, 400_001)
    return np.array([norm.cdf(np.interp(rate, present(rho, q)(grid), grid) / rho) for rate in rates])


# ------------------------------------------------------------------ references


@pytest.mark.parametrize(("rho", "steps"), [(0.3, 1), (1.0, 1), (2.0, 4), (5.0, 100), (30.0, 50), (10_000.0, 1)])
def test_the_closed_form_of_the_gaussian_mechanism(rho, steps):
    """q = 1: TPR = Phi(Phi^-1(FPR) + sqrt(T) / rho), Dong et al. 2022."""
    exact = norm.cdf(norm.ppf(RATES) + math.sqrt(steps) / rho)
    found = trade_off((rho, 1.0, steps)).true_positive_rates(RATES)
    assert (found >= exact).all() and (found <= exact + 2e-5).all()


def test_the_distribution_of_losses_agrees_with_the_closed_form():
    """q = 1 - 1e-12 goes through the discretised distribution, q = 1 does not."""
    exact = norm.cdf(norm.ppf(RATES) + math.sqrt(30) / 4)
    found = trade_off((4.0, 1 - 1e-12, 30)).true_positive_rates(RATES)
    assert (found >= exact).all() and (found <= exact + 2e-4).all()


@pytest.mark.parametrize(("rho", "q"), ONE_STEP)
def test_one_subsampled_step_against_the_best_test_of_two_distributions(rho, q):
    """Neither direction is above the curve, and presence (where false alarms are rare) is on it."""
    found = trade_off((rho, q, 1)).true_positive_rates(RATES)
    presence, absence = exact_detection(rho, q, RATES), exact_detection_of_absence(rho, q, RATES)
    assert (found >= presence).all() and (found >= absence - 1e-9).all()
    rare = RATES <= 0.2
    assert (found[rare] <= presence[rare] + 2e-4).all()


def profile_with(change, monkeypatch):
    """The twin: the same profile from losses of which something is forgotten."""
    real = accounting._pmf_deltas
    monkeypatch.setattr(accounting, "_pmf_deltas", lambda pmf, epsilons: change(real, pmf, epsilons))
    accounting._discretized_profile.cache_clear()


@pytest.mark.parametrize("twin", ["delta ignored", "only adding a record"])
def test_twin_a_profile_that_forgets_something_is_caught(twin, monkeypatch):
    rho, q = 0.7, 0.3
    _, adding = accounting._pmfs(accounting._one_step(rho, q, accounting._interval(rho)))
    change = {
        "delta ignored": lambda real, pmf, epsilons: 0.0 * real(pmf, epsilons),
        "only adding a record": lambda real, _pmf, epsilons: real(adding, epsilons),
    }[twin]
    profile_with(change, monkeypatch)
    try:
        found = trade_off((rho, q, 1)).true_positive_rates(RATES)
    finally:
        accounting._discretized_profile.cache_clear()
    assert (found < exact_detection(rho, q, RATES)).any()


def test_twin_only_one_family_of_lines_says_less():
    """Without the lines of the opposite event the bound is 100 % long before the attack is."""
    rho, q = 0.7, 0.3
    both = trade_off((rho, q, 1))
    one = np.min(np.exp(both.epsilons)[:, None] * RATES + both.deltas[:, None], axis=0)
    assert (one >= both.true_positive_rates(RATES) - 1e-12).all() and one[-2] > both.true_positive_rate(0.95) + 0.01


def attack_rates(rho, q, steps, draws, seed):
    """Likelihood ratio attack with everything known: false and true alarms at the thresholds of the RATES."""
    generator = np.random.default_rng(seed)

    def losses(included):
        total = np.zeros(draws)
        for _ in range(steps):
            seen = (generator.random(draws) < q) if included else 0.0
            x = seen + rho * generator.standard_normal(draws)
            total += np.log1p(q * np.expm1((2 * x - 1) / (2 * rho * rho)))
        return total

    without, with_record = losses(False), losses(True)
    thresholds = np.quantile(without, 1 - RATES[2:])
    return [(float((without > t).mean()), float((with_record > t).mean())) for t in thresholds]


@pytest.mark.parametrize(("rho", "q", "steps"), [(1.0, 0.1, 20), (0.8, 0.02, 60)])
def test_a_simulated_attack_over_many_steps_stays_below(rho, q, steps):
    """200,000 trainings with and without the record. Six standard errors: a false alarm in 1e8 runs."""
    draws = 200_000
    curve, twin = trade_off((rho, q, steps)), trade_off((rho, q, steps // 3))
    passes_twin = False
    for false, true in attack_rates(rho, q, steps, draws, seed=1):
        slack = 6 / math.sqrt(draws)
        at = min(1.0, false + slack * math.sqrt(false))
        error = slack * math.sqrt(true * (1 - true)) + 1e-9
        assert true - error <= curve.true_positive_rate(at)
        assert true >= 0.9 * curve.true_positive_rate(false) - 2 * error  # and the curve is not far above the attack
        passes_twin |= true - error > twin.true_positive_rate(at)
    assert passes_twin  # a third of the steps


def test_the_profile_is_the_librarys_and_epsilon_is_on_it():
    rho, q, steps = 1.0, 0.05, 50
    epsilons, deltas = accounting.privacy_profile([GaussianSteps(rho, q, steps)])
    composed = accounting._composed(((rho, q, steps),), accounting._interval(rho))
    some = np.linspace(0, len(epsilons) - 1, 40).astype(int)
    theirs = composed.get_delta_for_epsilon(epsilons[some])
    assert np.allclose(deltas[some], theirs, rtol=1e-7, atol=2e-9) and (deltas[some] >= theirs).all()
    spent = accounting.epsilon(noise_multiplier=rho, sampling_probability=q, steps=steps, delta=1e-3)
    assert np.interp(spent, epsilons, deltas) == pytest.approx(1e-3, rel=1e-3)


# ------------------------------------------------------------------ shape and edges


@pytest.mark.parametrize(
    "events",
    [[(1.07, 512 / 60_000, 300)], [(5.0, 1.0, 3)], [(1.0, 0.1, 5), (2.0, 1.0, 2)], [(0.05, 1.0, 40)], [(0.06, 0.5, 2)]],
)
def test_the_curve_is_a_curve_of_rates(events):
    """From above guessing to at most 1, never falling, concave; a curve of a huge loss does not overflow."""
    grid = np.linspace(0.0, 1.0, 501)
    rates = trade_off(*events).true_positive_rates(grid)
    assert (rates >= grid).all() and (rates <= 1).all() and rates[-1] == 1.0
    assert (np.diff(rates) >= 0).all() and (np.diff(rates, 2) <= 1e-12).all()
    assert trade_off(*events).true_positive_rate(0.01) == pytest.approx(rates[5], abs=1e-12)


def test_more_steps_and_earlier_ones_raise_the_curve():
    few, many = (trade_off((1.0, 0.05, steps)).true_positive_rate(0.01) for steps in (10, 40))
    before = trade_off((1.0, 0.05, 10), (2.0, 0.1, 10)).true_positive_rate(0.01)
    parts = trade_off((1.0, 0.05, 4), (1.0, 0.05, 6)).true_positive_rate(0.01)
    assert 0.01 < few < before and few < many and parts == few


def test_no_steps_is_guessing_and_no_noise_is_no_bound():
    assert trade_off().true_positive_rate(0.01) == 0.01 and trade_off((1.0, 0.1, 0)).true_positive_rate(0.3) == 0.3
    assert trade_off((0.01, 0.1, 1)).true_positive_rate(0.0) == 1.0
    with pytest.raises(ValueError, match="false_positive_rate"):
        trade_off().true_positive_rate(1.5)


def test_the_sentence_rounds_up_and_never_pretends():
    exact = norm.cdf(norm.ppf(FALSE_ALARMS) + 1.0)
    sentence = membership_sentence(trade_off((1.0, 1.0, 1)))
    assert sentence.startswith("At 1 % false alarms, no attack detects a training record more than ")
    shown = float(sentence.split("more than ")[1].split(" %")[0])
    assert 100 * exact <= shown <= 100 * exact + 0.011
    assert membership_sentence(None) == "No bound on membership attacks: the run is not private."
    assert "says nothing" in membership_sentence(trade_off((0.06, 1.0, 40)))
    assert "more than 1.00 % of the time" in membership_sentence(trade_off())


def test_it_is_computed_once(monkeypatch):
    events = [GaussianSteps(1.3, 0.02, 7)]
    first = accounting.privacy_profile(events)
    monkeypatch.setattr(accounting, "_pmf_deltas", None)
    again = accounting.privacy_profile(events)
    assert first[0] is again[0] and not first[1].flags.writeable  # shared, so that nobody may write into it
