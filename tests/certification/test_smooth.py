"""PREDICT and CERTIFY on classifiers whose truth is known."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import dpcert
from dpcert.certification import smooth
from dpcert.certification.votes import FreshVotes, tally, winners
from dpcert.rng import Purpose, key_from_seed

KEY = key_from_seed(1, "test")


class HalfSpace(nn.Module):
    """Class 1 where w.x > b: the smoothed classifier's true radius is the distance to the plane."""

    def __init__(self, size=16, bias=0.0):
        super().__init__()
        self.direction = nn.Parameter(
            torch.nn.functional.normalize(torch.randn(size, generator=torch.Generator().manual_seed(0)), dim=0)
        )
        self.bias = bias

    def forward(self, x):
        score = x.flatten(1) @ self.direction - self.bias
        return torch.stack([-score, score], dim=1)

    def at(self, distance):
        return (self.direction.detach() * distance).reshape(1, 4, 4)


def test_linear_classifier_against_the_closed_form():
    """C2 in small: no more radii above the true distance than alpha allows, and tight where there is something to certify."""
    model, sigma, n = HalfSpace(), 0.5, 10_000
    distances = np.linspace(0.25, 1.5, 60)
    x = torch.stack([model.at(float(d)) for d in distances])
    found = dpcert.certify(model, x, torch.ones(60, dtype=torch.long), sigma=sigma, n=n, seed=0)
    radius = found.radius.numpy()
    assert (radius > distances).sum() <= 2  # expected 0.06 at alpha = 0.001
    assert found.correct.all() and np.median(radius / distances) >= 0.93
    true_p = norm.cdf(distances / sigma)
    assert np.abs(found.count.numpy() / n - true_p).max() < 5 * 0.5 / math.sqrt(n)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_linear_classifier_in_ten_thousand_cases(evidence):
    """C2: at most 24 of 10,000 radii above the true distance (false alarm 5e-5), and tight. About three minutes."""
    model, sigma, n = HalfSpace(), 0.5, 10_000
    distances = np.random.default_rng(0).uniform(0.5 * sigma, 3.0 * sigma, 10_000)
    x = torch.stack([model.at(float(d)) for d in distances])
    found = dpcert.certify(model, x, torch.ones(len(x), dtype=torch.long), sigma=sigma, n=n, seed=0, batch=2560)
    radius = found.radius.numpy()
    above, tightness = int((radius > distances).sum()), float(np.median(radius / distances))
    assert above <= 24 and tightness >= 0.93
    twin = sigma * norm.ppf(np.minimum(found.count.numpy() / n, 1 - 0.5 / n))  # the share of votes, without a confidence bound
    assert (twin > distances).sum() > 24
    evidence(
        "C2",
        figure=f"{above} of 10,000 radii above the true distance, median tightness {tightness:.3f}",
        trials=10_000,
        twin=f"no confidence bound: {int((twin > distances).sum())} above",
    )


