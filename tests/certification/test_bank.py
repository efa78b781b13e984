"""The shared bank: the same votes as the plain path on the same noise, and a fall-back where the model cannot be cut."""

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.certification.bank import SplitModel, channels_last, draw_bank, split
from dpcert.certification.compiled import Compiled, compile_rest
from dpcert.certification.votes import BankVotes, FreshVotes, evaluating, voting, winners
from dpcert.rng import Purpose, bulk_normal, key_from_seed

KEY = key_from_seed(0, "test")
CPU = torch.device("cpu")
X = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(9))
VOTES = {Purpose.CERTIFY_SELECTION: 100, Purpose.CERTIFY_ESTIMATION: 2500}


class Normalised(nn.Module):
    """Normalisation inside the model, before the first layer: affine, so it can be cut."""

    def __init__(self):
        super().__init__()
        self.inner = dpcert.build_model("cnn", seed=0)

    def forward(self, x):
        return self.inner((x - 0.13) / 0.3)


class Clamped(Normalised):
    def forward(self, x):
        return self.inner(x.clamp(0, 1))


class Skips(nn.Module):
    """The input is used again behind the first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(784, 784), nn.Linear(784, 10)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x.flatten(1))) + x.flatten(1))


class NoLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x.flatten(1)[:, :10] * self.scale


CUT = {
    "cnn": lambda: dpcert.build_model("cnn", seed=0),
    "linear": lambda: dpcert.build_model("linear", seed=0),
    "normalised": Normalised,
}
WHOLE = {"clamped": Clamped, "skips": Skips, "no layer": NoLayer}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("compiled", [False, True], ids=["PyTorch", "ONNX Runtime"])
def test_votes_equal_those_of_the_plain_path(name, compiled):
    """C6: on the same noise, vote by vote; only votes too close to call may differ, and they count for nobody."""
    torch.manual_seed(0)
    x = torch.rand(3, 1, 28, 28)
    with evaluating(CUT[name]()) as model:
        cut = split(model, X, 0.5)
        assert isinstance(cut, SplitModel)
        rest = compile_rest(cut, cut.features(X[:1])) if compiled else None
        bank = draw_bank(cut, 0.5, KEY, VOTES, (1, 28, 28), CPU, torch.Tensor.contiguous if compiled else channels_last)
        counter = BankVotes(cut, bank, 0.5, batch=64, rest=rest)
        for purpose, count in VOTES.items():
            noise = torch.cat([bulk_normal(KEY, purpose, (1024, 1, 28, 28), CPU, part=b) for b in range(-(-count // 1024))])[
                :count
            ]
            for index in range(3):
                plain = winners(model(x[index] + 0.5 * noise))
                found = counter.count(x[index], 0, count, purpose, index)
                assert np.abs(plain - found).sum() <= max(0, count - plain.sum()) + max(0, count - found.sum())
                assert count - found.sum() <= 2


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_cut_falls_back(name):
    with evaluating(WHOLE[name]()) as model:
        assert split(model, X, 0.5) is None
    with voting(WHOLE[name](), X, sigma=0.5, key=KEY, votes=VOTES) as counters:
        assert all(isinstance(counter, FreshVotes) for counter in counters)


def test_fresh_noise_on_request_and_where_memory_ends(monkeypatch):
    model = CUT["cnn"]()
    with voting(model, X, sigma=0.5, key=KEY, votes=VOTES) as counters:
        assert all(isinstance(counter, BankVotes) for counter in counters)
    with voting(model, X, sigma=0.5, key=KEY, votes=VOTES, fresh_noise=True) as counters:
        assert all(isinstance(counter, FreshVotes) for counter in counters)
    monkeypatch.setattr("dpcert.certification.bank.LARGEST_BANK_BYTES", 1000)
    with voting(model, X, sigma=0.5, key=KEY, votes=VOTES) as counters:
        assert all(isinstance(counter, FreshVotes) for counter in counters)


def test_selection_and_estimation_parts_are_disjoint():
    with evaluating(CUT["linear"]()) as model:
        bank = draw_bank(split(model, X, 0.5), 0.5, KEY, VOTES, (1, 28, 28), CPU)
    first, second = bank.parts.values()
    assert not (first[:, None] == second[None, :100]).all(dim=2).any()


def test_bank_and_fresh_noise_agree_within_chance():
    model = CUT["cnn"]()
    x = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    shared = dpcert.certify(model, x, [0] * 4, sigma=0.5, n=4000, seed=0)
    fresh = dpcert.certify(model, x, [0] * 4, sigma=0.5, n=4000, seed=0, fresh_noise=True)
    assert not torch.equal(shared.count, fresh.count)
    assert (shared.count - fresh.count).abs().max() < 6 * np.sqrt(2 * 4000 * 0.25)


def test_threads_change_no_vote_and_come_back():
    model, x = CUT["cnn"](), torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(dpcert.certify(model, x, [0] * 5, sigma=0.5, n=700, seed=4))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0].count, other.count) for other in found[1:])


def test_a_model_that_is_one_layer_keeps_every_chunk():
    """Its logits are the buffer itself: chunks must not overwrite each other."""
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    found = [dpcert.certify(CUT["linear"](), x, [0, 0], sigma=0.5, n=1000, seed=0, batch=batch) for batch in (128, 1000)]
    assert torch.equal(found[0].count, found[1].count)


class ClampedFarOut(Normalised):
    def forward(self, x):
        return self.inner(x.clamp(-20, 20))


def test_the_cut_is_checked_at_the_sigma_and_inputs_it_is_used_at():
    x = torch.rand(2, 1, 28, 28)
    with evaluating(ClampedFarOut()) as model:
        assert split(model, x, 0.5) is not None
        assert split(model, x, 15.0) is None
        assert split(model, 100 * x, 0.5) is None


def test_the_compiled_rest_is_used_where_it_is_right_and_left_where_it_is_not(monkeypatch):
    pytest.importorskip("onnxruntime")
    with evaluating(CUT["cnn"]()) as model:
        cut = split(model, X, 0.5)
        monkeypatch.setattr(
            "dpcert.certification.compiled._seconds", lambda rest, *inputs: 0.0 if isinstance(rest, Compiled) else 1.0
        )
        assert compile_rest(cut, cut.features(X[:1])) is not None
        monkeypatch.setattr("dpcert.certification.compiled.agree", lambda a, b: False)
        assert compile_rest(cut, cut.features(X[:1])) is None


def test_without_onnx_runtime_pytorch_counts(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with evaluating(CUT["cnn"]()) as model:
        cut = split(model, X, 0.5)
        assert compile_rest(cut, cut.features(X[:1])) is None
