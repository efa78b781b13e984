"""Losses against NumPy and SciPy, their limits, their gradients, and extreme logits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpcert.errors import ConfigError
from dpcert.losses import Consistency, Macer, Stability, cross_entropy

LABEL = torch.tensor(2)


def softmax(logits):
    return special.softmax(np.asarray(logits, dtype=np.float64), axis=-1)


def kl(p, q):
    return float(special.rel_entr(p, q).sum())


def by_hand(regulariser, logits, label):
    """The formulas of SPEC.md, written again in float64 with SciPy."""
    f = softmax(logits)
    if isinstance(regulariser, Stability):
        return regulariser.gamma * np.mean([kl(f[0], row) for row in f])
    noisy = f[regulariser.first_noisy :]
    if isinstance(regulariser, Consistency):
        mean = noisy.mean(axis=0)
        return regulariser.lambda_ * np.mean([kl(mean, row) for row in noisy]) + regulariser.eta * stats.entropy(mean)
    p = softmax(regulariser.beta * np.asarray(logits, dtype=np.float64)[regulariser.first_noisy :]).mean(axis=0)
    other = max(value for c, value in enumerate(p) if c != label)
    if p[label] <= other:
        return 0.0
    low, high = 1e-6, 1 - 1e-6
    margin = stats.norm.ppf(np.clip(p[label], low, high)) - stats.norm.ppf(np.clip(other, low, high))
    return regulariser.lambda_ * regulariser.sigma / 2 * max(0.0, regulariser.gamma - margin)


def told(regulariser, copies, keep_original=True, sigma=0.5):
    return regulariser.for_views(copies + int(keep_original), copies, sigma)


REGULARISERS = [
    Stability(),
    Stability(0.3),
    Consistency(5.0, 0.5),
    Consistency(10.0, 0.0),
    Macer(),
    Macer(lambda_=2.0, gamma=4.0, beta=1.0),
    Macer(beta=0.5),
]


@pytest.mark.parametrize("regulariser", REGULARISERS, ids=repr)
@settings(max_examples=60)
@given(copies=st.integers(1, 5), classes=st.integers(2, 6), scale=st.floats(0.01, 3.0), seed=st.integers(0, 10**6))
def test_values_equal_an_independent_computation(regulariser, copies, classes, scale, seed):
    logits = scale * torch.randn(copies + 1, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    label = seed % classes
    assume(not isinstance(regulariser, Macer) or not _nearly_tied(softmax(regulariser.beta * logits[1:]).mean(axis=0)))
    found = told(regulariser, copies)(logits, torch.tensor(label))
    assert float(found) == pytest.approx(by_hand(told(regulariser, copies), logits, label), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("regulariser", REGULARISERS, ids=repr)
def test_float32_keeps_five_digits(regulariser):
    for seed in range(50):
        logits = 2.0 * torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if isinstance(regulariser, Macer) and _nearly_tied(softmax(regulariser.beta * logits[1:]).mean(axis=0)):
            continue  # right or wrong by the last digit: the hinge itself jumps there
        exact = told(regulariser, 3)(logits, LABEL)
        assert float(told(regulariser, 3)(logits.float(), LABEL)) == pytest.approx(float(exact), rel=2e-5, abs=2e-5)


def _nearly_tied(p):
    highest = np.sort(p)[-2:]
    return highest[1] - highest[0] < 1e-4


@pytest.mark.parametrize("regulariser", REGULARISERS, ids=repr)
def test_gradients_equal_finite_differences(regulariser):
    loss = told(regulariser, 3)
    for seed in range(5):
        logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            logits[:, 2] += 1.0  # mostly right, and away from the hinge's corners
            logits *= 0.3
        torch.autograd.gradcheck(lambda z: loss(z, LABEL), (logits,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("regulariser", REGULARISERS, ids=repr)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 30.0, 100.0, 1e4, 1e30])
def test_extreme_logits_give_finite_values_and_gradients(regulariser, size):
    loss = told(regulariser, 3)
    patterns = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0], [1, 0, -1, 0], [0, 0, 1, 1], [-1, -1, 1, -1]], dtype=torch.float32)
    for first in patterns:
        for second in patterns:
            logits = (size * torch.stack([first, second, second, first])).requires_grad_()
            value = loss(logits, LABEL)
            (gradient,) = torch.autograd.grad(value, logits)
            assert torch.isfinite(value) and torch.isfinite(gradient).all(), (first, second)


def test_identical_views_have_no_divergence():
    logits = torch.randn(1, 7).expand(4, 7)
    assert float(told(Stability(2.0), 3)(logits, LABEL)) == 0.0
    assert float(told(Consistency(5.0, 0.0), 3)(logits, LABEL)) == pytest.approx(0.0, abs=1e-6)


def test_a_weight_of_zero_is_no_regulariser():
    logits = torch.randn(4, 7, requires_grad=True)
    for off in (Stability(0.0), Consistency(0.0, 0.0), Macer(lambda_=0.0)):
        value = told(off, 3)(logits, LABEL)
        assert float(value.detach()) == 0.0 and not torch.autograd.grad(value, logits)[0].any()


def test_one_class_certain():
    logits = torch.full((4, 5), -200.0)
    logits[:, 2] = 200.0
    assert float(told(Consistency(5.0, 0.5), 3)(logits, LABEL)) == pytest.approx(0.0, abs=1e-6)
    assert float(told(Macer(), 3)(logits, LABEL)) == 0.0  # the margin is beyond gamma
    assert float(told(Macer(), 3)(logits, torch.tensor(0))) == 0.0  # wrong: the hinge is for right predictions


def test_macer_is_the_hinge_on_the_certified_radius():
    """p_y = 0.9, others equal: 2/sigma times the two-sided radius, subtracted from gamma."""
    p = torch.tensor([0.1 / 3, 0.1 / 3, 0.9, 0.1 / 3])
    regulariser = told(Macer(lambda_=1.0, beta=1.0), 2, sigma=0.25)
    margin = stats.norm.ppf(0.9) - stats.norm.ppf(0.1 / 3)
    assert float(regulariser(p.log().expand(3, 4), LABEL)) == pytest.approx(0.25 / 2 * (8.0 - margin), rel=1e-5)


def test_macer_keeps_its_digits_near_certainty():
    """1 - p_y = 1e-5 in float32: taken as 1 - p it would be off by several per mille."""
    rest = 1e-5
    p = torch.tensor([rest / 3, rest / 3, 1 - rest, rest / 3], dtype=torch.float64)
    regulariser = told(Macer(lambda_=1.0, beta=1.0, gamma=9.5), 2, sigma=2.0)
    exact = 9.5 - (stats.norm.isf(rest) - stats.norm.ppf(rest / 3))
    assert float(regulariser(p.log().float().expand(3, 4), LABEL)) == pytest.approx(exact, abs=1e-4)


def test_stability_is_zero_for_view_zero_and_flows_through_both_sides():
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(told(Stability(), 2)(logits, LABEL), logits)
    assert gradient[0].abs().sum() > 1e-3 and gradient[1].abs().sum() > 1e-3


def test_only_the_noisy_views_count_for_consistency_and_macer():
    logits = torch.randn(3, 4)
    other = torch.cat([torch.randn(1, 4), logits[1:]])
    for regulariser in (Consistency(5.0), Macer(beta=0.5)):
        assert torch.equal(told(regulariser, 2)(logits, LABEL), told(regulariser, 2)(other, LABEL))
        replaced = told(regulariser, 3, keep_original=False)  # all three rows are noisy now
        assert float(replaced(logits, LABEL)) == pytest.approx(by_hand(replaced, logits, 2), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("regulariser", [Consistency(5.0), Macer(beta=0.5)], ids=repr)
def test_without_the_original_every_view_counts(regulariser):
    """The same noisy views give the same loss, whether the original stands before them or was dropped."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits[:, 2] += 2.0  # the label leads: MACER's hinge is not 0
    kept, dropped = told(regulariser, 3), told(regulariser, 3, keep_original=False)
    assert float(kept(logits, LABEL)) > 0 and torch.equal(kept(logits, LABEL), dropped(logits[1:], LABEL))


