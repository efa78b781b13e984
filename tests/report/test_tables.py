"""Which certification a run is spoken of by, which rows stand beside it, and what a page leaves out."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dpcert.paper.grid import Cell
from dpcert.report.html import render
from dpcert.report.tables import read_run, summary
from dpcert.store.durable import write_checked_json
from tests.grid_fakes import fake_run, radius_of

RADII = {0.25: np.full(100, 0.1), 0.5: radius_of(0.8, 0.5), 1.0: np.full(100, 0.3)}


@pytest.fixture
def dpsgd(tmp_path):
    return fake_run(tmp_path, Cell("mnist", "dpsgd"), RADII, samples=lambda k: (1.0, 2.0, 3.0))


def with_entries(facts, *changes):
    """The same run with copies of its certification at 0.5, changed, before the others."""
    own = next(c for c in facts.certified if c.figures["sigma"] == 0.5)
    return replace(
        facts, certified=[*(replace(own, figures={**own.figures, **change}) for change in changes), *facts.certified]
    )


def test_without_noisy_views_the_main_sigma_is_the_configs(dpsgd):
    facts = read_run(dpsgd)
    assert facts.metrics["sigma_train"] is None and facts.main.figures["sigma"] == 0.5
    beside = read_run(fake_run(dpsgd.parent, Cell("mnist", "dp-gaussian"), {0.5: RADII[0.5]}))
    assert beside.main.figures["sigma"] == facts.main.figures["sigma"]
    elsewhere = replace(facts, config=facts.config.replace("[certify]", "[certify]\nsigma = 1.0"))
    assert elsewhere.main.figures["sigma"] == 1.0
    lone = replace(facts, certified=[c for c in facts.certified if c.figures["sigma"] != 0.5])
    assert lone.main.figures["sigma"] == 0.25  # better than no page


@pytest.mark.parametrize(
    "special",
    [{"alpha_is": "simultaneous"}, {"fresh_noise": True}, {"skip_misclassified": True}, {"n": 1000}, {"split": "validation"}],
)
def test_special_certificates_and_fewer_votes_come_after_the_plain_ones(dpsgd, special):
    facts = read_run(dpsgd)
    assert with_entries(facts, {**special, "file": "certificates-sigma0.50-a.tsv"}).main.figures == facts.main.figures


def test_among_plain_ones_more_votes_come_first(dpsgd):
    facts = read_run(dpsgd)
    few, more = ({"n": n, "file": f"certificates-sigma0.50-n{n}-alpha0.001.tsv"} for n in (200, 500))
    others = [c for c in facts.certified if c.figures["sigma"] != 0.5]
    assert (
        replace(
            with_entries(facts, few, more), certified=[*with_entries(facts, few, more).certified[:2], *others]
        ).main.figures["n"]
        == 500
    )


def test_samples_stand_beside_the_main_certificates(dpsgd):
    """They were made beside sigma 0.25 (the twin: their own radius is 0.1 everywhere)."""
    facts = read_run(dpsgd)
    assert {row.radius for row in facts.samples} == {0.1}
    assert [row.radius for row in facts.analyzed] == [row.radius for row in facts.main.rows]
    assert [row.correct for row in facts.analyzed] == [row.correct for row in facts.main.rows]


def test_samples_of_some_images_are_joined_by_their_index(dpsgd):
    facts = read_run(dpsgd)
    radius = {row.idx: row.radius for row in facts.main.rows}
    for some in (facts.samples[1:], facts.samples[2::3], facts.samples[::-1]):
        found = replace(facts, samples=some).analyzed
        assert [(row.idx, row.radius) for row in found] == [(row.idx, radius[row.idx]) for row in some]
    assert len(set(radius.values())) > 50  # a shift by one place would show


def test_rows_of_one_method_are_told_apart_by_their_folder(dpsgd):
    one, other = read_run(dpsgd), read_run(fake_run(dpsgd.parent, Cell("mnist", "dpsgd", seed=1), {0.5: RADII[0.5]}))
    names = [row[0] for row in summary([one, other])]
    assert names == ["dpsgd on mnist: mnist-dpsgd"] * 3 + ["dpsgd on mnist: mnist-dpsgd-seed1"]
    assert {row[0] for row in summary([one])} == {"dpsgd on mnist"}


def test_held_out_records_are_not_on_the_page(dpsgd, without_figures):
    name = "certificates-validation-sigma0.50.tsv"
    metrics = json.loads((dpsgd / "metrics.json").read_text())
    del metrics["check"]
    held_out = {**metrics["certification"][1], "split": "validation", "file": name, "acr": 9.876, "abstained": 4321}
    write_checked_json(dpsgd / "metrics.json", {**metrics, "certification": [held_out, *metrics["certification"]]})
    (dpsgd / name).write_bytes((dpsgd / "certificates-sigma0.50.tsv").read_bytes())
    beside = json.loads((dpsgd / "certificates-sigma0.50.json").read_text())
    del beside["check"]
    write_checked_json((dpsgd / name).with_suffix(".json"), {**beside, "split": "validation"})
    facts = read_run(dpsgd)
    page = render([facts])
    assert name in {c.figures["file"] for c in facts.certified} and any("(validation)" in row[0] for row in summary([facts]))
    assert not [words for words in ("validation-", "(validation)", "9.876", "4321") if words in page]
    only = replace(facts, certified=[c for c in facts.certified if not c.is_of_test_set])
    assert only.main is None and 'data-missing="certificates"' in render([only])


def test_rows_that_were_cut_do_not_stop_a_page(dpsgd):
    whole = (dpsgd / "samples.tsv").read_bytes()
    (dpsgd / "samples.tsv").write_bytes(whole[:-9])
    assert len(read_run(dpsgd).samples) == 99
