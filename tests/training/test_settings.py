"""One settings object: one list of keys for files, ``--set`` and Python; off by default; wrong values are refused by name."""

import hashlib
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcert
from dpcert.cli import main
from dpcert.errors import ConfigError
from dpcert.methods import METHODS
from dpcert.runs import presets
from dpcert.runs.config import SPEED_KEYS, Config, read_toml
from dpcert.runs.config import parse as parse_config
from dpcert.runs.resolve import resolve
from dpcert.training import optimizers, schedules
from dpcert.training.settings import SECTION_OF, Settings, TrainConfig
from dpcert.training.state import read_model
from tests.conftest import blobs
from tests.training.knobs import DATA, METHOD, STEPS, files, fresh, notes, train, weights

__all__ = ["notes"]
RESULTS = Path(__file__).parents[2] / "results"


def test_the_papers_presets_and_the_stored_configs_keep_their_bytes():
    """The SHA-256 is that of the version before schedules and averages existed."""
    names = sorted(name for name in presets.names() if name.startswith(("mnist/", "fashion-mnist/")))
    papers = [name for name in names if name.split("/")[1] in METHODS]
    text = "".join(f"{name}\n{resolve(name, {}).to_toml()}" for name in papers)
    assert hashlib.sha256(text.encode()).hexdigest() == "bebe222dc878654345d781038785926e990c899fe87cfc36861e325ce7d3a602"
    stored = sorted(RESULTS.rglob("config.toml"))
    assert len(stored) >= 60
    for path in stored:
        config = parse_config(read_toml(path), str(path))
        assert parse_config(read_toml(path), "again") == config
        if config.data.name == "cifar10":  # newer than these keys
            continue
        assert (config.train.schedule, config.train.warmup, config.train.averaging) == ("constant", 0.0, "none")


def test_a_run_without_the_new_keys_has_the_files_it_always_had(tmp_path, notes):
    train(tmp_path / "run", seed=1)
    text = (tmp_path / "run" / "config.toml").read_text()
    assert text[text.index("[train]") : text.index("[privacy]")] == (
        '[train]\nepochs = 2.0\nbatch_size = 6\nlearning_rate = 0.1\nmomentum = 0.9\noptimizer = "sgd"\nseed = 1\n'
        'physical_batch = 480\ndevice = "cpu"\n\n'
    )
    header = set(read_model(tmp_path / "run" / "model.safetensors")[1])
    assert header == {"method", "dataset", "config_sha256", "epsilon", "delta", "privacy", "statement", "ledger_head",
                      "ledger_sha256", "format", "input_shape", "classes", "model_class", "model_logits", "test_images_sha256"}  # fmt: skip
    model = fresh()  # the loop as it was: PyTorch's SGD, nothing else
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for gradient in notes.gradients:
        parts = gradient.split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter).float()
        optimizer.step()
    tensors = read_model(tmp_path / "run" / "model.safetensors")[0]
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())


def test_every_key_belongs_to_one_section_and_python_knows_all_of_them():
    apart = ("head", "search")  # a table of its own; written by dpcert tune only
    kinds = [Settings.model_fields[section].annotation for section in Settings.model_fields if section not in apart]
    assert len(SECTION_OF) == sum(len(kind.model_fields) for kind in kinds)
    for key, section in SECTION_OF.items():
        default = getattr(getattr(Settings(), section), key)
        assert getattr(getattr(Settings.of(**{key: default}), section), key) == default
        if key in (explicit := inspect.signature(dpcert.train).parameters):  # one default, not two
            assert explicit[key].default == default, key
    assert Config(train=TrainConfig(epochs=1)).settings().train.epochs == 1
    assert {
        "train.physical_batch",
        "train.device",
        "train.threads",
        "gradients.engine",
        "gradients.checkpointing",
    } == SPEED_KEYS


def test_a_key_that_does_not_exist_is_a_clear_value_error(tmp_path):
    with pytest.raises(ValueError, match=r"'shedule' is unknown; did you mean schedule\?"):
        train(tmp_path / "run", shedule="cosine")
    assert not (tmp_path / "run").exists()


