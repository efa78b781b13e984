"""Large gradients that are formed when they are needed: the numbers of stored ones, without memory for all of them."""

import pytest
import torch
from torch import nn

from dpcert.chains.sums import sum_code
from dpcert.gradients import layers, parts, sums
from dpcert.gradients.engine import Clip
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.parts import (
    PLAIN,
    Arithmetic,
    ChannelsLast,
    Deferred,
    Factored,
    Instantiated,
    Kept,
    Stacked,
    arithmetics,
    product,
)
from dpcert.gradients.vmap import clipped_sum
from dpcert.losses import cross_entropy
from dpcert.privacy.clipping import Flat
from tests.gradients.test_checkpointing import examples, wide_resnet

CLIP = Clip(Flat(), 0.1)


def memory(shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype)


def deferred(b=4, summed=140, seed=0, width_in=150, width_out=130, arithmetic=PLAIN):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(b, summed, width_in, generator=generator)
    deltas = torch.randn(b, summed, width_out, generator=generator)
    return product(inputs, deltas, memory, arithmetic), torch.bmm(deltas.mT, inputs).flatten(1)


ARITHMETICS = pytest.mark.parametrize("arithmetic", arithmetics(), ids=lambda a: a.name.partition("-")[0] or "plain")


@ARITHMETICS
@pytest.mark.parametrize("onednn", [True, False])
def test_formed_gradients_have_the_norms_of_what_is_summed(onednn, arithmetic, monkeypatch):
    monkeypatch.setattr(parts, "_one_by_one", lambda like: onednn)
    part, expected = deferred(arithmetic=arithmetic)
    assert isinstance(part, Deferred) and part.size == 130 * 150
    torch.testing.assert_close(part.instantiate(), expected, rtol=1e-4, atol=1e-4)
    for some in (slice(0, 4), slice(1, 3), slice(3, 4)):
        formed = part.of(some)
        stored = part.instantiate()[some].double()
        torch.testing.assert_close(formed.norms_squared(), stored.square().sum(dim=1), rtol=1e-13, atol=0)
        factors = torch.rand(len(stored), dtype=torch.float64)
        torch.testing.assert_close(formed.weighted_sum(factors), factors @ stored, rtol=1e-12, atol=1e-12)


@ARITHMETICS
def test_a_sum_is_added_to_what_is_there(arithmetic):
    part, _ = deferred(arithmetic=arithmetic)
    factors, before = torch.rand(4, dtype=torch.float64), torch.rand(part.size, dtype=torch.float64)
    stored = part.instantiate().double()
    for form in (part, part.of(slice(0, 4)), Instantiated(part.instantiate())):
        total = before.clone()
        assert form.weighted_sum(factors, total) is total
        torch.testing.assert_close(total, before + factors @ stored, rtol=1e-12, atol=1e-12)


@ARITHMETICS
def test_a_deferred_part_works_alone(arithmetic):
    part, _ = deferred(arithmetic=arithmetic)
    stored, factors = part.instantiate().double(), torch.rand(4, dtype=torch.float64)
    torch.testing.assert_close(part.norms_squared(), stored.square().sum(dim=1), rtol=1e-13, atol=0)
    torch.testing.assert_close(part.weighted_sum(factors), factors @ stored, rtol=1e-12, atol=1e-12)


@ARITHMETICS
def test_a_record_that_is_left_out_has_norm_zero_and_adds_nothing(arithmetic):
    generator = torch.Generator().manual_seed(0)
    inputs, deltas = torch.randn(3, 140, 150, generator=generator), torch.randn(3, 140, 130, generator=generator)
    inputs[1, 0, 0] = torch.inf
    marked = torch.tensor([False, True, False])
    part = product(inputs, deltas, memory, arithmetic)
    for form in (part, part.of(slice(0, 3))):
        left = form.without(marked)
        assert float(left.norms_squared()[1]) == 0.0 and float(left.norms_squared()[0]) > 0.0
        assert torch.isfinite(left.weighted_sum(torch.ones(3, dtype=torch.float64))).all()