class Fair:
    """Votes at random: half for class 0, half for class 1; every certificate would be false."""

    sigma = 1.0

    def __init__(self, seed, reuse=False):
        self.generator, self.reuse = np.random.default_rng(seed), reuse

    def count(self, x, start, stop, purpose, index):
        votes = stop - start
        if self.reuse and purpose is Purpose.CERTIFY_ESTIMATION:
            return self.last * (votes // self.last.sum())
        ones = int(self.generator.binomial(votes, 0.5))
        self.last = np.array([votes - ones, ones])
        return self.last


def false_certificates(trials, reuse):
    return sum(smooth.certify(Fair(s, reuse), torch.zeros(1), 100, 1000, 0.001).radius > 0 for s in range(trials))


def test_selection_and_estimation_are_disjoint():
    """With p_A = 1/2 nothing may be certified; reusing the selection votes (the twin) certifies far too often."""
    assert false_certificates(2000, reuse=False) <= 12  # Poisson(2 * ...) at alpha 0.001: false alarm below 1e-5
    assert false_certificates(2000, reuse=True) > 100


def test_the_noise_of_selection_and_estimation_differs():
    counter = FreshVotes(HalfSpace(), 5.0, KEY)
    x = torch.zeros(1, 4, 4)
    with torch.inference_mode():
        a = counter.count(x, 0, 2000, Purpose.CERTIFY_SELECTION, 0)
        b = counter.count(x, 0, 2000, Purpose.CERTIFY_ESTIMATION, 0)
        c = counter.count(x, 0, 2000, Purpose.CERTIFY_ESTIMATION, 1)
    assert not np.array_equal(a, b) and not np.array_equal(b, c)


def test_batch_size_changes_no_vote():
    """C6."""
    model = dpcert.build_model("cnn", seed=0)
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(2, dtype=torch.long)
    found = [dpcert.certify(model, x, y, sigma=0.5, n=500, seed=3, batch=batch) for batch in (7, 64, 500)]
    assert all(torch.equal(found[0].count, other.count) for other in found[1:])


def test_ties_and_nans_count_for_nobody():
    logits = torch.tensor(
        [
            [1.0, 1.0, 0.0],
            [math.nan, 1.0, 0.0],
            [0.0, math.nan, 2.0],
            [3.0, 1.0, 0.0],
            [1.0, 1.0 + 1e-6, 0.0],
            [math.inf, 0.0, 0.0],
            [-math.inf, 2.0, 1.0],
        ]
    )
    assert winners(logits).tolist() == [1, 0, 0]


def test_a_broken_classifier_gets_no_certificate():
    class Nan(nn.Module):
        def forward(self, x):
            return torch.full((len(x), 3), math.nan)

    found = dpcert.certify(Nan(), torch.zeros(2, 1, 2, 2), [0, 1], sigma=0.5, n=200)
    assert found.predict.tolist() == [-1, -1] and found.radius.tolist() == [0.0, 0.0] and found.acr == 0.0
    assert dpcert.predict(Nan(), torch.zeros(1, 1, 2, 2), sigma=0.5, n=200).tolist() == [-1]


def test_predict_answers_or_abstains():
    model = HalfSpace()
    x = torch.stack([model.at(1.0), model.at(0.0), model.at(-1.0)])
    assert dpcert.predict(model, x, sigma=0.5, n=1000).tolist()[::2] == [1, 0]
    answers = [int(dpcert.predict(model, x[1:2], sigma=0.5, n=100)) for _ in range(30)]
    assert answers.count(-1) >= 29  # at p = 1/2 an answer comes with probability below alpha


def test_figures_of_certificates():
    certificates = dpcert.Certificates(
        predict=torch.tensor([1, 2, -1, 0]),
        radius=torch.tensor([0.5, 0.3, 0.0, 1.0], dtype=torch.float64),
        correct=torch.tensor([True, False, False, True]),
        count=torch.tensor([9, 9, 5, 10]),
        n=10,
        p_lower=torch.tensor([0.8, 0.7, 0.2, 0.9], dtype=torch.float64),
    )
    assert certificates.acr == pytest.approx(1.5 / 4)
    assert certificates.certified_accuracy(0.25) == 0.5 and certificates.certified_accuracy(0.75) == 0.25
    assert certificates.abstained == 1
    low, high = certificates.acr_estimate.low, certificates.acr_estimate.high
    assert low < certificates.acr < high


@pytest.mark.parametrize("simultaneous", [False, True])
def test_equal_certificates_leave_an_interval(simultaneous):
    model = HalfSpace()
    found = dpcert.certify(
        model, torch.stack([model.at(5.0)] * 20), [1] * 20, sigma=0.5, n=100, alpha=0.01, simultaneous=simultaneous
    )
    assert len(set(found.radius.tolist())) == 1 and found.acr_estimate.low < found.acr <= found.acr_estimate.high


def test_the_model_keeps_its_mode_and_layout():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 3)).train()
    strides = model[0].weight.stride()
    dpcert.certify(model, torch.rand(1, 1, 4, 4), [0], sigma=0.5, n=50)
    assert model.training and model[1].training and model[0].weight.stride() == strides


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sigma": 0.0}, "sigma is 0.0"),
        ({"sigma": math.nan}, "sigma is nan"),
        ({"n": 0}, "n is 0"),
        ({"n0": 0}, "n0 is 0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": 0.7}, "alpha is 0.7"),
        ({"n": 1.5}, "n is 1.5"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dpcert.certify(HalfSpace(), torch.zeros(1, 1, 4, 4), [0], **({"sigma": 0.5, "n": 10} | changes))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (torch.zeros(2, 1, 4, 4), [0], "one label for each"),
        (torch.full((1, 1, 4, 4), math.nan), [0], "NaN"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), [0], "must be float"),
        (torch.zeros(0, 1, 4, 4), [], "at least one"),
    ],
)
def test_inputs_that_mean_nothing_are_refused(x, y, words):
    with pytest.raises(ValueError, match=words):
        dpcert.certify(HalfSpace(), x, y, sigma=0.5)


def test_inputs_outside_the_unit_interval_are_welcome():
    model = HalfSpace()
    assert dpcert.certify(model, model.at(4.0)[None] - 2.0, [1], sigma=0.5, n=100).radius.shape == (1,)


class Recorder:
    """Notes what is asked of it; every vote is for class 1."""

    sigma = 0.5

    def __init__(self, wins=1.0):
        self.asked, self.wins = [], wins

    def count(self, x, start, stop, purpose, index):
        self.asked.append((purpose, start, stop, index))
        ones = round((stop - start) * self.wins)
        return np.array([stop - start - ones, ones])