def test_what_a_run_uses_is_stated_in_its_config_and_read_back(tmp_path):
    keys = {"optimizer": "adamw", "schedule": "cosine", "warmup": 0.25, "averaging": "ema"}
    train(tmp_path / "run", **keys)
    config = parse_config(read_toml(tmp_path / "run" / "config.toml"), "")
    assert {key: getattr(config.train, key) for key in keys} == keys
    assert (config.train.ema_decay, config.train.weight_decay, config.train.tail) == (0.999, 0.01, None)
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "ema_decay = 0.999" in text and "weight_decay = 0.01" in text and config.to_toml() == text
    with pytest.raises(ValueError, match="train.averaging: ema -> tail"):
        train(tmp_path / "run", **{**keys, "averaging": "tail"})


BAD = [
    ({"schedule": "foo"}, "train.schedule is 'foo'", "'constant', 'linear' or 'cosine'"),
    ({"schedule": 3}, "train.schedule is 3", "string"),
    ({"optimizer": "lion"}, "train.optimizer is 'lion'", "'sgd', 'adam' or 'adamw'"),
    ({"averaging": "mean"}, "train.averaging is 'mean'", "'none', 'ema' or 'tail'"),
    ({"warmup": 1.5}, "train.warmup is 1.5", "less than or equal to 1"),
    ({"warmup": -0.1}, "train.warmup is -0.1", "greater than or equal to 0"),
    ({"warmup": math.nan}, "train.warmup is nan", "less than or equal to 1"),
    ({"averaging": "ema", "ema_decay": 1.5}, "train.ema_decay is 1.5", "less than 1"),
    ({"averaging": "ema", "ema_decay": 0.0}, "train.ema_decay is 0.0", "greater than 0"),
    ({"averaging": "tail", "tail": 0}, "train.tail is 0", "greater than 0"),
    ({"averaging": "tail", "tail": 1.01}, "train.tail is 1.01", "less than or equal to 1"),
    ({"optimizer": "adamw", "weight_decay": -1.0}, "train.weight_decay is -1.0", "greater than or equal to 0"),
    ({"weight_decay": 0.1}, "train.weight_decay is 0.1", "only optimizer = adamw uses it, and optimizer is sgd; leave it out"),
    ({"ema_decay": 0.9}, "train.ema_decay is 0.9", "only averaging = ema uses it, and averaging is none; leave it out"),
    ({"averaging": "ema", "tail": 0.5}, "train.tail is 0.5", "only averaging = tail uses it, and averaging is ema"),
]


@pytest.mark.parametrize(("keys", "what", "remedy"), BAD, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_one_line_and_nothing_is_written(tmp_path, capsys, keys, what, remedy):
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", **keys)
    assert what in str(caught.value) and remedy in str(caught.value)
    with pytest.raises(ConfigError):
        train(**keys)  # in memory, too
    np.savez(tmp_path / "blobs.npz", **blobs(0))
    assignments = [f"data.path={tmp_path / 'blobs.npz'}", *(f"train.{key}={value}" for key, value in keys.items())]
    with pytest.raises(SystemExit) as stop:
        main(["train", *(word for text in assignments for word in ("--set", text)), "--out", str(tmp_path / "run")])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert what in captured.err and remedy in captured.err and not (tmp_path / "run").exists()


def test_a_new_optimizer_and_a_new_schedule_are_one_line_of_their_tables(tmp_path, monkeypatch):
    """What docs/adr/0012 promises: file, ``--set`` and Python know a name as soon as its table does."""
    with pytest.raises(ConfigError):
        resolve(None, {"train.optimizer": "rmsprop"})

    def rmsprop(parameters, keys):
        return torch.optim.RMSprop(parameters, lr=keys.learning_rate)

    monkeypatch.setitem(optimizers.OPTIMIZERS, "rmsprop", rmsprop)
    monkeypatch.setitem(schedules.SCHEDULES, "sqrt", lambda progress: math.sqrt(1.0 - progress))
    keys = {"optimizer": "rmsprop", "schedule": "sqrt"}
    run = train(tmp_path / "run", **keys)
    assert torch.equal(weights(run.model), weights(train(**keys).model)) and run.plan.steps == STEPS
    stored = parse_config(read_toml(tmp_path / "run" / "config.toml"), "")
    assert stored.train.optimizer == resolve(None, {"train.optimizer": "rmsprop"}).train.optimizer == "rmsprop"
    assert files(tmp_path / "run")["ledger.jsonl"] and DATA.size == 24 and METHOD.name == "dp-gaussian"
