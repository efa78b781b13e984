"""The certificate that the browser computes is the one that Python computes."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpcert.certification.bounds import certified_radius, lower_confidence_bound
from dpcert.certification.votes import winners
from tests.serve.page.node import in_node, needs_node

pytestmark = needs_node
ALPHAS = (0.3, 0.05, 0.01, 0.001, 1e-6, 1e-9)
BOUNDS = """
const { lowerConfidenceBound, certifiedRadius } = await import("./bounds.js");
return given.map(([count, n, alpha]) => {
  const p = lowerConfidenceBound(count, n, alpha);
  return [p, certifiedRadius(p, 1)];
});
"""


def cases():
    generator = np.random.default_rng(0)
    found = [(count, n, alpha) for n in (1, 2, 3, 10, 37) for count in range(n + 1) for alpha in ALPHAS]
    for n in (100, 1000, 10_000, 100_000, 1_000_000):
        edges = {
            0,
            1,
            n // 2,
            n // 2 + 1,
            n - 1,
            n,
            *(n - k for k in (2, 3, 5, 10)),
            *generator.integers(0, n + 1, 25).tolist(),
        }
        found += [(count, n, alpha) for count in sorted(edges) for alpha in ALPHAS]
    return found


def differences(changed=None):
    """Ours minus Python's, for the bound and the radius, over all cases."""
    asked = cases()
    ours = np.array(in_node(BOUNDS, asked, changed))
    bounds = [lower_confidence_bound(*case) for case in asked]
    return ours - np.array([(p, certified_radius(p, 1.0)) for p in bounds])


def test_bound_and_radius_equal_pythons():
    difference = differences()
    assert len(difference) > 1000 and np.abs(difference).max() < 1e-9
    assert difference[:, 0].max() < 1e-13 and difference[:, 1].max() < 1e-10  # never larger than Python's but by rounding


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const logAlpha = Math.log(alpha)", "const logAlpha = Math.log(2 * alpha)"),
        ("b = trials - successes + 1;", "b = trials - successes;"),
        ("for (let k = 120;", "for (let k = 3;"),
        ("stirlingError(n) - stirlingError(a)", "stirlingError(n) + stirlingError(a)"),
    ],
)
def test_twin_a_small_mistake_is_seen(old, new):
    assert np.nanmax(np.abs(differences({"bounds.js": (old, new)}))) > 1e-9


def test_the_radius_of_every_probability_equals_pythons():
    p = [0.5, 0.5 + 1e-16, 0.500001, *np.linspace(0.51, 0.999, 200).tolist(), *(1 - 10.0 ** -np.arange(3, 15, 0.5)).tolist()]
    ours = in_node(
        'const { certifiedRadius } = await import("./bounds.js"); return given.map((p) => certifiedRadius(p, 0.5));', p
    )
    assert np.allclose(ours, [certified_radius(value, 0.5) for value in p], rtol=0, atol=1e-9)


NORMALS = 'const { fillNormal } = await import("./noise.js"); return [...fillNormal(new Float64Array(given))];'


def fits(values):
    """Kolmogorov and Smirnov, the variance, and neighbors without correlation: each passes the right law but once in 1e5."""
    values = np.asarray(values)
    spread = (values**2).sum()
    return (
        stats.kstest(values, "norm").pvalue > 1e-5
        and stats.chi2(len(values)).cdf(spread) > 1e-5
        and stats.chi2(len(values)).sf(spread) > 1e-5
        and abs((values[::2] * values[1::2]).mean()) < 5 / math.sqrt(len(values) / 2)
    )


def test_the_noise_is_normal():
    assert fits(in_node(NORMALS, 100_000))


@pytest.mark.parametrize(
    ("old", "new"),
    [("-2 * Math.log", "-1.9 * Math.log"), ("radius * Math.sin", "radius * Math.cos"), ("2 * Math.PI", "Math.PI")],
)
def test_twin_noise_of_another_law_is_seen(old, new):
    assert not fits(in_node(NORMALS, 100_000, {"noise.js": (old, new)}))


