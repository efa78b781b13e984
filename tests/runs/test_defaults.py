"""Custom data gets batch size, learning rate and epochs of its own: from public numbers, and never without saying so."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcert.cli.app import main
from dpcert.errors import DataError
from dpcert.runs.config import parse, read_toml
from dpcert.runs.defaults import KEYS, training_defaults
from dpcert.runs.resolve import resolve
from dpcert.training.settings import TrainConfig
from tests.conftest import blobs

PRESETS = {"mnist/dp-gaussian": (512, 0.5, 40), "fashion-mnist/dp-gaussian": (2048, 4.0, 40)}
SHAPES = st.tuples(st.sampled_from([1, 3]), st.integers(4, 256), st.integers(4, 256))


@given(st.integers(1, 10**9), SHAPES, st.floats(1e-3, 100), st.sampled_from(["sgd", "adam"]), st.booleans())
def test_the_values_can_always_be_used(records, shape, clip_norm, optimizer, clips):
    chosen = training_defaults(records, shape, optimizer=optimizer, clip_norm=clip_norm, clips=clips)
    assert 1 <= chosen.batch_size <= records and 1 <= chosen.epochs <= 40 and 0 < chosen.learning_rate <= 1e6
    steps = chosen.epochs * records / chosen.batch_size
    assert steps <= 2 * 2500 or chosen.epochs == 1


def test_the_rule_lies_between_the_presets_at_their_n():
    chosen = training_defaults(60_000, (1, 28, 28))
    for value, low, high in zip((chosen.batch_size, chosen.learning_rate), (512, 0.5), (2048, 4.0), strict=True):
        assert low <= value <= high
    assert chosen == training_defaults(60_000, (1, 28, 28), clip_norm=0.1) and chosen.epochs == 40


def test_the_rule_scales_as_it_says():
    base = training_defaults(10_000, (1, 28, 28))
    assert training_defaults(40_000, (1, 28, 28)).batch_size == 2 * base.batch_size
    assert training_defaults(10_000, (1, 28, 28), clip_norm=1.0).learning_rate == pytest.approx(
        base.learning_rate / 10, rel=0.1
    )
    assert training_defaults(10_000, (1, 56, 56)).learning_rate == pytest.approx(base.learning_rate / 2, rel=0.1)
    assert training_defaults(10_000, (1, 28, 28), clips=False).learning_rate == 0.01
    assert training_defaults(10_000, (1, 28, 28), optimizer="adam").learning_rate == 0.001
    assert training_defaults(10**6, (1, 28, 28)).epochs < 40


def npz(folder, name="own", **changes):
    path = folder / f"{name}.npz"
    np.savez(path, **(blobs(0) | changes))
    return path


def values(config):
    return tuple(getattr(config.train, key) for key in KEYS)


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_custom_data_does_not_inherit_the_presets_settings(tmp_path, preset):
    lines = []
    config = resolve(preset, {"data.path": str(npz(tmp_path))}, lines.append)
    expected = training_defaults(240, (1, 8, 8))
    assert values(config) == (expected.batch_size, expected.learning_rate, expected.epochs)
    assert len(lines) == 1 and "\n" not in lines[0]
    for words in ("train.batch_size=64", "N = 240 (the number of training records, treated as public)", "1 x 8 x 8", "--set"):
        assert words in lines[0]
    assert values(resolve(preset, {}, lines.append)) == PRESETS[preset or "mnist/dp-gaussian"]  # the twin: the preset's data
    assert len(lines) == 1


def test_what_the_user_gave_is_kept(tmp_path):
    path, lines = str(npz(tmp_path)), []
    config = resolve("mnist/dpsgd", {"data.path": path, "train.batch_size": 512, "train.epochs": 3}, lines.append)
    assert values(config) == (512, training_defaults(240, (1, 8, 8)).learning_rate, 3)
    assert "batch_size" not in lines[0] and "train.learning_rate=" in lines[0]
    everything = {f"train.{key}": value for key, value in zip(KEYS, (7, 0.3, 2), strict=True)}
    assert values(resolve(None, {"data.path": path, **everything}, lines.append)) == (7, 0.3, 2) and len(lines) == 1


def test_values_of_a_toml_file_count_as_given(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(f'[data]\npath = "{npz(tmp_path)}"\n[train]\nlearning_rate = 0.5\n')
    lines = []
    config = resolve(str(file), {}, lines.append)
    assert config.train.learning_rate == 0.5 and config.train.batch_size == 64 and "learning_rate" not in lines[0]


def test_the_public_size_is_used_where_it_is_given(tmp_path):
    """The number of records is then secret: two neighbours get the same settings."""
    lines = []
    small = {name: array[:-1] if name.endswith("train") else array for name, array in blobs(0).items()}
    chosen = [
        values(resolve(None, {"data.path": str(path), "data.size": 1000, "data.validation": 40}, lines.append))
        for path in (npz(tmp_path), npz(tmp_path, "less", **small))
    ]
    assert chosen[0] == chosen[1] and chosen[0][0] == training_defaults(960, (1, 8, 8)).batch_size
    assert lines[0] == lines[1] and "N = 960 (data.size)" in lines[0]


def test_methods_without_clipping_and_other_settings_are_heard(tmp_path):
    path = str(npz(tmp_path))
    assert resolve("mnist/regular", {"data.path": path}).train.learning_rate == 0.01
    usual = resolve("mnist/dpsgd", {"data.path": path}).train.learning_rate
    assert resolve("mnist/dpsgd", {"data.path": path, "privacy.clip_norm": 1.0}).train.learning_rate < usual
    assert resolve("mnist/dpsgd", {"data.path": path, "train.optimizer": "adam"}).train.learning_rate == 0.001


def test_a_missing_file_is_left_to_the_reader_and_a_damaged_one_is_refused(tmp_path):
    assert values(resolve(None, {"data.path": str(tmp_path / "absent.npz")})) == PRESETS["mnist/dp-gaussian"]
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    with pytest.raises(DataError, match="bad.npz"):
        resolve(None, {"data.path": str(tmp_path / "bad.npz")})


def test_the_command_prints_them_and_writes_them_and_is_a_no_op_when_rerun(tmp_path, capsys):
    call = [
        "train",
        "mnist/dpsgd",
        "--set",
        f"data.path={npz(tmp_path)}",
        "--set",
        "model.name=linear",
        "--set",
        "train.epochs=2",
    ]
    call += ["--set", "privacy.delta=1e-3", "--out", str(tmp_path / "run")]
    for words in ("trained: ", "already trained, nothing to do"):
        with pytest.raises(SystemExit) as caught:
            raise SystemExit(main(call) or 0)
        out = capsys.readouterr().out
        assert (
            caught.value.code == 0
            and out.startswith("custom data: chose train.batch_size=64, train.learning_rate=")
            and words in out
        )
    stored = parse(read_toml(tmp_path / "run" / "config.toml"), "config")
    assert stored.train.batch_size == 64 and math.isclose(
        stored.train.learning_rate, training_defaults(240, (1, 8, 8)).learning_rate
    )


def test_a_tiny_clip_norm_gives_a_rate_that_the_config_accepts():
    chosen = training_defaults(2000, (1, 28, 28), clip_norm=1e-300)
    assert TrainConfig(learning_rate=chosen.learning_rate).learning_rate == 1e6
