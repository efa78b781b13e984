"""Poisson sampling from a secret key."""

from fractions import Fraction

import numpy as np

from ..rng import Purpose, uniform_words


def poisson_indices(records: int, sampling_probability: float, key: bytes, step: int) -> np.ndarray:
    """Return the indices of the records in the batch of one step, in increasing order.

    Guarantee: each record is in the batch independently of all others, with probability floor(q 2^64) / 2^64, which
    is at most q. Whether record i is included depends on (key, step, i) only, so adding or removing another record with
    a larger index changes nothing.
    Edge cases: the batch may be empty; q = 1 takes every record.
    """
    threshold = int(Fraction(sampling_probability) * 2**64)
    if threshold >= 2**64:
        return np.arange(records)
    words = uniform_words(key, Purpose.SAMPLING, records, step)
    return np.flatnonzero(words < np.uint64(threshold))
