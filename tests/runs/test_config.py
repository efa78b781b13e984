"""Configs: typed, complete, refused by name; presets with the paper's settings."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcert.errors import ConfigError, DpcertError
from dpcert.methods import METHODS
from dpcert.runs import presets
from dpcert.runs.certify import request_of
from dpcert.runs.config import Config, differences, parse, parse_assignment, read_toml
from dpcert.runs.resolve import default_out, resolve


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        ({"train.epoch": 1}, r"unknown key 'train.epoch'; \[train\] has: epochs"),
        ({"training.epochs": 1}, "unknown key 'training'"),
        ({"train.epochs": "ten"}, "train.epochs is 'ten'"),
        ({"train.epochs": True}, "train.epochs is True"),
        ({"train.batch_size": 1.5}, "train.batch_size is 1.5"),
        ({"privacy.epsilon": 0.0}, "privacy.epsilon is 0.0"),
        ({"privacy.delta": 1.0}, "privacy.delta is 1.0"),
        ({"method.keep_original": "yes"}, "method.keep_original"),
        ({"train.optimizer": "lion"}, "train.optimizer is 'lion'"),
        ({"method.copies": -1}, "method.copies is -1"),
        ({"certify.examples": "some"}, "certify.examples"),
        ({"privacy.epsilon": float("nan")}, "privacy.epsilon is nan"),
    ],
)
def test_a_wrong_key_or_value_is_named(assignments, words):
    with pytest.raises(ConfigError, match=words):
        resolve("mnist/dp-gaussian", assignments)


@pytest.mark.parametrize("preset", ["mnist/dp-magic", "cifar/dpsgd", "mnist", "", "mnist/"])
def test_an_unknown_preset_is_named(preset):
    with pytest.raises(ConfigError, match="preset"):
        resolve(preset, {})


def test_a_slip_of_the_fingers_is_answered_with_the_name_that_was_meant():
    with pytest.raises(ConfigError, match="did you mean mnist/dp-gaussian\\?"):
        resolve("mnist/dp-gausian", {})
    with pytest.raises(ConfigError, match="did you mean dp-macer\\?"):
        resolve("mnist/dpsgd", {"method.name": "dp-macr"}).build_method()
    with pytest.raises(ConfigError, match="'zzz' is unknown; list them with dpcert presets"):
        resolve("zzz", {})


def test_presets_hold_the_papers_settings():
    mnist, fashion = resolve("mnist/dp-gaussian", {}), resolve("fashion-mnist/dp-gaussian", {})
    assert (mnist.train.learning_rate, mnist.train.batch_size, mnist.train.epochs, mnist.train.momentum) == (0.5, 512, 40, 0.9)
    assert (fashion.train.learning_rate, fashion.train.batch_size, fashion.train.epochs) == (4.0, 2048, 40)
    assert (mnist.privacy.epsilon, mnist.privacy.delta, mnist.privacy.clip_norm) == (3.0, 1e-5, 0.1)
    assert (mnist.method.copies, mnist.method.sigma) == (2, 0.5)
    for name in ("mnist/regular", "fashion-mnist/regular-gaussian"):
        assert (resolve(name, {}).train.learning_rate, resolve(name, {}).train.batch_size) == (0.01, 512)
    assert (mnist.certify.n0, mnist.certify.n, mnist.certify.alpha) == (100, 10_000, 0.001)


@pytest.mark.parametrize(("sigma", "weight"), [(None, 5.0), (0.25, 10.0), (0.5, 5.0), (1.0, 5.0)])
@pytest.mark.parametrize("preset", [name for name in presets.names() if name.endswith("+consistency")])
def test_a_preset_takes_the_settings_of_its_sigma(preset, sigma, weight):
    config = resolve(preset, {} if sigma is None else {"method.sigma": sigma})
    assert config.method.consistency_lambda == config.build_method().regulariser.lambda_ == weight


def test_certification_has_the_sigma_of_the_views_unless_one_is_given():
    assert resolve(None, {}).certification_sigma == 0.5
    assert resolve(None, {"method.sigma": 0.25}).certification_sigma == 0.25
    apart = resolve(None, {"method.sigma": 0.25, "certify.sigma": 1.0})
    assert apart.certification_sigma == request_of(apart).how.sigma == 1.0 and apart.build_method().views.sigma == 0.25


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_resolves_and_reads_itself_back(name, tmp_path):
    config = resolve(name, {})
    assert config.build_method().name == name.split("/")[1] or name.endswith("/best")
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert resolve(str(path), {}) == config
    assert default_out(config, name).name == name.replace("/", "-")


@pytest.mark.parametrize("dataset", presets.WITH_BEST)
def test_the_best_preset_is_a_method_of_the_paper_with_more_settings(dataset):
    config, sigmas = resolve(f"{dataset}/best", {}), [0.25, 0.5, 1.0]
    plain = resolve(f"{dataset}/{config.method.name}", {})
    assert config.build_method().name in METHODS and config.method.sigma == plain.method.sigma
    assert config != plain and config.privacy == plain.privacy
    assert (config.data, config.certify) == (plain.data, plain.certify)
    for sigma in sigmas:
        at = resolve(f"{dataset}/best", {"method.sigma": sigma})
        assert at.certification_sigma == sigma and at.build_method() is not None


def test_the_views_may_have_more_noise_than_the_certificate():
    config = resolve("mnist/dp-gaussian", {"method.sigma": 0.5, "method.sigma_scale": 1.2})
    assert config.build_method().views.sigma == 0.6 and config.certification_sigma == request_of(config).how.sigma == 0.5
    assert "sigma_scale = 1.2" in config.to_toml() and "sigma_scale" not in resolve("mnist/dp-gaussian", {}).to_toml()


def test_any_combination_can_be_written():
    made = resolve(
        None, {"method.name": "custom", "method.views": "gaussian", "method.clip": "automatic", "method.regulariser": "none"}
    )
    assert made.build_method().clip_rule.name == "automatic"
    with pytest.raises(ConfigError, match="method.views is None"):
        resolve(None, {"method.name": "custom"}).build_method()
    with pytest.raises(ConfigError, match="method.clip is 'hard'"):
        resolve(None, {"method.clip": "hard"}).build_method()
    with pytest.raises(ConfigError, match="at least one noisy copy"):
        resolve(None, {"method.copies": 0}).build_method()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.epochs=1", ("train.epochs", 1)),
        ("data.path=/tmp/x.npz", ("data.path", "/tmp/x.npz")),
        ("privacy.delta=1e-6", ("privacy.delta", 1e-6)),
        ("method.keep_original=false", ("method.keep_original", False)),
    ],
)
def test_assignments_are_read_as_toml_or_text(text, expected):
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["train.epochs", "epochs=1", "=1", ""])
def test_assignments_of_another_shape_are_refused(text):
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_assignment(text)


def test_differences_ignore_speed_and_certification():
    base = Config()
    faster = resolve(None, {"train.physical_batch": 7, "train.device": "cuda", "gradients.engine": "vmap", "certify.n": 5})
    assert not [d for d in differences(base, faster) if "data" not in d]
    assert differences(base, resolve(None, {"method.sigma": 0.25})) == ["method.sigma: 0.5 -> 0.25"]


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
KEYS = [f"{section}.{key}" for section, field in Config.model_fields.items() for key in field.annotation.model_fields]


@given(key=st.sampled_from(KEYS), value=values)
def test_any_value_of_any_key_is_taken_or_refused_with_its_name(key, value):
    """S4, over all keys."""
    try:
        resolve(None, {key: value})
    except ConfigError as error:
        assert key.split(".")[0] in str(error)


@given(st.text(max_size=200))
def test_any_toml_text_gives_a_config_or_the_documented_error(text):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.toml"
        path.write_text(text, encoding="utf-8", errors="replace")
        try:
            parse(read_toml(path), "c.toml")
        except DpcertError:
            pass


def test_strings_survive_toml():
    for text in ('a"b', "back\\slash", "new\nline", "tab\t", "ünï", "\x7f"):
        assert tomllib.loads(resolve(None, {"data.path": text}).to_toml())["data"]["path"] == text