@pytest.mark.parametrize(("sigma", "expected"), [(0.25, 10.0), (0.5, 5.0), (1.0, 5.0)])
def test_consistency_takes_the_original_weight_of_its_sigma(sigma, expected):
    assert told(Consistency(), 2, sigma=sigma).lambda_ == expected
    assert told(Consistency(0.7), 2, sigma=sigma).lambda_ == 0.7


def test_cross_entropy_is_the_mean_over_views():
    logits = torch.randn(4, 5, dtype=torch.float64)
    assert float(cross_entropy(logits, LABEL)) == pytest.approx(-np.log(softmax(logits)[:, 2]).mean())
    extreme = torch.tensor([[1e30, 0.0], [-200.0, 200.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(cross_entropy(extreme, torch.tensor(1)), extreme)
    assert torch.isfinite(gradient).all()


def test_mapped_over_a_batch_it_is_the_same():
    logits, labels = torch.randn(6, 4, 5), torch.randint(0, 5, (6,))
    for regulariser in REGULARISERS:
        loss = told(regulariser, 3)
        mapped = torch.func.vmap(loss)(logits, labels)
        alone = torch.stack([loss(z, y) for z, y in zip(logits, labels, strict=True)])
        torch.testing.assert_close(mapped, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Stability(-1.0), "stability_gamma"),
        (lambda: Stability(math.nan), "stability_gamma"),
        (lambda: Consistency(-1.0), "consistency_lambda"),
        (lambda: Consistency(1.0, -0.1), "consistency_eta"),
        (lambda: Macer(lambda_=-1.0), "macer_lambda"),
        (lambda: Macer(gamma=math.inf), "macer_gamma"),
        (lambda: Macer(beta=0.0), "macer_beta"),
        (lambda: told(Stability(), 0), "needs noisy copies"),
        (lambda: told(Consistency(), 0), "needs noisy copies"),
        (lambda: told(Macer(), 0), "needs noisy copies"),
        (lambda: told(Stability(), 2, keep_original=False), "keep_original"),
    ],
)
def test_what_makes_no_sense_is_refused(make, word):
    with pytest.raises(ConfigError, match=word):
        make()
