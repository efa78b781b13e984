"""The law of the DP noise: scale, shape, tail, independence. Each test has a broken twin that it rejects."""

import numpy as np
import pytest
import torch
from scipy import stats

from dpcert.gradients.engine import ClippedSum
from dpcert.privacy import noise
from dpcert.rng import Purpose, key_from_seed, stream_bytes

KEY = key_from_seed(7, "test")
SIZE = 100_000


def draw(step: int = 0) -> np.ndarray:
    return noise.standard_normal(SIZE, KEY, step)


def is_standard(sample: np.ndarray) -> bool:
    """KS at 1e-6 and the scale within 1.1 %."""
    return stats.kstest(sample, "norm").pvalue > 1e-6 and abs(sample.std() - 1) < 0.011


def test_noise_is_standard_normal():
    assert all(is_standard(draw(step)) for step in range(5))


@pytest.mark.parametrize("scale", [2 / 3, 3 / 2, 0.98, 1.02])
def test_twin_a_wrong_scale_is_rejected(scale):
    assert not is_standard(scale * draw())


def test_twin_a_wrong_law_is_rejected():
    uniform = np.random.default_rng(0).uniform(-np.sqrt(3), np.sqrt(3), SIZE)
    assert not is_standard(uniform)


def test_add_scales_by_the_sensitivity_of_the_value():
    for sensitivity, multiplier in ((0.1, 1.07), (2.0, 0.5)):
        value = ClippedSum(torch.zeros(SIZE, dtype=torch.float64), sensitivity, torch.zeros(0))
        released = noise.add(value, multiplier, KEY, 3).numpy()
        assert released.dtype == np.float64
        assert is_standard(released / (sensitivity * multiplier))


def test_tail_reaches_beyond_eight_and_a_half(monkeypatch):
    """D4: with the smallest word of the cipher the radius is 9.42; nothing is capped below 8.5."""
    monkeypatch.setattr(noise, "uniform_words", lambda key, purpose, count, step: np.zeros(count, dtype=np.uint64))
    assert noise.standard_normal(2, KEY, 0).max() == pytest.approx(9.419, abs=1e-3)


def test_tail_twin_pytorch_float32_is_capped():
    """Why not torch.randn: 32-bit uniforms end at sqrt(2 * 24 * ln 2) = 5.77 standard deviations."""
    capped = np.sqrt(-2 * np.log(2.0**-24))
    assert capped < 8.5
    biggest = max(float(torch.randn(4_000_000, generator=torch.Generator().manual_seed(s)).abs().max()) for s in range(3))
    assert biggest <= capped


def test_tail_has_the_right_weight():
    """P(|x| > 4) = 6.3e-5; 10 million draws; two-sided false alarm below 1e-6."""
    sample = np.concatenate([noise.standard_normal(1_000_000, KEY, step) for step in range(10)])
    expected = 1e7 * 2 * stats.norm.sf(4)
    assert abs((np.abs(sample) > 4).sum() - expected) < 5 * np.sqrt(expected)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return abs(float(np.corrcoef(a, b)[0, 1]))


def test_no_correlation_between_parameters_or_steps():
    a, b = draw(0), draw(1)
    bound = 5 / np.sqrt(SIZE)
    assert correlation(a, b) < bound
    assert correlation(a[:-1], a[1:]) < 5 / np.sqrt(SIZE - 1)
    half = SIZE // 2
    assert correlation(a[:half], a[half:]) < 5 / np.sqrt(half)
    assert correlation(a[:half] ** 2, a[half:] ** 2) < 5 / np.sqrt(half)  # Box-Muller's pairs are independent too


def test_twin_replayed_noise_is_seen():
    assert correlation(draw(0), draw(0)) > 0.99


def test_no_block_of_the_cipher_is_ever_repeated():
    blocks: set[bytes] = set()
    total = 0
    for purpose in (Purpose.SAMPLING, Purpose.DP_NOISE, Purpose.VIEWS):
        for step in range(6):
            for part in range(3):
                data = stream_bytes(KEY, purpose, 16 * 500, step, part)
                blocks.update(data[i : i + 16] for i in range(0, len(data), 16))
                total += 500
    assert len(blocks) == total


def test_noise_depends_on_key_and_step_only():
    assert np.array_equal(draw(4), draw(4))
    assert not np.array_equal(draw(4), noise.standard_normal(SIZE, key_from_seed(8, "test"), 4))
    assert np.array_equal(noise.standard_normal(11, KEY, 2), noise.standard_normal(11, KEY, 2))


def test_unbounded_values_cannot_be_protected():
    value = ClippedSum(torch.zeros(3, dtype=torch.float64), float("inf"), torch.zeros(0))
    with pytest.raises(ValueError, match="unbounded sensitivity"):
        noise.add(value, 1.0, KEY, 0)
    assert torch.equal(noise.add(value, 0.0, KEY, 0), value.value)
