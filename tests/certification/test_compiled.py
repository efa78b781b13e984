"""Whole networks in ONNX Runtime: used where they are right, keep rows apart and save time; PyTorch otherwise."""

import copy
import sys

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.certification import compiled, heads, votes
from dpcert.certification.compiled import compile_whole
from dpcert.certification.votes import TIE_TOLERANCE, FreshVotes, evaluating, voting, winners
from dpcert.rng import Purpose, key_from_seed, normal_at_positions
from tests.certification.test_heads import COLOR, MODELS, VOTES, family, residual, shared_of, votes_of

ort = pytest.importorskip("onnxruntime")
KEY, SIGMA = key_from_seed(0, "test"), 0.5


@pytest.fixture(autouse=True)
def always_fast_enough(monkeypatch):
    """What is compiled and right is used, however busy the machine is."""
    monkeypatch.setattr(
        compiled, "_seconds", lambda run, *inputs: 0.0 if getattr(run, "__name__", "") in ("whole", "rest") else 1.0
    )


@pytest.fixture
def proven(monkeypatch):
    """As if the proof of row isolation covered residual networks: the model itself may run on a batch."""
    monkeypatch.setattr(heads, "each_row_alone", lambda model, shape: model)


def noisy(x, count, seed=0):
    rows = x[torch.arange(count) % len(x)]
    return rows + SIGMA * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_pytorch_and_leave_the_tolerance_of_a_tie_unused(name):
    """The top-two gap moves by a fraction of the tolerance, over batch sizes and runtimes; twin: other weights."""
    make, x = MODELS[name]
    with evaluating(make()) as model:
        whole, rows = compile_whole(model, x, SIGMA), noisy(x, 200)
        assert whole is not None
        outputs = [torch.cat([run(part) for part in rows.split(size)]) for run in (model, whole) for size in (1, 7, 128)]
        scale = outputs[0].abs().amax(dim=1)
        gaps = [output.gather(1, outputs[0].topk(2, dim=1).indices).diff(dim=1)[:, 0] / scale for output in outputs]
        assert max(float((a - b).abs().max()) for a in gaps for b in gaps) < TIE_TOLERANCE / 2
        other = copy.deepcopy(model)
        next(other.parameters()).data.mul_(1.001)
        moved = other(rows).gather(1, outputs[0].topk(2, dim=1).indices).diff(dim=1)[:, 0] / scale
        assert float((moved - gaps[0]).abs().max()) > TIE_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_fresh_votes_are_those_of_pytorch_on_the_same_noise(name, proven, monkeypatch):
    monkeypatch.setattr(votes, "WORTH_COMPILING", 0.0)
    make, x = MODELS[name]
    with voting(make(), x, sigma=SIGMA, key=KEY, votes=VOTES, fresh_noise=True) as counters, evaluating(make()) as plain:
        assert counters[0]._forward is not None
        for index, image in enumerate(x):
            noise = normal_at_positions(
                KEY, Purpose.CERTIFY_ESTIMATION, 0, 300, tuple(image.shape), torch.device("cpu"), index, votes.ROWS_ON_CPU
            )
            expected = winners(plain(image + SIGMA * noise))
            found = counters[0].count(image, 0, 300, Purpose.CERTIFY_ESTIMATION, index)
            assert np.array_equal(found, expected) and found.sum() >= 299


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fresh", [False, True], ids=["bank", "fresh noise"])
def test_compiled_heads_vote_as_each_alone(name, fresh, proven, monkeypatch, evidence):
    """C9 with a compiled trunk; twin: heads swapped."""
    monkeypatch.setattr(votes, "WORTH_COMPILING", 0.0)
    used = []
    for function in ("compile_rest", "compile_whole"):
        real = getattr(votes, function)
        monkeypatch.setattr(votes, function, lambda *a, real=real: used.append(real(*a)) or used[-1])
    make, x = MODELS[name]
    models = family(make)
    together = np.split(votes_of(shared_of(models, x), x, fresh=fresh), 3, axis=1)
    alone = [votes_of(model, x, fresh=fresh) for model in models]
    assert len(used) == 4 and None not in used
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not np.array_equal(together[0], alone[1])
    evidence("C9", figure=f"{name}, compiled: 0 votes differ", trials=3 * together[0].size, twin="heads swapped: caught")


