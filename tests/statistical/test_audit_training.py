"""D11: audits of whole trainings by the real loop, and of broken ones.

Each audit is wrong about a sound training at most once in 1,000 (`many_runs`) or 100 (`one_run`) seeds; seeds are fixed.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

import dpcert
from dpcert.errors import ConfigError
from dpcert.methods import METHODS
from dpcert.privacy import mechanism, noise
from dpcert.privacy.audit import chance_of_guesses, guess_lower_bound
from dpcert.training.audit import Trainings, many_runs, one_run

PRIVATE = [name for name, row in METHODS.items() if row.clip != "none"]
DPSGD = Trainings(dpcert.method("dpsgd"))
SUBSAMPLED = Trainings(dpcert.method("dpsgd"), epsilon=1.0, steps=8, sampling_probability=0.1)


def without_noise(patch):
    quiet = type("Noise", (), {"add": staticmethod(lambda bounded, rho, key, step: noise.add(bounded, 0.0, key, step))})
    patch.setattr(mechanism, "noise", quiet)


def with_every_record(patch):
    """Charges for q and takes all: the fault that only an audit below q = 1 can see."""
    greedy = type("Sampling", (), {"poisson_indices": staticmethod(lambda n, q, key, step: np.arange(n))})
    patch.setattr(mechanism, "sampling", greedy)


# The arithmetic of the guesses


def test_guesses_as_the_paper_counts_them():
    """The two numbers that Steinke, Nasr and Jagielski print (Appendix D and Section 7)."""
    assert guess_lower_bound(75, 100, 1000, confidence=0.95, delta=1e-4).epsilon == pytest.approx(0.673, abs=1e-3)
    assert guess_lower_bound(1439, 1510, 100_000, confidence=0.95, delta=1e-5).epsilon == pytest.approx(2.675, abs=1e-3)


def test_the_chance_of_guesses_term_by_term():
    """Theorem 5.2 written out as sums of binomial weights."""
    for correct, guesses, canaries, epsilon, delta in [(30, 40, 50, 0.7, 1e-3), (0, 5, 5, 1.0, 0.1), (7, 7, 9, 2.0, 1e-4)]:
        q = math.exp(epsilon) / (1 + math.exp(epsilon))
        weight = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]
        missed = [2 / i * sum(weight[correct - i : correct]) for i in range(1, correct + 1)]
        expected = min(1.0, sum(weight[correct:]) + canaries * delta * max(missed, default=0.0))
        assert chance_of_guesses(correct, guesses, canaries, epsilon, delta) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_the_guess_bound_passes_the_truth_as_rarely_as_it_says(epsilon, evidence):
    """20,000 audits of ideal randomised response at confidence 0.95, the hardest epsilon-DP mechanism.

    The bound passes the truth in at most 5 % of them; false alarm of this test 1e-6.
    """
    trials, guesses = 20_000, 400
    right = np.random.default_rng(0).binomial(guesses, 1 / (1 + math.exp(-epsilon)), trials)
    bounds = {v: guess_lower_bound(int(v), guesses, guesses, confidence=0.95, delta=0.0).epsilon for v in np.unique(right)}
    passed = sum(bounds[v] > epsilon for v in right)
    assert passed <= stats.binom.isf(1e-6, trials, 0.05)
    assert np.median([bounds[v] for v in right]) > epsilon - 0.7  # and it is not idle
    naive = np.mean(right / guesses > 1 / (1 + math.exp(-epsilon)))  # the twin reads the share of right guesses as it is
    assert naive * trials > stats.binom.isf(1e-6, trials, 0.05)
    evidence(
        "D11",
        figure=f"one-run bound above the true epsilon {epsilon:g} in {passed} of {trials} (5 % stated)",
        trials=trials,
        twin=f"no confidence bound: {100 * naive:.0f} %",
    )


def test_a_leak_of_probability_delta_is_not_held_against_epsilon():
    """With probability delta all coins are shown: the bound with delta is lower, and one without it would be wrong."""
    assert guess_lower_bound(100, 100, 100, delta=1e-4).epsilon < guess_lower_bound(100, 100, 100, delta=0.0).epsilon


def test_guesses_that_prove_nothing_prove_nothing():
    assert guess_lower_bound(50, 100, 200).epsilon == 0.0 and guess_lower_bound(0, 1, 1).epsilon == 0.0
    best = guess_lower_bound(100, 100, 200)
    assert best.epsilon == best.ceiling > 2.0
    with pytest.raises(ValueError, match="correct is 101"):
        guess_lower_bound(101, 100, 200)


# Real trainings


def test_one_run_of_a_sound_training_holds_and_is_alive(evidence):
    found = [one_run(trainings, seed=0) for trainings in (DPSGD, Trainings(dpcert.method("dp-gaussian", sigma=0.25)))]
    for audit in found:
        assert audit.holds and audit.verdict == "holds" and 0.3 < audit.at_least <= audit.promised < audit.ceiling
        assert audit.promised == pytest.approx(4.0, rel=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        broken = one_run(DPSGD, seed=0)
    assert not broken.holds and broken.verdict == "BROKEN" and broken.at_least == broken.ceiling
    evidence(
        "D11",
        figure=f"one run, 2,000 canaries: epsilon at least {found[0].at_least:.2f}, promised 4.00, ceiling {broken.ceiling:.2f}",
        trials=len(found),
        twin=f"no noise: at least {broken.at_least:.2f}, flagged",
    )


def test_below_q_one_a_sampler_that_takes_everybody_is_flagged():
    """Charged for q = 0.1, 8 steps, epsilon 1; takes every record, ten times what is charged."""
    sound = one_run(SUBSAMPLED, seed=1)
    assert sound.holds and sound.promised <= 1.0
    with pytest.MonkeyPatch.context() as patch:
        with_every_record(patch)
        assert not one_run(SUBSAMPLED, seed=1).holds


def test_many_runs_in_small():
    """40 trainings with and 40 without the canary: silence is flagged; a sound training holds. About five seconds."""
    assert many_runs(DPSGD, runs=40, seed=0).holds
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        broken = many_runs(DPSGD, runs=20, seed=0)
    assert broken.at_least == broken.ceiling > broken.promised and not broken.holds


def test_an_audit_whose_ceiling_is_below_the_promise_says_so():
    found = one_run(Trainings(dpcert.method("dpsgd"), epsilon=20.0), canaries=100, seed=0)
    assert found.ceiling < found.promised and "not refutable" in found.verdict


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(ConfigError, match="does not clip"):
        Trainings(dpcert.method("regular"))
    with pytest.raises(ConfigError, match="guesses is 1"):
        one_run(DPSGD, guesses=1)
    with pytest.raises(ConfigError, match="sampling probability"):
        dataclasses.replace(DPSGD, sampling_probability=0.0)


def test_the_audited_training_spends_the_steps_it_was_asked_for():
    images, labels = torch.rand(4, 1, 4, 4), torch.arange(4)
    for steps, q in ((1, 1.0), (3, 1.0), (100, 1.0), (7, 0.3)):
        trainings = dataclasses.replace(DPSGD, steps=steps, sampling_probability=q)
        run = trainings.run(images, labels, classes=5, noise_seed=None)
        assert run.ledger.steps_authorised == steps and run.statement.private
        assert run.plan.sampling_probability == pytest.approx(q)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_runs_of_every_private_method(evidence):
    """2 x 300 trainings a method, ten methods, confidence 0.999 (false alarm 1 %). About five minutes on one core."""
    found = {name: many_runs(Trainings(dpcert.method(name, sigma=0.25)), runs=300, seed=0) for name in PRIVATE}
    for name, audit in found.items():
        assert audit.holds and audit.at_least > 0.5, (name, audit)
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        broken = many_runs(DPSGD, runs=300, seed=0)
    assert not broken.holds
    low, high = min(a.at_least for a in found.values()), max(a.at_least for a in found.values())
    evidence(
        "D11",
        figure=f"whole trainings, {len(found)} methods: epsilon at least {low:.2f} to {high:.2f}, promised 4.00, "
        f"ceiling {broken.ceiling:.1f}",
        trials=600 * len(found),
        twin=f"no noise: at least {broken.at_least:.1f}, flagged",
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_run_of_every_private_method_and_many_seeds(evidence):
    """Ten methods x 10 seeds at confidence 0.99: at most 6 of 100 pass (false alarm 1e-4). About two minutes."""
    found = [one_run(Trainings(dpcert.method(name, sigma=0.25)), seed=seed) for name in PRIVATE for seed in range(10)]
    passed = sum(not audit.holds for audit in found)
    assert passed <= 6
    with pytest.MonkeyPatch.context() as patch:
        without_noise(patch)
        flagged = sum(not one_run(DPSGD, seed=seed).holds for seed in range(10))
    assert flagged == 10
    shown = [audit.at_least for audit in found]
    evidence(
        "D11",
        figure=f"one run: {passed} of {len(found)} above the promise 4.00; shown {min(shown):.2f} to {max(shown):.2f}",
        trials=len(found),
        twin=f"no noise: {flagged} of 10 flagged",
    )
