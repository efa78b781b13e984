"""What the page says: bounds are rounded to the safe side, and each sentence promises what the certificate promises."""

import json

import numpy as np
import pytest

from tests.serve.page.node import in_node, needs_node

pytestmark = needs_node
FACTS = {
    "dataset": "mnist", "method": "dp-gaussian", "class_names": None, "alpha": 0.001, "sigma": 0.5,
    "privacy": {"private": True, "reason": None, "epsilon": 2.9910001, "delta": 1e-5},
    "certification": [{"sigma": 0.25, "examples": 500, "certified_accuracy": {"0.25": 0.9}}],
}  # fmt: skip


def said(script, **given):
    """What the script returns, with plain spaces."""
    answer = in_node(f'const words = await import("./words.js"); const {{ facts }} = given; {script}', {"facts": FACTS} | given)
    return json.loads(json.dumps(answer).replace("\\u00a0", " "))


def test_a_radius_is_rounded_down_and_a_distance_up():
    values = [*np.random.default_rng(0).uniform(0, 4, 2000).tolist(), 0.001, 0.3, 1.599, 1.0, 2.5]
    radii, distances = np.array(
        said(
            "return [given.values.map(words.radiusText), given.values.map(words.distanceText)].map((t) => t.map(Number));",
            values=values,
        )
    )
    assert (radii <= values).all() and (radii > np.array(values) - 0.0011).all()
    assert (distances >= np.array(values) - 1e-8).all() and (distances < np.array(values) + 0.001).all()


def test_epsilon_is_rounded_up_and_never_without_delta():
    text = said("return [words.lead(facts), ...words.promised(facts).flat()].join(' ');")
    assert text.count("ε = 3.00, δ = 1e-5") == 2


def test_a_run_without_privacy_promises_none():
    facts = FACTS | {"privacy": {"private": False, "reason": "no noise", "epsilon": None, "delta": 1e-5}}
    promised, other = said(
        "return [words.promised(facts), words.notPromised(facts)].map((rows) => rows.flat().join(' '));", facts=facts
    )
    assert "rivacy" not in promised and "ε = ∞: no noise" in other


@pytest.mark.parametrize(("alpha", "text"), [(0.001, "99.9 %"), (0.05, "95 %"), (1e-10, "99.99999999 %"), (1e-15, "more than")])
def test_no_confidence_is_rounded_to_certainty(alpha, text):
    words = said("return words.radiusWords({ abstained: false, alpha: given.alpha });", alpha=alpha)
    assert text in words and "100 %" not in words


def test_figures_of_another_noise_are_not_shown():
    assert "test images" not in str(said("return words.notPromised(facts)[0];"))
    assert "90 %" in str(said("return words.notPromised({ ...facts, sigma: 0.25 })[0];"))


@pytest.mark.parametrize(
    ("distance", "again", "expected"),
    [
        (0.2, {"selected": 7, "abstained": False}, "as promised"),
        (0.2, {"selected": 3, "abstained": False}, "contradicts the certificate; it happens with probability at most 0.2 %"),
        (0.2, {"selected": 7, "abstained": True}, "no answer"),
        (0.5, {"selected": 7, "abstained": False}, "though not promised"),
        (0.5, {"selected": 3, "abstained": False}, "beyond the certificate"),
    ],
)
def test_an_attacked_image_is_judged_by_its_certificate(distance, again, expected):
    """At the radius itself nothing is promised: the certificate is about smaller distances."""
    result = {"selected": 7, "radius": 0.5, "alpha": 0.001}
    script = "return words.askedWords(given.distance, given.again, given.result, facts);"
    assert expected in said(script, distance=distance, again=again, result=result)
    state = said("return words.attackState(given.distance, given.result, facts);", distance=distance, result=result)
    assert state.startswith("Inside" if distance < 0.5 else "Beyond")