@pytest.mark.parametrize("name", MODELS)
def test_compiled_heads_have_the_bits_of_each_alone(name):
    make, x = MODELS[name]
    models = family(make)
    with evaluating(shared_of(models, x)) as shared:
        together = compile_whole(shared, x, SIGMA)
    for place, model in enumerate(models):
        with evaluating(model) as voter:
            alone = compile_whole(voter, x, SIGMA)
            for count in (1, 5, 116, 128):
                rows = noisy(x, count, seed=count)
                assert torch.equal(together(rows).chunk(3, dim=1)[place], alone(rows))


def test_a_bank_that_does_not_fit_leaves_compiled_fresh_votes(proven, monkeypatch):
    monkeypatch.setattr(votes, "WORTH_COMPILING", 0.0)
    monkeypatch.setattr("dpcert.certification.bank.LARGEST_BANK_BYTES", 1000)
    with voting(residual(), COLOR, sigma=SIGMA, key=KEY, votes=VOTES) as counters:
        assert all(isinstance(counter, FreshVotes) and counter._forward is not None for counter in counters)


def test_few_votes_are_cast_without_compiling(monkeypatch):
    calls = []
    monkeypatch.setattr(votes, "compile_whole", lambda *a: calls.append(a))
    x, model = MODELS["cnn"][1], MODELS["cnn"][0]()
    monkeypatch.setattr(votes, "seconds_a_row", lambda model, x: 1e-5)
    smoothed = dpcert.SmoothedClassifier(model, SIGMA)
    smoothed.predict(x[:1], n=100)
    assert not calls
    monkeypatch.setattr(votes, "seconds_a_row", lambda model, x: 1e-1)
    smoothed.predict(x[:1], n=100)
    assert len(calls) == 1
    smoothed.predict(x[:1], n=100)
    assert len(calls) == 1  # once per shape


class Centered(nn.Module):
    """Subtracts the mean of the batch: the compiled graph would mix the noisy copies."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x - x.mean(dim=0, keepdim=True))


class FirstSize(nn.Module):
    """The tracer fixes what the code reads from the batch size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, x):
        return self.layer(x.flatten(1)) * (1.0 + int(x.shape[0]))


@pytest.mark.parametrize("make", [Centered, FirstSize])
def test_a_graph_that_mixes_rows_or_fixes_the_batch_is_not_used(make):
    with evaluating(make()) as model:
        assert compile_whole(model, MODELS["cnn"][1], SIGMA) is None


def test_what_is_wrong_or_slow_or_missing_is_left_to_pytorch(monkeypatch):
    x = MODELS["cnn"][1]
    with evaluating(MODELS["cnn"][0]()) as model:
        assert compile_whole(model, x, SIGMA) is not None
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "_rows_stay_apart", lambda whole, rows: False)
            assert compile_whole(model, x, SIGMA) is None
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "agree", lambda a, b: False)
            assert compile_whole(model, x, SIGMA) is None
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "_seconds", lambda run, *inputs: 1.3 if isinstance(run, compiled.Compiled) else 1.0)
            assert compile_whole(model, x, SIGMA) is None
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "_seconds", lambda run, *inputs: 1.0)
            assert compile_whole(model, x, SIGMA) is not None  # equally fast: chance does not choose
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "onnxruntime", None)
            assert compile_whole(model, x, SIGMA) is None


def test_the_time_is_that_of_one_thread_and_the_threads_come_back(monkeypatch):
    monkeypatch.undo()
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        assert compiled._seconds(lambda rows: seen.append(torch.get_num_threads()) or rows, torch.ones(1)) < 1.0
        assert set(seen) == {1} and torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            compiled._seconds(lambda rows: rows / (1 // 0), torch.ones(1))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_compiling_changes_neither_weights_nor_mode():
    model = residual().train()
    before = copy.deepcopy(model.state_dict())
    with voting(model, COLOR, sigma=SIGMA, key=KEY, votes=VOTES, fresh_noise=True):
        pass
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_runtime_folds_frozen_batch_norm(tmp_path):
    onnx = pytest.importorskip("onnx")
    with evaluating(residual()) as model:
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "folded.onnx")
        options.log_severity_level = 3
        ort.InferenceSession(compiled._exported(model, {"rows": COLOR}, ["rows"]), options, ["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "folded.onnx").graph.node]
    assert "BatchNormalization" not in kinds and kinds.count("Conv") == 15