def test_each_question_asks_for_its_own_noise():
    """Selection, estimation and prediction have a purpose each, every vote is asked for once, and the input's index is passed on."""
    x, selection, estimation = torch.zeros(1), Purpose.CERTIFY_SELECTION, Purpose.CERTIFY_ESTIMATION
    counter = Recorder()
    smooth.certify(counter, x, 100, 1000, 0.001, index=7)
    assert counter.asked == [(selection, 0, 100, 7), (estimation, 0, 1000, 7)]
    counter = Recorder()
    smooth.predict(counter, x, 500, 0.001, index=3)
    assert counter.asked == [(Purpose.PREDICT, 0, 500, 3)]
    counter = Recorder(wins=0.8)
    smooth.robust_at(counter, x, 0.4, 100, 5000, 0.001, index=2)
    first, *rest = counter.asked
    assert first == (selection, 0, 100, 2) and all((purpose, index) == (estimation, 2) for purpose, _, _, index in rest)
    assert [start for _, start, _, _ in rest] == [0, *(stop for _, _, stop, _ in rest[:-1])]  # no vote is counted twice


@pytest.mark.parametrize("alpha", [0.05, 0.001, 1e-6])
@pytest.mark.parametrize("wins", [1.0, 0.0])
def test_robust_needs_the_evidence_of_its_alpha(alpha, wins):
    """The answer comes at the first look at which the e-process has reached 1/alpha, and at none before."""
    from dpcert.certification.sequence import log_evidence_above, log_evidence_below, looks

    class Fixed(Recorder):
        def count(self, x, start, stop, purpose, index):
            share = 1.0 if purpose is Purpose.CERTIFY_SELECTION else self.wins
            return np.array([round((stop - start) * (1 - share)), round((stop - start) * share)])

    radius = 0.4 if wins else 0.05
    decision = smooth.robust_at(Fixed(wins), torch.zeros(1), radius, 100, 5000, alpha)
    threshold = float(norm.cdf(radius / 0.5))
    evidence = log_evidence_above if wins else log_evidence_below
    enough = next(look for look in looks(5000) if evidence(round(look * wins), look, threshold) >= -math.log(alpha))
    assert decision.robust is bool(wins) and decision.votes == 100 + enough


@pytest.mark.parametrize("alpha", [0.05, 0.001, 1e-6])
@pytest.mark.parametrize(("share", "radius", "robust"), [(0.9, 0.4, True), (0.4, 0.05, False)])
def test_neither_answer_comes_on_half_of_the_evidence(alpha, share, radius, robust):
    """Votes so close to the threshold that the evidence for alpha needs more of them than the evidence for its square root."""
    from dpcert.certification.sequence import log_evidence_above, log_evidence_below, looks

    class Even(Recorder):
        """After any number of votes class 1 has the same share of them."""

        def count(self, x, start, stop, purpose, index):
            ones = stop - start if purpose is Purpose.CERTIFY_SELECTION else round(stop * share) - round(start * share)
            return np.array([stop - start - ones, ones])

    evidence, threshold = log_evidence_above if robust else log_evidence_below, float(norm.cdf(radius / 0.5))

    def votes_for(enough):
        return next(look for look in looks(5000) if evidence(round(look * share), look, threshold) >= enough)

    decision = smooth.robust_at(Even(), torch.zeros(1), radius, 100, 5000, alpha)
    assert votes_for(-0.5 * math.log(alpha)) < votes_for(-math.log(alpha))
    assert decision.robust is robust and decision.votes == 100 + votes_for(-math.log(alpha))


def test_the_memory_of_votes_does_not_grow_with_their_number():
    """A generator of chunks is never held as a whole, and the count is that of all rows together."""
    import weakref

    alive, most = weakref.WeakSet(), 0
    rows = torch.rand(40, 50_000, generator=torch.Generator().manual_seed(0))

    def chunks():
        nonlocal most
        for row in rows:
            logits = row.reshape(-1, 10).clone()
            alive.add(logits)
            most = max(most, len(alive))
            yield logits

    assert (tally(chunks()) == winners(rows.reshape(-1, 10))).all()
    assert most <= 23  # some 4 MB of the 8
    assert (tally([rows[:2, :30].reshape(-1, 3)]) == winners(rows[:2, :30].reshape(-1, 3))).all()


def test_a_million_classes_are_counted_chunk_by_chunk():
    chunk = torch.zeros(1, 1_000_000)
    chunk[0, 7] = 1.0
    votes = tally(chunk for _ in range(5))
    assert votes[7] == 5 and votes.sum() == 5
