"""The page of a fine-tuned run: it names the public weights and the phases, and shows no p_A where none was computed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dpcert.errors import RunError
from dpcert.paper.comparison import figures_of
from dpcert.paper.grid import Cell
from dpcert.report import figures, words
from dpcert.report.html import render
from dpcert.report.tables import read_run, summary
from dpcert.store.durable import write_checked_json
from tests.grid_fakes import PHASES, PUBLIC, fake_run, radius_of

CELL = Cell("cifar10", "dp-gaussian", 0.25)
RADIUS = radius_of(0.5, 0.25, 100, 0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("runs"), CELL, {0.25: RADIUS})


def test_words_name_model_weights_data_and_phases(folder):
    facts = read_run(folder)
    said = words.trained(facts)
    assert said.startswith("A residual network pretrained on public images was trained on 1,000 training images of CIFAR-10")
    assert PUBLIC["sha256"][:16] in said and f"trained on {PUBLIC['data']}." in said
    assert "Training had two phases: the last layer (4 steps of all images), then the last 2 parts of the network and" in said
    assert "Neither are the public images" in words.promised(facts)


def test_a_run_from_scratch_says_none_of_it(tmp_path):
    facts = read_run(fake_run(tmp_path, Cell("mnist", "dp-gaussian"), {0.5: RADIUS}))
    said = words.trained(facts) + words.promised(facts) + words.failing(facts) + "".join(summary([facts])[0]) + render([facts])
    assert "public weights" not in said and "phases" not in said and "first n₀ votes" not in said and "data-public" not in said


@pytest.mark.parametrize("name", ["resnet-32", "resnet-48", "efficientnet-lite0", "crossvit-tiny", "cnn", "linear"])
def test_every_packaged_model_has_words(folder, name):
    facts = read_run(folder)
    other = replace(facts, config=facts.config.replace('name = "resnet-48"', f'name = "{name}"'))
    assert f'name = "{name}"' in other.config and "A custom model" not in words.trained(other)


def test_the_models_that_have_words_are_the_packaged_ones():
    from dpcert.models.architectures import MODELS

    assert set(words._MODELS) == set(MODELS)


def test_page_and_table_name_weights_digest_and_data(folder):
    facts = read_run(folder)
    page = render([facts], figures_of)
    assert f'data-public="{PUBLIC["name"]}"' in page and PUBLIC["sha256"] in page and PUBLIC["data"] in page
    assert "the backbone differs, so these are other models" in page
    assert ">paper, CrossViT-Tiny 0.246<" in page and "the paper (CrossViT-Tiny), at radius 0.25" in page
    ((name, *cells),) = summary([facts], figures_of)
    assert sum("[paper, CrossViT-Tiny " in cell for cell in cells) == 3 and "[paper " not in "".join(cells)
    assert f"from public resnet-48 (SHA-256 {PUBLIC['sha256'][:16]}...)" in name


def test_images_without_votes_have_no_p_lower_and_no_radius_in_the_figures(folder):
    facts = read_run(folder)
    wrong = int((RADIUS == 0).sum())
    assert wrong > 0 and len(facts.main.rows) == 100 and len(facts.main.voted.rows) == 100 - wrong
    for drawing in (figures.p_lower([("run", facts)]), figures.radii([("run", facts)])):
        assert f"{100 - wrong} correct, 0 wrong, 0 of {100 - wrong} without an answer" in drawing.shows
    plain = replace(facts, certified=[replace(facts.main, figures={**facts.main.figures, "skip_misclassified": False})])
    assert f"{wrong} wrong" in figures.p_lower([("run", plain)]).shows  # the twin: they would be drawn at p_A = 0
    page = render([facts])
    assert 'data-mark="skipped"' in page and 'id="confidently-wrong"' not in page and 'id="least-robust"' in page
    assert 'id="confidently-wrong"' in render([plain])
    assert f"{wrong} got a wrong answer and 0 got none. Wrong answers are those of the first 100 votes." in words.failing(facts)
    assert facts.main.figures["acr"] == pytest.approx(RADIUS.mean(), abs=1e-5)


def test_a_model_that_is_always_wrong_has_a_page(tmp_path):
    facts = read_run(fake_run(tmp_path, CELL, {0.25: np.zeros(50)}))
    assert facts.main.voted.rows == [] and figures.p_lower([("run", facts)]) is None
    assert 'id="figure-p_lower"' not in render([facts])


def test_training_size_is_that_of_the_last_phase(folder):
    facts = read_run(folder)
    last = PHASES[-1]
    assert words.training_size(facts) == round(last["batch_size"] / last["sampling_probability"]) == 1000
    privacy = {key: value for key, value in facts.metrics["privacy"].items() if key != "phases"}
    alone = replace(facts, metrics={**facts.metrics, "privacy": {**privacy, "sampling_probability": 1.0}})
    assert words.training_size(alone) is None  # the head alone: train.batch_size was not used


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("phases", "two"),
        ("phases", [1]),
        ("phases", [{**PHASES[0], "steps": "4"}]),
        ("public_inputs", [{"name": "x", "sha256": None, "data": "y"}]),
        ("public_inputs", {}),
    ],
)
def test_wrong_types_are_reported_by_name(tmp_path, key, value):
    folder = fake_run(tmp_path, CELL, {0.25: RADIUS})
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics.pop("check")
    metrics["privacy"][key] = value
    write_checked_json(folder / "metrics.json", metrics)
    with pytest.raises(RunError, match=f"has no valid 'privacy.{key}"):
        read_run(folder)
