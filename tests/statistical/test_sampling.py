"""The law of Poisson sampling (D5); shuffled and fixed-size samplers must be rejected by the same test."""

import hashlib
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcert.privacy.sampling import poisson_indices
from dpcert.rng import WORDS_PER_CHUNK, Purpose, key_from_seed, uniform_words

KEY = key_from_seed(3, "test")
N, Q, STEPS = 200, 0.05, 4000
PINNED = (300, "0b8dfab111a57fa5")


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


def first_version(records: int, sampling_probability: float, key: bytes, step: int) -> np.ndarray:
    """The oracle: all words at once, as versions before the chunks drew them. Stored seeds must give the same batches."""
    threshold = int(Fraction(sampling_probability) * 2**64)
    if threshold >= 2**64:
        return np.arange(records)
    return np.flatnonzero(uniform_words(key, Purpose.SAMPLING, records, step) < np.uint64(threshold))


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


SIZES = st.one_of(
    st.integers(0, 300),
    st.builds(lambda chunks, more: max(0, chunks * WORDS_PER_CHUNK + more), st.integers(0, 5), st.integers(-2, 2)),
)


@given(SIZES, st.floats(0, 1), st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1))
def test_batches_are_those_of_the_first_version(records, probability, key, step):
    """For sizes around the borders of the chunks, any key, step and probability: the same bytes."""
    assert same(poisson_indices(records, probability, key, step), first_version(records, probability, key, step))


def test_twin_a_chunk_that_starts_again_is_not_the_first_version():
    def starts_again(records, probability, key, step):
        parts = [poisson_indices(WORDS_PER_CHUNK, probability, key, step) + start for start in (0, WORDS_PER_CHUNK)]
        return np.concatenate(parts)

    records = 2 * WORDS_PER_CHUNK
    assert not same(starts_again(records, 0.01, KEY, 0), first_version(records, 0.01, KEY, 0))


def test_batches_of_released_versions_are_pinned():
    """Drawn before there were chunks: with other batches, no stored seed would give its weights again."""
    drawn = poisson_indices(300_000, 0.001, KEY, 7)
    assert (len(drawn), hashlib.sha256(drawn.tobytes()).hexdigest()[:16]) == PINNED


# VmHWM is of this program only: the ru_maxrss of a new process begins with the peak of the one that started it.
MEMORY = """
import re, sys, time
from pathlib import Path
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
from dpcert.privacy.sampling import poisson_indices
poisson_indices(10**6, 1e-6, bytes(32), 0)
before, began = peak(), time.process_time()
records = int(sys.argv[1])
found = poisson_indices(records, 1000 / records, bytes(32), 1)
assert 800 < len(found) < 1200 and found[-1] < records and found[-1] > 0.98 * records
print(peak() - before, records / (time.process_time() - began))
"""


def peak_of_sampling(records: int, code: str = MEMORY) -> tuple[float, float]:
    """MiB above what one small batch needs, and records per second of processor time, in a fresh process."""
    command, root = [sys.executable, "-c", code, str(records)], Path(__file__).parents[2]
    child = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    kilobytes, speed = map(float, child.stdout.split())
    return kilobytes / 1024, speed


def test_sampling_from_many_records_needs_little_memory_and_the_twin_does_not():
    records = 3 * 10**7
    peak, _ = peak_of_sampling(records)
    assert peak < 16
    twin = MEMORY.replace(
        "poisson_indices(records, 1000 / records, bytes(32), 1)",
        "__import__('tests.statistical.test_sampling', fromlist=['x']).first_version(records, 1000 / records, bytes(32), 1)",
    )
    assert peak_of_sampling(records, twin)[0] > 200


@pytest.mark.slow
def test_a_billion_records(evidence):
    peak, speed = peak_of_sampling(10**9)
    assert peak < 64
    evidence("D5", figure=f"N = 10^9: {peak:.0f} MiB, {speed / 1e6:.0f} million records/s", trials=10**9)
