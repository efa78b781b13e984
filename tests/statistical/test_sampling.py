"""The law of Poisson sampling (D5); shuffled and fixed-size samplers must be rejected by the same test."""

import numpy as np
import pytest

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


def is_poisson(sampler) -> bool:
    """Inclusion of each record, covariance of pairs, variance of the size, independence of steps; each within 5 sigma."""
    inside = np.zeros((STEPS, N))
    for step in range(STEPS):
        inside[step, sampler(step)] = 1
    q_error = np.sqrt(Q * (1 - Q) / STEPS)
    inclusion = np.abs(inside.mean(axis=0) - Q).max() < 5 * q_error
    sizes = inside.sum(axis=1)
    spread = abs(sizes.var() / (N * Q * (1 - Q)) - 1) < 5 * np.sqrt(2 / STEPS)
    centred = inside - Q
    pairs = (centred.sum(axis=1) ** 2 - (centred**2).sum(axis=1)).mean() / (N * (N - 1))
    pair_error = np.sqrt(2 / (N * (N - 1) * STEPS)) * Q * (1 - Q)
    next_step = (centred[1:] * centred[:-1]).mean()
    return bool(inclusion and spread and abs(pairs) < 5 * pair_error and abs(next_step) < 5 * Q * (1 - Q) / np.sqrt(N * STEPS))


def test_the_sampler_is_poisson():
    assert is_poisson(poisson)


@pytest.mark.parametrize("twin", [fixed_size, shuffled], ids=["fixed size", "shuffled"])
def test_twin_another_sampler_is_rejected(twin):
    assert not is_poisson(twin)


def test_twin_a_wrong_probability_is_rejected():
    assert not is_poisson(lambda step: poisson_indices(N, 1.1 * Q, KEY, step))


def test_batches_may_be_empty_and_q_one_takes_all():
    sizes = [len(poisson_indices(5, 0.05, KEY, step)) for step in range(50)]
    assert 0 in sizes
    assert np.array_equal(poisson_indices(5, 1.0, KEY, 0), np.arange(5))


def test_a_record_is_in_whatever_the_others_are():
    """Membership of record i depends on (key, step, i) only: one more record at the end changes nothing before it."""
    for step in range(200):
        longer = poisson_indices(N + 1, Q, KEY, step)
        assert np.array_equal(longer[longer < N], poisson(step))
