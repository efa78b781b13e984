"""C9: votes of several heads in one pass equal those of each head alone, bit for bit."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.certification.heads import SharedHeads, each_vote_alone, headed, heads_in, share
from dpcert.certification.sweep import Request, certify_to_file, certify_to_files
from dpcert.certification.votes import BankVotes, FreshVotes, OneInput, evaluating, tally, voting
from dpcert.models.resnet import ResNet
from dpcert.rng import Purpose, key_from_seed
from tests.faults.scene import without_time

KEY = key_from_seed(0, "test")
X = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(9))
Y = torch.tensor([0, 1, 2, 3, 4])
COLOR = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(9))
VOTES = {Purpose.CERTIFY_SELECTION: 50, Purpose.CERTIFY_ESTIMATION: 300}


def residual():
    """The backbone in small, with statistics and affines as after pretraining."""
    torch.manual_seed(0)
    model = ResNet((3, 16, 16), 10, 4).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.2)
            layer.running_var.uniform_(0.5, 2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
    return model


def cnn():
    return dpcert.build_model("cnn", seed=0)


MODELS = {"cnn": (cnn, X), "residual": (residual, COLOR)}


def last_linear(model):
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]


def family(make, count=3):
    """Models that differ in their head only."""
    base, models = make(), []
    for seed in range(count):
        model = copy.deepcopy(base)
        torch.manual_seed(seed)
        head = last_linear(model)
        nn.init.normal_(head.weight, 0, 0.5)
        nn.init.normal_(head.bias, 0, 0.1)
        models.append(model)
    return models


def shared_of(models, x, sigma=0.5):
    return share([headed(model, x) for model in models], x, sigma)


def votes_of(model, x, *, fresh, votes=None):
    with voting(model, x, sigma=0.5, key=KEY, votes=votes or VOTES, fresh_noise=fresh) as counters:
        counter = counters[0]
        assert isinstance(counter, FreshVotes if fresh else BankVotes)
        return np.stack([counter.count(x[i], 0, count, purpose, i) for i in range(len(x)) for purpose, count in VOTES.items()])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fresh", [False, True], ids=["bank", "fresh noise"])
@pytest.mark.parametrize("runtime", ["PyTorch", "ONNX Runtime"])
def test_votes_of_heads_in_one_pass_are_those_of_each_alone(name, fresh, runtime, monkeypatch, evidence):
    """C9. The residual model runs row by row under vmap unless its rows are proven to be apart; both must hold."""
    if runtime == "PyTorch":
        monkeypatch.setattr("dpcert.certification.votes.compile_rest", lambda cut, features: None)
        monkeypatch.setattr("dpcert.certification.votes.compile_whole", lambda model, x, sigma: None)
    make, x = MODELS[name]
    models = family(make)
    shared = shared_of(models, x)
    together = np.split(votes_of(shared, x, fresh=fresh), 3, axis=1)
    alone = [votes_of(model, x, fresh=fresh) for model in models]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not np.array_equal(together[0], alone[1])  # twin: heads swapped
    evidence("C9", figure=f"{name}, {runtime}: 0 votes differ", trials=3 * together[0].size, twin="heads swapped: caught")


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_heads_in_one_pass_are_those_of_each_alone(name):
    """Stronger than votes: every bit of every logit, for batches of several sizes."""
    make, x = MODELS[name]
    models = family(make)
    shared = shared_of(models, x)
    with evaluating(shared) as together:
        forward, shape = each_vote_alone(together, tuple(x.shape[1:])), tuple(x.shape[1:])
        for model, rows in ((m, r) for m in range(3) for r in (1, 5, 128)):
            noisy = torch.rand(rows, *shape, generator=torch.Generator().manual_seed(rows))
            with evaluating(models[model]) as voter:
                alone = each_vote_alone(voter, shape)(noisy)
            assert torch.equal(forward(noisy).chunk(3, dim=1)[model], alone)


def rows_of(path):
    return without_time(path.read_text())


@pytest.mark.parametrize("skip", [False, True], ids=["all votes", "skip misclassified"])
def test_files_of_one_pass_are_those_of_each_alone(tmp_path, skip):
    models, request = family(cnn), Request(0.5, 20, 200, skip_misclassified=skip)
    wanted = [[0, 1, 2, 3, 4], [0, 2, 4], [1]]
    files = [(tmp_path / f"together-{place}.tsv", indices) for place, indices in enumerate(wanted)]
    certify_to_files(shared_of(models, X), X, Y, files, request, key=KEY)
    for place, model in enumerate(models):
        certify_to_file(model, X, Y, wanted[place], tmp_path / f"alone-{place}.tsv", request, key=KEY)
        assert rows_of(tmp_path / f"alone-{place}.tsv") == rows_of(tmp_path / f"together-{place}.tsv")
    assert rows_of(tmp_path / "together-0.tsv")[1] != rows_of(tmp_path / "together-1.tsv")[1]


def test_twin_swapped_heads_give_other_files(tmp_path):
    models, request = family(cnn, 2), Request(0.5, 20, 200)
    swapped = shared_of(models[::-1], X)
    files = [(tmp_path / f"{place}.tsv", [0, 1, 2]) for place in range(2)]
    certify_to_files(swapped, X, Y, files, request, key=KEY)
    certify_to_file(models[0], X, Y, [0, 1, 2], tmp_path / "alone.tsv", request, key=KEY)
    assert rows_of(tmp_path / "alone.tsv") == rows_of(tmp_path / "1.tsv") != rows_of(tmp_path / "0.tsv")


class Counting:
    """Votes for class 0 of the first head and class 1 of the second; remembers what was asked."""

    sigma = 0.5

    def __init__(self):
        self.asked = []

    def count(self, x, start, stop, purpose, index):
        self.asked.append((start, stop, purpose, index))
        return np.array([stop - start, 0, 0, stop - start])


def test_the_trunk_runs_once_for_all_heads_and_only_if_one_needs_it():
    request = Request(0.5, 10, 100, skip_misclassified=True)
    for label, ranges in ((0, 2), (1, 2), (5, 1)):  # the first head is right, the second is right, none is
        counter = Counting()
        votes = OneInput(counter, 2)
        found = [request.certify(votes.of_head(head), X[0], label, 3) for head in range(2)]
        assert [c.predict for c in found] == [0, 1] and [c.count is not None for c in found] == [label == 0, label == 1]
        assert len(counter.asked) == ranges == len(set(counter.asked))


def test_equal_numbers_of_selection_and_estimation_votes_are_cast_apart():
    """A class must not be bounded with the votes that selected it."""
    counter = Counting()
    Request(0.5, 50, 50).certify(OneInput(counter, 2).of_head(0), X[0], 0, 3)
    assert [purpose for _, _, purpose, _ in counter.asked] == [Purpose.CERTIFY_SELECTION, Purpose.CERTIFY_ESTIMATION]


def test_counts_of_heads_stand_side_by_side():
    logits = torch.tensor([[2.0, 1.0, 0.0, 5.0], [0.0, 1.0, 5.0, 0.0], [0.0, 3.0, 1.0, 1.0]])
    assert tally([logits], 2).tolist() == [1, 2, 1, 1]  # the last vote of the second head is a tie
    assert tally(iter([logits[:1], logits[1:]]), 2).tolist() == [1, 2, 1, 1]


class Twice(nn.Module):
    """Its head runs twice, so it is not the end of the model only."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(784, 10), nn.Linear(10, 10)

    def forward(self, x):
        return self.head(torch.tanh(self.head(torch.tanh(self.first(x.flatten(1))))))


