"""C6 on trained weights: batch size, threads, order and fast path change no vote; votes too close to call are counted."""

import numpy as np
import pytest
import torch

from dpcert.certification.bank import channels_last, draw_bank, split
from dpcert.certification.compiled import compile_rest, rest_as_machine_code
from dpcert.certification.sweep import Request, certify_to_file
from dpcert.certification.votes import TIE_TOLERANCE, BankVotes, FreshVotes, evaluating, winners
from dpcert.rng import Purpose, bulk_normal, key_from_seed
from tests.conftest import trained_cnn

KEY, SIGMA = key_from_seed(0, "test"), 0.5
CPU = torch.device("cpu")
ESTIMATION = Purpose.CERTIFY_ESTIMATION


def votes_of(logits, tolerance=TIE_TOLERANCE):
    """The vote of every row as `winners` casts it; -1 where it is too close to call."""
    best, chosen = logits.float().topk(2, dim=1)
    clear = best[:, 0] - best[:, 1] > tolerance * logits.abs().amax(dim=1)
    return torch.where(clear, chosen[:, 0], -1).numpy()


class Keeping(BankVotes):
    """Keeps the logits it counts."""

    def count(self, x, start, stop, purpose, index):
        own = self.cut.features(x.unsqueeze(0))
        chunks = self.bank.parts[purpose][start:stop].split(self.batch)
        self.logits = torch.cat([self.rest(noise, own) for noise in chunks])
        counted = super().count(x, start, stop, purpose, index)
        assert np.array_equal(counted, winners(self.logits))
        return counted


def fast_paths(model, x, votes):
    """The counters of the fast path: cut model in PyTorch, and in ONNX Runtime and as machine code where these exist."""
    cut = split(model, x[:16], SIGMA)
    features = cut.features(x[:1])
    graph, code = compile_rest(cut, features), rest_as_machine_code(cut, features)
    for rest, layout in ((None, channels_last), (graph, torch.Tensor.contiguous), (code, channels_last)):
        bank = draw_bank(cut, SIGMA, KEY, {ESTIMATION: votes}, (1, 28, 28), CPU, layout)
        yield Keeping(cut, bank, SIGMA, rest=rest)


def compare(images, votes):
    """(votes compared, votes that differ although both are clear, votes too close to call) of fast against plain path."""
    model, x, _ = trained_cnn(images)
    compared = differ = close = 0
    noise = torch.cat([bulk_normal(KEY, ESTIMATION, (1024, 1, 28, 28), CPU, part=part) for part in range(-(-votes // 1024))])
    with evaluating(model) as voter:
        plain = [votes_of(torch.cat([voter(image + SIGMA * part) for part in noise[:votes].split(128)])) for image in x]
        for counter in fast_paths(voter, x, votes):
            for index, image in enumerate(x):
                counter.count(image, 0, votes, ESTIMATION, index)
                fast = votes_of(counter.logits)
                both = (fast >= 0) & (plain[index] >= 0)
                compared, differ = compared + votes, differ + int((fast != plain[index])[both].sum())
                close += int((fast < 0).sum())
    return compared, differ, close


def test_the_fast_path_casts_the_votes_of_the_plain_path():
    compared, differ, close = compare(images=4, votes=512)
    assert compared == 3 * 4 * 512 and differ == 0 and close <= 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_fast_path_on_many_votes(evidence):
    """40 test images x 5,000 votes, three fast paths: no clear vote differs. Deterministic. About three minutes."""
    compared, differ, close = compare(images=40, votes=5000)
    assert differ == 0 and close / compared < 1e-3
    evidence("C6", figure=f"0 of {compared} votes differ; {100 * close / compared:.4f} % too close to call", trials=compared)


def test_batch_size_threads_and_order_change_no_vote(tmp_path, evidence):
    """Fresh noise and the bank, on trained weights: equal counts; twin: other noise gives other counts."""
    model, x, y = trained_cnn(4)
    blends = (x[:2] + x[2:]) / 2  # inputs on which the votes are divided
    before = torch.get_num_threads()
    counts = []
    with evaluating(model) as voter:
        for batch in (1, 7, 128, 300):
            counter = FreshVotes(voter, SIGMA, KEY, batch)
            counts.append([counter.count(blends[i], 0, 300, ESTIMATION, i).tolist() for i in range(2)])
        another = FreshVotes(voter, SIGMA, key_from_seed(1, "test"))
        twin = [another.count(blends[i], 0, 300, ESTIMATION, i).tolist() for i in range(2)]
    assert all(count == counts[0] for count in counts)
    assert twin != counts[0]
    rows = []
    try:
        for place, (threads, order) in enumerate([(1, [0, 1, 2, 3]), (1, [3, 1, 0, 2]), (2, [2, 3, 1, 0])]):
            torch.set_num_threads(threads)
            found = certify_to_file(model, x, y, order, tmp_path / f"{place}.tsv", Request(SIGMA, 50, 500, 0.01), key=KEY)
            rows.append({row.idx: (row.predict, row.count, row.radius) for row in found})
    finally:
        torch.set_num_threads(before)
    assert rows[0] == rows[1] == rows[2]
    evidence(
        "C6",
        figure="batch sizes 1 to 300, 1 and 2 threads, 3 orders: 0 votes differ",
        trials=4 * 600 + 3 * 2200,
        twin="other noise: other counts",
    )


def test_twin_without_the_tolerance_rounding_can_decide_a_vote():
    """Logits one rounding apart vote for different classes; with the tolerance they vote for nobody."""
    a = torch.tensor([[1.0, 1.0 + 2**-23, 0.0]])
    b = a.flip(1).roll(1, 1)  # the same two numbers, exchanged by rounding
    assert votes_of(a, 0.0) != votes_of(b, 0.0)
    assert votes_of(a) == votes_of(b) == -1 and winners(a).sum() == winners(b).sum() == 0
