"""The law of the DP noise (D3, D4): scale, shape, tail, independence. Each test has a broken twin that it rejects.

False alarms: the scale of 1e5 numbers is off by 1.1 % with probability 9e-7, KS at 1e-6, correlations at 5 standard
deviations 6e-7, each; seeds are fixed.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import dpcert
from dpcert.data.dataset import Dataset
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip, ClippedSum
from dpcert.privacy import noise
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import Mechanism, opening_facts
from dpcert.rng import Purpose, key_from_seed, normal_at_positions, stream_bytes
from dpcert.training import loop
from dpcert.training.settings import Settings
from dpcert.training.step import StepContext, private_step

KEY = key_from_seed(7, "test")
SIZE = 100_000


def draw(step: int = 0) -> np.ndarray:
    return noise.standard_normal(SIZE, KEY, step)


def is_standard(sample: np.ndarray) -> bool:
    """KS at 1e-6 and the scale within 1.1 %."""
    return stats.kstest(sample, "norm").pvalue > 1e-6 and abs(sample.std() - 1) < 0.011


def test_noise_is_standard_normal(evidence):
    samples = [draw(step) for step in range(20)]
    assert all(is_standard(sample) for sample in samples)
    worst = max(abs(sample.std() - 1) for sample in samples)
    rejected = [scale for scale in (2 / 3, 0.98, 1.02, 3 / 2) if not is_standard(scale * samples[0])]
    assert len(rejected) == 4
    evidence(
        "D3", figure=f"scale within {100 * worst:.2f} % at d = 1e5, KS passed", trials=20, twin="scale off by 2 %: rejected"
    )


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


def with_words(monkeypatch, radius_words, angle_word=0):
    """The noise made of these words of the cipher: first the radii, then the angles."""
    words = np.array([*radius_words, *([angle_word] * len(radius_words))], dtype=np.uint64)
    monkeypatch.setattr(noise, "uniform_words", lambda key, purpose, count, step: words)
    return noise.standard_normal(2 * len(radius_words), KEY, 0)


def test_tail_reaches_beyond_eight_and_a_half(monkeypatch, evidence):
    """D4 by construction: the word of rank exp(-z^2/2) 2^64 gives z, for every z up to the 9.42 of the smallest word.

    So P(radius > z) = exp(-z^2/2) to the last bit of 2^-64, beyond PyTorch's 5.77 too, without 1e9 draws.
    """
    smallest = with_words(monkeypatch, [0])
    assert smallest.max() == pytest.approx(9.419, abs=1e-3)
    heights = np.array([0.1, 1.0, 4.0, 5.77, 6.0, 7.0, 8.0, 8.5, 9.0])
    words = [int(np.exp(-(z**2) / 2) * 2.0**64) for z in heights]
    found = with_words(monkeypatch, words)[: len(heights)]  # the angle is 0: the cosine is 1
    assert np.allclose(found, heights, rtol=1e-3, atol=0)  # the rank of 9.0 is 47: words are whole numbers
    assert np.allclose(found[:-1], heights[:-1], rtol=1e-4, atol=0)
    assert with_words(monkeypatch, [2**64 - 1]).max() == 0.0  # the largest word: no infinity, no NaN
    assert not np.isnan(with_words(monkeypatch, [0, 1, 2**63], angle_word=2**64 - 1)).any()
    capped = np.sqrt(-2 * np.log((np.array([word >> 40 for word in words]) + 1) * 2.0**-24))  # the twin: 24 bits of each word
    assert capped.max() < 5.78
    evidence(
        "D4",
        figure=f"largest value {smallest.max():.2f} standard deviations",
        trials=len(heights),
        twin="24 bits: capped at 5.77",
    )


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


def independent(samples: list[np.ndarray]) -> bool:
    """No correlation within a sample (lags 1 to 20, half against half, squares) nor between any two; 5 sigma each."""
    size, half = len(samples[0]), len(samples[0]) // 2
    within = [
        value * np.sqrt(size)
        for a in samples
        for value in (
            *(correlation(a[:-lag], a[lag:]) for lag in range(1, 21)),
            correlation(a[:half], a[-half:]) / np.sqrt(2),
            correlation(a[:half] ** 2, a[-half:] ** 2) / np.sqrt(2),  # Box-Muller's pairs share a radius
        )
    ]
    matrix = np.corrcoef(samples) - np.eye(len(samples))
    return max(within) < 5 and np.abs(matrix).max() * np.sqrt(size) < 5


def test_no_correlation_between_parameters_or_steps(evidence):
    samples = [draw(step) for step in range(12)]
    assert independent(samples)
    moving = (samples[0][:-1] + samples[0][1:]) / np.sqrt(2)  # each parameter's noise leans on its neighbour's
    shared = [np.sqrt(0.95) * a + np.sqrt(0.05) * samples[-1] for a in samples[:4]]  # each step's noise leans on one draw
    assert not independent([moving]) and not independent(shared) and not independent([samples[0], samples[0]])
    pairs = 12 * 11 // 2 + 12 * 22
    evidence(
        "D3", figure="no correlation between parameters or steps", trials=pairs, twin="shared 5 %, smoothed, replayed: seen"
    )


def stepped(physical_batch: int, step: int = 0) -> torch.Tensor:
    """The change of the weights in one real step of 48 records whose gradients are 0 but for the noise."""
    images, labels = torch.zeros(48, 1, 10, 10), torch.arange(48) % 300
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 300, bias=False))
    plan = plan_for(Dataset(images, labels, images[:1], labels[:1], size=48, classes=300))
    ledger = Ledger()
    ledger.open(opening_facts(plan, noise_is_secret=True))
    mechanism = Mechanism(plan, KEY, ledger)
    mechanism.charge(step)
    before = model[1].weight.detach().clone()
    method = dpcert.method("dpsgd")
    engines = choose("auto", model, method.loss, (1, 10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=48.0 / (0.1 * plan.noise_multiplier))
    problem = StepContext(
        model, images, labels, method, Clip(method.clip_rule, 0.1), engines, mechanism, optimizer, physical_batch
    )
    private_step(problem, step)
    return (before - model[1].weight.detach()).flatten().double()


def plan_for(data: Dataset):
    settings = Settings.of(epsilon=4.0, delta=1e-5, epochs=10.0, batch_size=48, learning_rate=1.0, momentum=0.0)
    return loop.plan_for(data, dpcert.method("dpsgd"), settings)


def test_noise_is_added_once_however_many_physical_batches_there_are(evidence):
    """D3: 1, 3 and 48 physical batches: the same noise (d = 30,000), its scale once; twin: once a part is seen."""
    whole, thirds, single = stepped(480), stepped(16), stepped(1)
    assert torch.allclose(whole, thirds, atol=1e-5) and torch.allclose(whole, single, atol=1e-5)
    assert stats.kstest(whole.numpy(), "norm").pvalue > 1e-6 and abs(float(whole.std()) - 1) < 0.02
    twin = sum(noise.standard_normal(len(whole), KEY, part) for part in range(3))
    assert abs(float(twin.std()) - 1) > 0.5
    evidence(
        "D3", figure="one draw a step for 1, 3 and 48 physical batches", trials=3, twin="a draw a part: scale 1.73, rejected"
    )


def test_view_noise_of_positions_steps_and_parts_is_uncorrelated():
    cpu = torch.device("cpu")
    rows = [normal_at_positions(KEY, Purpose.VIEWS, 0, 24, (5000,), cpu, step).numpy() for step in range(2)]
    joined = np.concatenate(rows)
    matrix = np.corrcoef(joined) - np.eye(len(joined))
    assert np.abs(matrix).max() * np.sqrt(5000) < 6  # 1,128 pairs: false alarm 2e-6
    cut = torch.cat([normal_at_positions(KEY, Purpose.VIEWS, a, b, (5000,), cpu, 0) for a, b in ((0, 5), (5, 16), (16, 24))])
    assert np.array_equal(cut.numpy(), rows[0])


def test_twin_replayed_noise_is_seen():
    assert correlation(draw(0), draw(0)) > 0.99


def repeated(stream, streams, blocks=500) -> int:
    """How many 16-byte blocks occur twice in these streams."""
    seen: set[bytes] = set()
    for name in streams:
        data = stream(*name, 16 * blocks)
        seen.update(data[i : i + 16] for i in range(0, len(data), 16))
    return len(streams) * blocks - len(seen)


def test_no_block_of_the_cipher_is_ever_repeated(evidence):
    """144 streams of 500 blocks; and by construction: purpose, part and step fill the counter's first half, and no stream
    is longer than the 2^64 blocks of the second. A step or part that does not fit is an error, never another's stream."""
    streams = [(p, step, part) for p in Purpose for step in (0, 1, 2, 255, 256, 2**32 - 1) for part in (0, 1, 2**24 - 1)]
    assert repeated(lambda p, step, part, count: stream_bytes(KEY, p, count, step, part), streams) == 0
    for step, part in ((2**32, 0), (-1, 0), (0, 2**24), (0, -1)):
        with pytest.raises(OverflowError):
            stream_bytes(KEY, Purpose.DP_NOISE, 16, step, part)
    wrapped = repeated(lambda p, step, part, count: stream_bytes(KEY, p, count, step % 256, part), streams)
    assert wrapped > 0
    total = 500 * len(streams)
    evidence("D3", figure=f"0 of {total} cipher blocks repeated", trials=total, twin=f"step kept in 8 bits: {wrapped} repeated")


def test_noise_depends_on_key_and_step_only():
    assert np.array_equal(draw(4), draw(4))
    assert not np.array_equal(draw(4), noise.standard_normal(SIZE, key_from_seed(8, "test"), 4))
    assert np.array_equal(noise.standard_normal(11, KEY, 2), noise.standard_normal(11, KEY, 2))


def test_unbounded_values_cannot_be_protected():
    value = ClippedSum(torch.zeros(3, dtype=torch.float64), float("inf"), torch.zeros(0))
    with pytest.raises(ValueError, match="unbounded sensitivity"):
        noise.add(value, 1.0, KEY, 0)
    assert torch.equal(noise.add(value, 0.0, KEY, 0), value.value)
