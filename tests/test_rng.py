"""Keys from seeds: what two seeds, or two uses of one seed, may never share."""

import itertools

import numpy as np

from dpcert.rng import KEY_BYTES, Purpose, bulk_normal, key_from_seed, stream_bytes

USES = ("noise", "certify", "analyze", "attack", "audit")


def test_one_seed_gives_each_use_a_key_of_its_own():
    """A certification with the seed of a training (both may be 0) must not see the noise that was added to the gradients."""
    keys = [key_from_seed(seed, use) for use in USES for seed in (0, 1, 2**62, 2**32)]
    assert all(len(key) == KEY_BYTES for key in keys) and len(set(keys)) == len(keys)


def test_a_stream_has_a_name_of_four_parts_and_shares_no_block_with_another():
    names = itertools.product((key_from_seed(0, "a"), key_from_seed(0, "b")), (Purpose.VIEWS, Purpose.ATTACK), (0, 1), (0, 1))
    streams = [stream_bytes(key, purpose, 64, step, part) for key, purpose, step, part in names]
    blocks = [stream[start : start + 16] for stream in streams for start in range(0, 64, 16)]
    assert len(set(blocks)) == len(blocks) == 16 * 4


def test_bulk_noise_follows_the_whole_name():
    import torch

    key, cpu = key_from_seed(0, "test"), torch.device("cpu")
    drawn = [bulk_normal(key, Purpose.VIEWS, (8,), cpu, step, part).numpy() for step in (0, 1) for part in (0, 1)]
    again = bulk_normal(key, Purpose.VIEWS, (8,), cpu, 1, 0).numpy()
    assert len({row.tobytes() for row in drawn}) == 4 and np.array_equal(again, drawn[2])