def test_the_tail_of_the_noise_is_not_cut_and_no_bits_are_reused():
    script = """
    const { fillNormal } = await import("./noise.js");
    const tail = fillNormal(new Float64Array(2), (words) => words.fill(0).fill(0xffffffff, 0, 2));
    let drawn = 0;
    fillNormal(new Float64Array(given), (words) => { drawn += words.length; crypto.getRandomValues(words); });
    return [tail[0], drawn];
    """
    tail, drawn = in_node(script, 100_001)
    assert 8.5 < tail < 9
    assert drawn >= 2 * 100_001  # 53 bits for a radius and an angle each


def test_votes_are_counted_as_python_counts_them():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((3000, 10), generator=generator)
    logits[::7, 3] = logits[::7].amax(dim=1)  # a tie, or the only maximum
    logits[::11, 2] = logits[::11].amax(dim=1) * (1 + 2.0**-17)
    logits[5, 1], logits[6, 1], logits[7, :] = math.nan, math.inf, 0.0
    script = """
    const { voteOf } = await import("./smooth.js");
    const votes = new Array(10).fill(0);
    for (const row of given) {
      const vote = voteOf(Float32Array.from(row, (value) => Number(value)));
      if (vote >= 0) votes[vote]++;
    }
    return votes;
    """
    rows = [[str(value).replace("inf", "Infinity") for value in row] for row in logits.tolist()]
    assert in_node(script, rows) == winners(logits).tolist()
    assert in_node(script, rows, {"smooth.js": ("2 ** -16", "0")}) != winners(logits).tolist()  # twin


# A linear classifier: class 0 if the first pixel is below `distance`; the smoothed classifier changes exactly there.
COVERAGE = """
const { certify } = await import("./smooth.js");
const request = { n0: 10, n: 200, alpha: 0.05, sigma: 0.5 }, image = new Float32Array(2), over = [];
for (const distance of [0.05, 0.2, 0.5, 0.8]) {
  const run = async (rows, count) => Float32Array.from({ length: 2 * count }, (_, i) => (i % 2 ? rows[i - 1] - distance : 0));
  let failures = 0;
  for (let trial = 0; trial < 1500; trial++) {
    const result = await certify(run, image, 2, request);
    failures += !result.abstained && (result.selected === 1 || result.radius > distance);
  }
  over.push(failures);
}
return over;
"""


def most_failures(trials=1500, alpha=0.05):
    return stats.binom(trials, alpha).isf(1e-6)


def test_certificates_keep_alpha():
    assert max(in_node(COVERAGE)) <= most_failures()


def test_twin_an_estimate_without_a_bound_does_not_keep_alpha():
    naive = {"smooth.js": ("lowerConfidenceBound(votes[selected], n, alpha)", "votes[selected] / n")}
    assert max(in_node(COVERAGE, None, naive)) > most_failures()


def test_an_attack_moves_uphill_stays_in_its_ball_and_in_the_box():
    script = """
    const { attack, distance } = await import("./smooth.js");
    const image = Float32Array.from({ length: 64 }, (_, i) => (i % 3) / 2), weights = Float32Array.from({ length: 64 }, (_, i) => Math.cos(i));
    const margin = (x) => x.reduce((sum, pixel, j) => sum + pixel * weights[j], 0);
    const run = async (rows, count) => Float32Array.from({ length: 2 * count }, (_, i) => (i % 2 ? -1 : 1) * margin(rows.subarray((i >> 1) * 64, ((i >> 1) + 1) * 64)));
    const moved = await attack(run, image, 2, 0, 0.5, 0.7);
    return { distance: distance(image, moved), low: Math.min(...moved), high: Math.max(...moved), before: margin(image), after: margin(moved) };
    """
    seen = in_node(script)
    assert seen["distance"] <= 0.7 and seen["low"] >= 0 and seen["high"] <= 1
    assert seen["after"] < seen["before"] - 1.5  # the best direction without the box gives 0.7 * 5.6
