"""Votes as machine code: those of PyTorch on the same noise, used only where it is worth it, right and faster."""

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.certification import compiled, votes
from dpcert.certification.bank import split
from dpcert.certification.compiled import MachineCode, rest_as_machine_code, whole_as_machine_code
from dpcert.certification.votes import Voter, voting_copy
from dpcert.rng import Purpose, key_from_seed
from tests.chains import needs_compiler

KEY, SIGMA = key_from_seed(0, "test"), 0.5
X = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
ESTIMATION = Purpose.CERTIFY_ESTIMATION


def counted(worth, fresh, monkeypatch, model=None, n=600):
    monkeypatch.setattr(votes, "WORTH_MACHINE_CODE", worth)
    voter = Voter(model or dpcert.build_model("cnn", seed=0), SIGMA)
    with voter.counters(X, KEY, {ESTIMATION: n}, fresh_noise=fresh) as counters:
        used = counters[0]._forward if fresh else counters[0].rest
        return isinstance(used, MachineCode), [counters[0].count(x, 0, n, ESTIMATION, i) for i, x in enumerate(X)]


@pytest.fixture
def measured(monkeypatch):
    """What machine code is said to take, PyTorch being 1."""

    def take(seconds):
        monkeypatch.setattr(compiled, "_seconds", lambda run, *_: seconds if isinstance(run, MachineCode) else 1.0)

    return take


@needs_compiler
@pytest.mark.parametrize("fresh", [False, True], ids=["bank", "fresh noise"])
def test_votes_are_those_of_the_other_ways(fresh, measured, monkeypatch):
    """Twin: other weights give other votes."""
    measured(0.4)
    used, found = counted(600, fresh, monkeypatch)
    not_used, expected = counted(601, fresh, monkeypatch)
    assert used and not not_used
    assert np.array_equal(found, expected)
    assert not np.array_equal(counted(600, fresh, monkeypatch, dpcert.build_model("cnn", seed=1))[1], expected)


@needs_compiler
@pytest.mark.parametrize("fresh", [False, True], ids=["bank", "fresh noise"])
def test_code_that_is_slow_or_differs_is_not_used(fresh, measured, monkeypatch):
    measured(0.6)
    assert not counted(0, fresh, monkeypatch)[0]
    measured(0.4)
    call = MachineCode.__call__
    monkeypatch.setattr(MachineCode, "__call__", lambda self, *rows: call(self, *rows) * 1.001)
    assert not counted(0, fresh, monkeypatch)[0]


def test_without_a_compiler_votes_are_cast_as_before(measured, monkeypatch):
    monkeypatch.setenv("CXX", "")
    measured(0.4)
    assert not counted(0, False, monkeypatch)[0]


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(784, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.rest(self.first(x.flatten(1)).relu() * 2.0)


def test_a_custom_forward_has_no_machine_code(measured):
    """Its layers say nothing about what happens between them."""
    measured(0.0)
    model = voting_copy(Doubled())
    with torch.inference_mode():
        cut = split(model, X, SIGMA)
        assert whole_as_machine_code(model, X, SIGMA) is None
        assert rest_as_machine_code(cut, cut.features(X[:1])) is None