def test_orders_and_stacks_pass_through():
    part, _ = deferred()
    last = ChannelsLast(part, (130, 3, 5, 10))
    few = last.of(slice(1, 3))
    assert last.deferred and not few.deferred and last.size == part.size
    factors = torch.rand(2, dtype=torch.float64)
    expected = factors @ last.instantiate()[1:3].double()
    torch.testing.assert_close(few.in_order(few.weighted_sum(factors)), expected, rtol=1e-11, atol=1e-11)
    second = Instantiated(torch.randn(4, 7))
    stacked = Stacked([last, second])
    assert stacked.deferred and stacked.size == part.size + 7 and not stacked.of(slice(0, 1)).deferred
    whole = stacked.of(slice(0, 4))
    weights = torch.rand(4, dtype=torch.float64)
    found = whole.in_order(whole.weighted_sum(weights))
    torch.testing.assert_close(found, weights @ stacked.instantiate().double(), rtol=1e-11, atol=1e-11)


@ARITHMETICS
def test_half_precision_and_float64_are_not_a_matter_of_choice(arithmetic):
    inputs, deltas = torch.randn(2, 300, 300), torch.randn(2, 300, 300)
    part = product(inputs.double(), deltas.double(), memory, arithmetic)
    assert part.code is None and not isinstance(part.of(slice(0, 1)), Kept)
    assert not arithmetic.suits(inputs.to("meta"))


def test_the_cheapest_form_is_chosen_by_arithmetic():
    """Few summed rows: factors. Many rows and many entries: formed late. Few entries: stored."""
    assert isinstance(product(torch.randn(2, 1, 300), torch.randn(2, 1, 300), memory), Factored)
    assert isinstance(product(torch.randn(2, 300, 300), torch.randn(2, 300, 300), memory), Deferred)
    assert isinstance(product(torch.randn(2, 300, 20), torch.randn(2, 300, 20), memory), Instantiated)


@ARITHMETICS
def test_the_clipped_sum_is_that_of_the_reference_engine(arithmetic):
    model, (views, labels) = wide_resnet(), examples(5, 2)
    engines = Layerwise(arithmetic=arithmetic), clipped_sum
    found, expected = (engine(model, cross_entropy, views, labels, CLIP) for engine in engines)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 100_000, 1 << 30])
def test_any_number_at_a_time_gives_the_same_sum(at_once, monkeypatch):
    model, (views, labels) = wide_resnet(), examples(5, 2)
    expected = Layerwise()(model, cross_entropy, views, labels, CLIP)
    monkeypatch.setattr(sums, "_AT_ONCE", at_once)
    found = Layerwise()(model, cross_entropy, views, labels, CLIP)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-15)
    if sum_code() is not None:  # added one after the other: the very same bits
        some = Layerwise(arithmetic=Arithmetic(code=sum_code()))(model, cross_entropy, views, labels, CLIP)
        monkeypatch.undo()
        whole = Layerwise(arithmetic=Arithmetic(code=sum_code()))(model, cross_entropy, views, labels, CLIP)
        assert torch.equal(some.value, whole.value) and torch.equal(some.norms, whole.norms)


def test_no_more_than_a_few_large_gradients_exist(monkeypatch):
    """The memory that `Deferred` asks for does not grow with the number of examples."""
    model, asked = wide_resnet(), []
    monkeypatch.setattr(sums, "_AT_ONCE", 3 * sum(p.numel() for p in model.parameters()))
    buffer = layers._buffer

    def counted(buffers, name, shape, like, dtype=None):
        if dtype is not None:
            asked.append(shape[0])
        return buffer(buffers, name, shape, like, dtype)

    monkeypatch.setattr(layers, "_buffer", counted)
    Layerwise()(model, cross_entropy, *examples(8, 2), CLIP)
    assert asked and max(asked) == 3


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_patches_in_reused_memory_equal_those_of_one_call(mode):
    """The zeros around an image are written once; images of another call must not shine through."""
    layer, buffers = nn.Conv2d(40, 64, 3, padding=2, stride=2, padding_mode=mode), layers.Buffers()
    for b, seed in ((3, 0), (2, 1), (3, 2)):
        x = torch.randn(2 * b, 40, 7, 6, generator=torch.Generator().manual_seed(seed))
        some = layers._PatchesOfSome(layer, x, 2, buffers)
        whole = layers._patches(layer, layers._padded(layer, x), b, layers.Buffers()).flatten(2)
        for example in range(b):
            assert torch.equal(some(range(example, example + 1))[0], whole[example])
        assert torch.equal(some(range(b)), whole)
