"""The law of Poisson sampling (D5); shuffled and fixed-size samplers must be rejected by the same test."""

import numpy as np

from dpcert.privacy.sampling import poisson_indices
from dpcert.rng import key_from_seed

KEY = key_from_seed(3, "test")
N, Q, STEPS = 200, 0.05, 4000


def poisson(step: int) -> np.ndarray:
    return poisson_indices(N, Q, KEY, step)


def fixed_size(step: int) -> np.ndarray:
    return np.random.default_rng(step).choice(N, int(N * Q), replace=False)


def shuffled(step: int) -> np.ndarray:
    batches = round(1 / Q)
    order = np.random.default_rng(step // batches).permutation(N)
    return order[(step % batches) * int(N * Q) : (step % batches + 1) * int(N * Q)]


def travelling_pairs(step: int) -> np.ndarray:
    """Right inclusion of every record, but records 2i and 2i + 1 always come together."""
    first = poisson_indices(N // 2, Q, KEY, step)
    return np.sort(np.concatenate([2 * first, 2 * first + 1]))


def replayed(step: int) -> np.ndarray:
    return poisson(step // 2)


def is_poisson(sampler) -> bool:
    """Inclusion of each record, covariance of all pairs together and of each, variance of the size, independence of steps.

    False alarm about 1e-4 altogether: 200 inclusions and three sums at 5 sigma, 19,900 pairs at 6.5 (they are skewed).
    """
    inside = np.zeros((STEPS, N))
    for step in range(STEPS):
        inside[step, sampler(step)] = 1
    variance, centred = Q * (1 - Q), inside - Q
    inclusion = np.abs(inside.mean(axis=0) - Q).max() < 5 * np.sqrt(variance / STEPS)
    spread = abs(inside.sum(axis=1).var() / (N * variance) - 1) < 5 * np.sqrt(2 / STEPS)
    covariance = centred.T @ centred / STEPS
    each = np.abs(covariance - np.diag(np.diag(covariance))).max() < 6.5 * variance / np.sqrt(STEPS)
    pairs = (centred.sum(axis=1) ** 2 - (centred**2).sum(axis=1)).mean() / (N * (N - 1))
    together = abs(pairs) < 5 * np.sqrt(2 / (N * (N - 1) * STEPS)) * variance
    next_step = abs((centred[1:] * centred[:-1]).mean()) < 5 * variance / np.sqrt(N * STEPS)
    return bool(inclusion and spread and each and together and next_step)


def wrong_probability(step: int) -> np.ndarray:
    return poisson_indices(N, 1.1 * Q, KEY, step)


def test_the_sampler_is_poisson_and_the_twins_are_not(evidence):
    assert is_poisson(poisson)
    twins = (fixed_size, shuffled, travelling_pairs, replayed, wrong_probability)
    rejected = [twin.__name__ for twin in twins if not is_poisson(twin)]
    assert len(rejected) == len(twins), rejected
    evidence(
        "D5",
        figure="inclusion, pair covariance, variance of the batch size, independence of steps: as Poisson",
        trials=STEPS,
        twin=f"rejected: {', '.join(rejected)}",
    )


def test_batches_may_be_empty_and_q_one_takes_all():
    sizes = [len(poisson_indices(5, 0.05, KEY, step)) for step in range(50)]
    assert 0 in sizes
    assert np.array_equal(poisson_indices(5, 1.0, KEY, 0), np.arange(5))


def test_a_record_is_in_whatever_the_others_are():
    """Membership of record i depends on (key, step, i) only: one more record at the end changes nothing before it."""
    for step in range(200):
        longer = poisson_indices(N + 1, Q, KEY, step)
        assert np.array_equal(longer[longer < N], poisson(step))