class Scaled(nn.Module):
    """Something follows the head."""

    factor = 3.0

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(784, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.factor * self.head(torch.tanh(self.first(x.flatten(1))))


class Hidden(nn.Module):
    """A number that is neither a tensor nor printed."""

    def __init__(self, slope=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.slope, self.first, self.head = slope, nn.Linear(784, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.head(torch.tanh(self.slope * self.first(x.flatten(1))))


@pytest.mark.parametrize("make", [Twice, Scaled])
def test_a_model_that_is_not_a_trunk_and_a_head_is_not_shared(make):
    torch.manual_seed(0)
    first, second = make(), None
    second = copy.deepcopy(first)
    nn.init.normal_(second.head.weight)
    assert shared_of([first, second], X) is None


def test_what_the_digest_does_not_see_is_seen_by_the_check():
    first, second = headed(Hidden(1.0), X), headed(Hidden(2.0), X)
    assert first.sha256 == second.sha256 and share([first, second], X, 0.5) is None
    assert share([first, first], X, 0.5) is not None


def test_one_bit_of_the_trunk_is_another_trunk():
    first = cnn()
    for change in ("weight", "buffer"):
        second = copy.deepcopy(first)
        if change == "weight":
            layer = next(layer for layer in second.modules() if isinstance(layer, nn.Conv2d))
            layer.weight.data.view(torch.int32).view(-1)[7] ^= 1
        else:
            second.register_buffer("extra", torch.zeros(1))
        assert headed(first, X).sha256 != headed(second, X).sha256
        assert shared_of([first, second], X) is None
    assert headed(first, X).sha256 == headed(copy.deepcopy(first), X).sha256


@pytest.mark.parametrize("classes", [10, 7])
def test_heads_of_another_shape_are_another_family(classes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 12), nn.Tanh(), nn.Linear(12, 10))
    other = copy.deepcopy(model)
    other[3] = nn.Linear(12, classes)
    assert (headed(model, X).sha256 == headed(other, X).sha256) is (classes == 10)


def test_there_must_be_a_trunk_to_share():
    assert headed(dpcert.build_model("linear", seed=0), X) is None  # the head is the first layer
    assert headed(nn.Linear(28, 3), X) is None
    assert headed(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)), X) is None  # does not take these images
    assert headed(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), X) is None


