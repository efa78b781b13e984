"""C1: how often CERTIFY promises too much, in 12 cells of 200,000 trials through the real `smooth.certify`.

The votes are drawn from their exact law (multinomial); everything after them is the code that certifies. A trial fails if the
radius is above that of the smoothed classifier's true probability of the class it names.
"""

import functools
import math

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import binom, norm

from dpcert.certification import bounds, smooth
from dpcert.rng import Purpose

ALPHA, TRIALS, N0, SIGMA = 0.001, 200_000, 100, 0.5
MOST = 271  # P[Binomial(200,000, 0.001) > 271] < 1e-6
CLASSES = {"even": (0.5, 0.5), "just": (0.55, 0.3, 0.15), "clear": (0.9, 0.07, 0.03), "sure": (0.995, 0.005)}
CELLS = [(name, n) for n in (100, 1000, 10_000) for name in CLASSES]


class Drawn:
    """A counter whose votes were drawn beforehand: row `index` of each table."""

    sigma = SIGMA

    def __init__(self, selection, estimation):
        self.votes = {Purpose.CERTIFY_SELECTION: selection, Purpose.CERTIFY_ESTIMATION: estimation}

    def count(self, x, start, stop, purpose, index):
        return self.votes[purpose][index]


def true_radius(p):
    return SIGMA * float(ndtri(p)) if p > 0.5 else 0.0


def failures(cell, seed, *, alpha=ALPHA, bound=bounds.lower_confidence_bound, reuse=False, trials=TRIALS):
    """How many of the trials certify more than is true."""
    name, n = cell
    generator, p = np.random.default_rng(seed), CLASSES[name]
    estimation = generator.multinomial(n, p, trials)
    selection = estimation if reuse else generator.multinomial(N0, p, trials)
    counter, radii = Drawn(selection, estimation), [true_radius(q) + 1e-12 for q in p]
    wrong = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smooth, "lower_confidence_bound", functools.cache(bound))  # few different counts, many trials
        for trial in range(trials):
            found = smooth.certify(counter, None, N0, n, alpha, index=trial)
            wrong += found.radius > 0.0 and found.radius > radii[found.predict]
    return wrong


def peeking(cell, seed, looks=4, trials=TRIALS):
    """The twin that looks four times and keeps its best bound; the counts are drawn in four parts."""
    name, n = cell
    generator, p = np.random.default_rng(seed), CLASSES[name]
    wins = generator.binomial(n // looks, p[0], (trials, looks)).cumsum(axis=1)
    bound = functools.cache(bounds.lower_confidence_bound)
    best = np.zeros(trials)
    for look in range(looks):
        table = {k: bound(int(k), (look + 1) * n // looks, ALPHA) for k in np.unique(wins[:, look])}
        best = np.maximum(best, [table[k] for k in wins[:, look]])
    return int((best > p[0]).sum())


def wald(successes, trials, alpha):
    share = successes / trials
    return min(1.0 - 1e-12, share - norm.ppf(1 - alpha) * math.sqrt(share * (1 - share) / trials))


TWINS = {
    "selection votes used again": lambda seed: failures(("even", 10_000), seed, reuse=True),
    "doubled alpha": lambda seed: failures(("clear", 10_000), seed, alpha=2 * ALPHA),
    "peeking": lambda seed: peeking(("clear", 10_000), seed),
    "Wald": lambda seed: failures(("sure", 1000), seed, bound=wald),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_cell_fails_more_often_than_alpha_allows(evidence):
    """12 cells x 200,000 trials at alpha 0.001: at most 271 failures each (false alarm 1e-6 a cell). About a minute."""
    assert binom.sf(MOST, TRIALS, ALPHA) < 1e-6
    found = {cell: failures(cell, seed) for seed, cell in enumerate(CELLS)}
    assert len(found) == 12 and max(found.values()) <= MOST, found
    assert max(found.values()) > 100  # the cells are hard: something near alpha happens in one of them
    twins = {name: run(0) for name, run in TWINS.items()}
    assert all(count > MOST for count in twins.values()), twins
    evidence(
        "C1",
        figure=f"12 cells: at most {max(found.values())} failures of 200,000 (271 allowed)",
        trials=12 * TRIALS,
        twin="; ".join(f"{name}: {count}" for name, count in twins.items()),
    )


def test_the_same_in_small():
    """Two cells x 10,000 trials: at most 27 failures (false alarm 3e-6 each)."""
    for cell in (("even", 1000), ("clear", 1000)):
        assert failures(cell, 7, trials=10_000) <= binom.isf(3e-6, 10_000, ALPHA)
    assert failures(("sure", 1000), 7, bound=wald, trials=10_000) > binom.isf(3e-6, 10_000, ALPHA)
