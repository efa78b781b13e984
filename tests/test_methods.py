"""The table of methods: its rows, its words, its settings, and what it refuses."""

import itertools

import pytest
import torch

import dpcert
from dpcert import losses, methods
from dpcert.errors import ConfigError, DpcertWarning
from dpcert.methods import METHODS, REGULARISERS, VIEWS, combine
from dpcert.privacy.clipping import CLIP_RULES
from dpcert.runs import presets
from dpcert.runs.resolve import resolve
from dpcert.views import Gaussian, SmoothAdv

PAPER_VIEWS = ("none", "gaussian", "smoothadv")  # the others need a model with noise inside: tests/contracts
PAPER_REGULARISERS = ("none", "stability", "consistency", "macer")
NAMES = [
    "regular",
    "regular-gaussian",
    "dpsgd",
    "psac",
    "dp-gaussian",
    "dp-smoothadv",
    "dp-stability",
    "dp-macer",
    "dp-gaussian+psac",
    "dp-smoothadv+psac",
    "dp-gaussian+consistency",
    "dp-smoothadv+consistency",
]


def test_the_twelve_methods_of_the_paper():
    assert list(METHODS) == NAMES
    assert {row.views for row in METHODS.values()} == set(PAPER_VIEWS) < set(VIEWS)
    assert {row.regulariser for row in METHODS.values()} == set(PAPER_REGULARISERS) < set(REGULARISERS)


def test_the_docstring_shows_the_table_row_by_row():
    lines = [line.split("|")[1:5] for line in methods.__doc__.splitlines() if line.startswith("| ")][1:]
    shown = [tuple(cell.strip() for cell in line) for line in lines]
    assert shown == [(name, row.views, row.regulariser, row.clip) for name, row in METHODS.items()]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("dataset", presets.DATASETS)
def test_every_preset_builds_its_method(dataset, name, sigma):
    config = resolve(f"{dataset}/{name}", {"method.sigma": sigma})
    method, row = config.build_method(), METHODS[name]
    assert method.name == name and method.views.name == row.views and method.clip_rule.name == row.clip
    assert getattr(method.regulariser, "name", "none") == row.regulariser
    assert method.views.sigma in (None, sigma)
    built = dpcert.method(name, sigma=sigma)
    assert type(method.views) is type(built.views) and type(method.regulariser) is type(built.regulariser)


@pytest.mark.filterwarnings("ignore::dpcert.errors.DpcertWarning")
@pytest.mark.parametrize("parts", itertools.product(PAPER_VIEWS, PAPER_REGULARISERS, CLIP_RULES), ids="-".join)
def test_any_combination_trains_or_is_refused_for_a_reason(parts):
    views, regulariser, clip = parts
    wanted = {"views": views, "regulariser": regulariser, "clip": clip, "sigma": 0.25, "copies": 2, "keep_original": True}
    if views == "none" and regulariser != "none":
        with pytest.raises(ConfigError, match="needs noisy copies"):
            combine(**wanted)
        return
    data = torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 3
    dataset = dpcert.Dataset(x_train=data, y_train=labels, x_test=data, y_test=labels, classes=3, size=20)
    run = dpcert.train("linear", dataset, combine(**wanted), epochs=2, batch_size=5, seed=0, noise_seed=0)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_settings_reach_their_part():
    assert dpcert.method("dp-stability", stability_gamma=0.7).regulariser.gamma == 0.7
    smoothadv = dpcert.method("dp-smoothadv+consistency", smoothadv_radius=0.5, smoothadv_steps=3, consistency_lambda=1.0)
    assert (smoothadv.views.radius, smoothadv.views.steps, smoothadv.regulariser.lambda_) == (0.5, 3, 1.0)
    macer = dpcert.method("dp-macer", sigma=1.0, copies=8, macer_lambda=2.0)
    assert macer.regulariser == losses.Macer(lambda_=2.0, sigma=1.0, copies=8)
    assert dpcert.method("psac", psac_r=0.5).clip_rule.r == 0.5
    custom = resolve("mnist/dp-gaussian", {"method.name": "custom", "method.views": "smoothadv", "method.regulariser": "macer"})
    assert custom.model_copy(update={"method": custom.method.model_copy(update={"clip": "automatic"})}).build_method().clip


def test_a_setting_that_nothing_uses_is_an_error():
    with pytest.raises(ConfigError, match="stability_gamma is set"):
        dpcert.method("dp-gaussian", stability_gamma=1.0)


def test_a_regulariser_is_told_which_rows_are_noisy():
    kept = dpcert.Method(views=Gaussian(0.5, 4), regulariser=losses.Consistency())
    replaced = dpcert.Method(views=Gaussian(0.5, 4, keep_original=False), regulariser=losses.Consistency())
    assert (kept.regulariser.first_noisy, replaced.regulariser.first_noisy) == (1, 0)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("dp-consistency", {}, "unknown"),
        ("dp-gaussian", {"copies": -1}, "method.copies"),
        ("dp-gaussian", {"copies": 0}, "at least one noisy copy"),
        ("dp-gaussian", {"copies": 0, "keep_original": False}, "at least one noisy copy"),
        ("dp-smoothadv", {"copies": 0}, "at least one noisy copy"),
        ("dp-smoothadv", {"smoothadv_radius": 0.0}, "smoothadv_radius"),
        ("dp-stability", {"keep_original": False}, "keep_original"),
        ("dp-stability", {"stability_gamma": -2.0}, "stability_gamma"),
        ("dp-macer", {"macer_lambda": -1.0}, "macer_lambda"),
        ("psac", {"psac_r": 0.0}, "psac r"),
    ],
)
def test_bad_methods_are_refused_in_one_line(name, changes, word):
    with pytest.raises(ConfigError, match=word) as caught:
        dpcert.method(name, **changes)
    assert "\n" not in str(caught.value)


def test_no_view_at_all_is_refused():
    class Nothing(SmoothAdv):
        count = 0

    with pytest.raises(ConfigError, match="no view"):
        dpcert.Method(views=Nothing())


@pytest.mark.parametrize(("name", "copies", "word"), [("dp-gaussian+consistency", 1, "always 0"), ("dp-macer", 2, "MACER")])
def test_odd_but_allowed_is_said_and_goes_on(name, copies, word):
    images, labels = torch.rand(10, 1, 4, 4), torch.arange(10) % 2
    data = dpcert.Dataset(x_train=images, y_train=labels, x_test=images, y_test=labels, classes=2)
    with pytest.warns(DpcertWarning, match=word):
        dpcert.train("linear", data, dpcert.method(name, copies=copies), epochs=1, batch_size=5, noise_seed=0)


def test_the_ramp_follows_the_plan_of_the_run():
    method = dpcert.method("dp-smoothadv", smoothadv_warmup=4.0)
    assert method.views_at(1.0).strength == 0.25
    gaussian = dpcert.method("dp-gaussian")
    assert gaussian.views_at(1.0) is gaussian.views