def test_the_models_keep_their_heads_and_modes():
    model = cnn().train()
    before = [name for name, _ in model.named_modules()]
    shared = shared_of([model, model], X)
    assert model.training and [name for name, _ in model.named_modules()] == before
    assert isinstance(last_linear(model), nn.Linear) and heads_in(shared) == 2 and heads_in(model) == 1
    last_linear(model).weight.data.zero_()
    assert float(shared.heads[0].weight.detach().abs().sum()) > 0  # the heads are copies


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(784, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x.flatten(1))) - x.flatten(1).mean())


def test_a_trunk_that_mixes_rows_is_refused():
    models = family(Mixes, 2)
    shared = SharedHeads(headed(models[0], X).trunk, [model.head for model in models])
    assert isinstance(each_vote_alone(shared_of(family(cnn, 2), X), (1, 28, 28)), nn.Module)
    assert not isinstance(each_vote_alone(shared, (1, 28, 28)), nn.Module)
    with pytest.raises(dpcert.errors.ModelError, match="mixes examples"):
        votes_of(shared, X, fresh=True)


def test_a_head_with_a_hook_is_not_shared_and_a_shared_head_has_none():
    """A hook could mix the rows that the proof of the trunk keeps apart."""
    models = family(cnn, 2)
    for model in models:
        last_linear(model).register_forward_pre_hook(lambda layer, inputs: (inputs[0] - inputs[0].mean(dim=0),))
    assert shared_of(models, X) is None
    silent = family(cnn, 2)
    for model in silent:
        last_linear(model).register_forward_pre_hook(lambda layer, inputs: None)
    assert not any(head._forward_pre_hooks for head in shared_of(silent, X).heads)


def test_sharing_draws_no_random_numbers():
    models = family(cnn, 2)
    before = torch.get_rng_state()
    assert shared_of(models, X) is not None and torch.equal(torch.get_rng_state(), before)


def test_the_number_of_files_is_the_number_of_heads(tmp_path):
    with pytest.raises(ValueError, match="1 files for 2 heads"):
        certify_to_files(shared_of(family(cnn, 2), X), X, Y, [(tmp_path / "a", [0])], Request(0.5), key=KEY)
