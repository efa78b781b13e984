"""Poisson sampling from a secret key."""

from fractions import Fraction

import numpy as np

from ..rng import WORDS_PER_CHUNK, Purpose, uniform_word_chunks


def poisson_indices(records: int, sampling_probability: float, key: bytes, step: int) -> np.ndarray:
    """Return the indices of the records in the batch of one step, in increasing order.

    Guarantee: each record is in the batch independently of all others, with probability floor(q 2^64) / 2^64, which
    is at most q. Whether record i is included depends on (key, step, i) only, so adding or removing another record with
    a larger index changes nothing.
    Memory: that of the batch and about 2 MiB, whatever the number of records; the words are drawn and dropped in chunks.
    Edge cases: the batch may be empty; q = 1 takes every record.
    """
    threshold = int(Fraction(sampling_probability) * 2**64)
    if threshold >= 2**64:
        return np.arange(records)
    batch = [np.empty(0, dtype=np.int64)]
    for number, words in enumerate(uniform_word_chunks(key, Purpose.SAMPLING, records, step)):
        batch.append(np.flatnonzero(words < np.uint64(threshold)) + number * WORDS_PER_CHUNK)
    return np.concatenate(batch)
