"""Norms and sums of large gradients in machine code: float64, in a fixed order, of exactly the numbers that are there."""

import math
from unittest import mock

import pytest
import torch

from dpcert.chains.sums import SumCode, sum_code
from tests.chains import needs_compiler

pytestmark = needs_compiler
SIZES = [1, 15, 16, 31, 32, 33, 2047, 2048, 2049, 20_736]


@pytest.fixture
def code():
    return sum_code()


@pytest.mark.parametrize("size", SIZES)
def test_norms_and_sums_are_those_of_float64(code, size):
    generator = torch.Generator().manual_seed(size)
    gradients = torch.randn(5, size, generator=generator) * 10.0 ** torch.randint(-6, 6, (5, 1), generator=generator)
    wide, factors = gradients.double(), torch.rand(5, generator=generator, dtype=torch.float64)
    for row, exact in zip(gradients, wide, strict=True):
        assert code.squares(row) == pytest.approx(math.fsum(float(x) ** 2 for x in exact), rel=1e-14)
    total = torch.ones(size, dtype=torch.float64)
    assert code.add(gradients, factors, total) is total
    torch.testing.assert_close(total, 1.0 + factors @ wide, rtol=1e-14, atol=1e-9)


def test_the_largest_and_the_smallest_numbers(code):
    assert code.squares(torch.full((3,), 3e38)) == pytest.approx(3 * float(torch.tensor(3e38)) ** 2)
    assert code.squares(torch.full((40,), 1e-44)) > 0.0  # not flushed to 0
    assert math.isnan(code.squares(torch.tensor([1.0, math.nan]))) and math.isinf(code.squares(torch.full((33,), math.inf)))


def test_a_factor_of_zero_leaves_a_record_out(code):
    """0 * inf is nan: one record would destroy the sum of all."""
    gradients = torch.tensor([[math.inf, math.nan], [1.0, 2.0]])
    total = code.add(gradients, torch.tensor([0.0, 0.5], dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    assert total.tolist() == [0.5, 1.0]


def test_memory_next_to_the_gradients_is_not_touched(code):
    memory = torch.arange(200.0)
    total = torch.full((60,), 7.0, dtype=torch.float64)
    code.add(memory[40:80].view(2, 20), torch.ones(2, dtype=torch.float64), total[20:40])
    assert torch.equal(memory, torch.arange(200.0)) and (total[:20] == 7).all() and (total[40:] == 7).all()
    assert total[20] == 7.0 + 40 + 60


@pytest.mark.parametrize("broken", ["squares", "add"])
def test_code_that_computes_something_else_is_not_used(broken):
    """Twins: a norm or a sum that is off by 1e-9."""
    exact = getattr(SumCode, broken)
    sum_code.cache_clear()
    try:
        with mock.patch.object(SumCode, broken, lambda self, *what: exact(self, *what) * (1.0 + 1e-9)):
            assert sum_code() is None
    finally:
        sum_code.cache_clear()


def test_the_digest_names_the_bits(code):
    assert code.fingerprint() == code.fingerprint() and len(code.fingerprint()) == 16
    here, exact = code.fingerprint(), SumCode.squares
    with mock.patch.object(SumCode, "squares", lambda self, gradient: exact(self, gradient) * (1 + 2**-50)):
        assert code.fingerprint() != here
