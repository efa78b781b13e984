"""`open_run`: own RGB data and an own residual model through every command, and the same from Python."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcert
from dpcert.cli import main
from dpcert.errors import DataError, DpcertWarning, ModelError, RunError
from dpcert.models.factory import import_factory
from dpcert.privacy.ledger import ASSUMED_INDEPENDENT, Ledger
from dpcert.runs import identity
from dpcert.runs import open as opening
from dpcert.store.runs import RunDirectory
from dpcert.training import provenance
from tests.runs import own_models

FACTORY = "tests.runs.own_models:residual"
SMALL = ("data.classes=5", "data.size=120", "train.batch_size=40", "train.epochs=2", "train.learning_rate=0.3")
ROOT = Path(__file__).parents[2]


def arrays(seed=0, classes=5, side=16, channels=3):
    """A coloured stripe for each class."""
    draw = np.random.default_rng(seed)
    made = {}
    for part, count in (("train", 120), ("test", 30)):
        labels = np.arange(count) % classes
        images = draw.integers(0, 90, (count, channels, side, side))
        for image, label in zip(images, labels, strict=True):
            image[label % channels, 2 * label : 2 * label + 3] += 150
        made |= {f"x_{part}": images.astype(np.uint8), f"y_{part}": labels}
    return made


def call(*words):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of an own model on own data, made on the command line."""
    folder = tmp_path_factory.mktemp("own")
    np.savez(folder / "own.npz", **arrays())
    settings = [word for text in SMALL for word in ("--set", text)]
    run = folder / "run"
    assert call("train", "--model", FACTORY, "--data", folder / "own.npz", *settings, "--seed", 1, "--out", run) == 0
    return run, folder / "own.npz"


def test_every_command_takes_an_own_model_and_own_data(trained, tmp_path, capsys):
    run, data = trained
    np.save(tmp_path / "image.npy", arrays()["x_test"][0])
    own = ("--model", FACTORY)
    assert call("certify", run, *own, "--n", 60, "--examples", 10) == 0
    assert call("certify", run, *own, "--n", 60, "--examples", 10, "--radius", 0.1, "--data", data) == 0
    assert call("predict", run, tmp_path / "image.npy", *own, "--n", 60) == 0
    assert call("analyze", run, *own, "--data", data, "--examples", 4) == 0
    assert call("attack", run, *own, "--examples", 6, "--strengths", "0.1") == 0
    assert call("report", run, "--html", tmp_path / "page.html", "--data", data) == 0
    assert call("export", run, tmp_path / "bundle.zip") == 0
    assert call("verify", run) == 0 and call("verify", tmp_path / "bundle.zip") == 0
    assert "<img" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "error" not in capsys.readouterr().err


def test_the_same_from_python(tmp_path):
    data = dpcert.Dataset(**arrays(1), size=120, classes=5)
    model = own_models.Residual((3, 16, 16), 5)
    settings = {"epochs": 2, "batch_size": 40, "learning_rate": 0.3}
    trained = dpcert.train(model, data, dpcert.method("dp-gaussian", sigma=0.5), out=tmp_path / "run", seed=0, **settings)
    for given in (own_models.Residual((3, 16, 16), 5), own_models.residual):
        run = dpcert.open_run(tmp_path / "run", model=given, data=data)
        assert run.epsilon == trained.epsilon and str(run.statement) == str(trained.statement)
        assert run.input_shape == (3, 16, 16) and run.classes == 5 and run.config.model.name == "Residual"
        for name, value in trained.model.state_dict().items():
            assert torch.equal(run.model.state_dict()[name], value)
    certificates = run.certify(examples=10, n=60)
    assert len(certificates.radius) == 10 and certificates.sigma == 0.5
    assert run.predict(data.x_test[:3], n=60).shape == (3,)
    assert len(run.analyze(examples=4).rows) == 4 and run.attack(strengths=(0.1,), examples=6).rows
    assert run.report(tmp_path / "page.html").read_text(encoding="utf-8").count("<img") > 0
    assert len(run.certify(examples=5, n=60).radius) == 10  # the larger set is kept


def test_a_named_model_and_data_set_need_neither():
    run = dpcert.open_run(ROOT / "results" / "mnist-dp-gaussian")
    assert run.input_shape == (1, 28, 28) and run.classes == 10 and run.epsilon < 3
    assert run.predict(run.data.x_test[:2], n=200).tolist() == [7, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.runs.own_models", "must be package.module:factory"),
        ("no.such.module:factory", "module 'no' was not found"),
        ("tests.runs.own_models:nothing", "no attribute 'nothing'"),
        ("tests.runs.own_models:not_callable", "is a int, must be a function"),
    ],
)
def test_a_factory_that_is_not_there(name, words):
    with pytest.raises(ModelError, match=words) as caught:
        import_factory(name)
    assert "\n" not in str(caught.value)


def test_a_module_that_raises_when_imported(tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("raise SystemError('broken\\nmodule')\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(ModelError, match="the import failed: SystemError: broken module"):
        import_factory("raises_at_import:factory")
    assert sys.path == before


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("raising", "failed: RuntimeError: no such luck second line"),
        ("not_a_module", "returned a str, must return an nn.Module"),
        ("wider", "does not fit the model"),
        ("impostor", "computes other logits"),
    ],
)
def test_a_factory_of_another_model_is_refused_in_one_line(factory, words, trained, capsys):
    run, _ = trained
    before = sorted(path.name for path in run.iterdir())
    assert call("certify", run, "--model", f"tests.runs.own_models:{factory}", "--n", 60, "--examples", 4) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and error.startswith("error: ") and "\n" not in error
    assert sorted(path.name for path in run.iterdir()) == before


def test_the_same_tensors_in_another_function_slip_past_who_looks_at_shapes_only(trained, monkeypatch):
    """The broken twin: without the recorded logits a tanh passes for a ReLU, and its certificates would be another model's."""
    monkeypatch.setattr(opening, "require_same_model", lambda *arguments: None)
    assert dpcert.open_run(trained[0], model=own_models.impostor).model.activation is torch.tanh


def test_nothing_in_a_file_causes_an_import(trained, tmp_path, capsys):
    """The config names the factory; only --model imports it."""
    run, _ = trained
    assert call("certify", run, "--n", 60, "--examples", 4) == 2
    assert f"--model {FACTORY}" in capsys.readouterr().err
    assert call("train", run / "config.toml", "--out", tmp_path / "new") == 2
    assert f"--model {FACTORY}" in capsys.readouterr().err
    text = (run / "config.toml").read_text().replace(FACTORY, "antigravity:fly")
    (tmp_path / "other.toml").write_text(text)
    code = (
        "import sys; from dpcert.cli import main\n"
        "try:\n"
        f"    main(['train', {str(tmp_path / 'other.toml')!r}, '--out', {str(tmp_path / 'new')!r}])\n"
        "except SystemExit as stop:\n"
        "    sys.exit(stop.code != 2 or 'antigravity' in sys.modules)\n"
        "sys.exit(1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
    assert not (tmp_path / "new").exists()


def test_the_hint_to_resume_names_the_model(trained):
    assert f"--model {FACTORY}" in RunDirectory(trained[0]).command_to_resume


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"side": 20}, "is 20 x 20, the model takes 16 x 16"),
        ({"channels": 1}, "has 1 channel, the model takes 3"),
        ({"seed": 7}, "the test images are not those of"),
    ],
)
def test_other_data_are_refused_in_one_line(changes, words, trained, tmp_path, capsys):
    run, _ = trained
    np.savez(tmp_path / "other.npz", **arrays(**changes))
    for command in (("certify", run, "--n", 60), ("analyze", run), ("attack", run)):
        assert call(*command, "--model", FACTORY, "--data", tmp_path / "other.npz", "--examples", 4) == 2
        error = capsys.readouterr().err.strip()
        assert words in error and "\n" not in error


def test_more_classes_than_the_model_knows(trained, tmp_path):
    np.savez(tmp_path / "six.npz", **arrays(classes=6))
    config = dpcert.open_run(trained[0], model=own_models.residual).config
    assert config.data.classes == 5
    with pytest.raises(DataError, match="labels must be in 0..4"):
        _ = dpcert.open_run(trained[0], model=own_models.residual, data=tmp_path / "six.npz").data


def test_data_given_in_python_are_asked_for(tmp_path, capsys):
    data = dpcert.Dataset(**arrays(2), size=120, classes=5)
    dpcert.train("linear", data, "dp-gaussian", epochs=1, batch_size=40, out=tmp_path / "run")
    assert call("certify", tmp_path / "run", "--n", 60, "--examples", 4) == 2
    assert "pass it again: --data FILE.npz" in capsys.readouterr().err
    np.savez(tmp_path / "same.npz", **arrays(2))
    assert call("certify", tmp_path / "run", "--n", 60, "--examples", 4, "--data", tmp_path / "same.npz") == 0


def test_what_is_not_a_model_is_refused(trained):
    with pytest.raises(ModelError, match="must be an nn.Module or a function"):
        dpcert.open_run(trained[0], model=3)
    with pytest.raises(RunError, match="is not a run directory"):
        dpcert.open_run(trained[0] / "nothing")


def test_an_opened_model_that_is_trained_further_is_charged_for_both(trained, monkeypatch):
    """In another process nothing is known of the records: they may be the same, so both trainings are charged."""
    monkeypatch.setattr(provenance, "_SEEN_BY_TENSOR", {})
    run = dpcert.open_run(trained[0], model=own_models.residual)
    data = dpcert.Dataset(**arrays(5), size=120, classes=5)
    with pytest.warns(DpcertWarning, match="already been trained on these records"):
        again = dpcert.train(run.model, data, "dp-gaussian", epochs=1, batch_size=40)
    assert again.epsilon > run.epsilon
    alone = dpcert.train(own_models.residual((3, 16, 16), 5), data, "dp-gaussian", epochs=1, batch_size=40)
    assert alone.epsilon < again.epsilon


def test_a_module_that_was_refused_is_still_known_to_have_the_weights(trained, monkeypatch):
    monkeypatch.setattr(provenance, "_SEEN_BY_TENSOR", {})
    module = own_models.Impostor((3, 16, 16), 5)
    with pytest.raises(RunError, match="computes other logits"):
        dpcert.open_run(trained[0], model=module)
    data = dpcert.Dataset(**arrays(5), size=120, classes=5)
    with pytest.warns(DpcertWarning, match="already been trained on these records"):
        dpcert.train(module, data, "dp-gaussian", epochs=1, batch_size=40)


def test_constant_weights_of_an_opened_run_are_not_taken_for_known_ones(trained):
    module = own_models.Residual((3, 16, 16), 5)
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    provenance.remember_loaded(module, Ledger.load(trained[0] / "ledger.jsonl"))
    assert provenance.initial_facts(module, torch.rand(4, 3, 16, 16))["initial_weights"] != ASSUMED_INDEPENDENT


def test_the_probe_is_of_the_trained_weights(trained):
    """And not of the initial ones: it would then recognize any fresh model of the class."""
    run = dpcert.open_run(trained[0], model=own_models.residual)
    with torch.no_grad():
        run.model.head.bias.add_(1.0)
    with pytest.raises(RunError, match="computes other logits"):
        identity.require_same_model(run.model, run.input_shape, run._facts, "it")


def test_a_diverged_model_is_written_and_opened(tmp_path):
    """Its logits are NaN. The budget is spent: the model file must be written whatever it holds."""
    data = dpcert.Dataset(**arrays(3), size=120, classes=5)
    keys = {"epochs": 2, "batch_size": 40, "learning_rate": 1e6, "clip_norm": 1e6, "out": tmp_path / "run"}
    dpcert.train(Overflowing((3, 16, 16), 5), data, "dpsgd", **keys)
    run = dpcert.open_run(tmp_path / "run", model=Overflowing, data=data)
    assert "nan" in run._facts["model_logits"]
    with pytest.raises(RunError, match="computes other logits"):
        dpcert.open_run(tmp_path / "run", model=own_models.Residual, data=data)


class Overflowing(own_models.Residual):
    """Takes any weights, and answers NaN as soon as they have moved."""

    def forward(self, x):
        return super().forward(x) * torch.where(self.head.bias.abs().max() > 10.0, float("nan"), 1.0)


def test_opening_leaves_the_modes_of_the_layers_alone(tmp_path):
    class Frozen(torch.nn.Sequential):
        def __init__(self, shape, classes):
            super().__init__(torch.nn.BatchNorm2d(3).eval(), torch.nn.Flatten(), torch.nn.Linear(3 * 256, classes))

    data = dpcert.Dataset(**arrays(4), size=120, classes=5)
    model = Frozen((3, 16, 16), 5)
    dpcert.train(model, data, "dpsgd", epochs=1, batch_size=40, out=tmp_path / "run")
    assert model.training and not model[0].training
    opened = dpcert.open_run(tmp_path / "run", model=Frozen((3, 16, 16), 5)).model
    assert opened.training and not opened[0].training


def test_another_built_in_model_than_the_runs_is_refused(capsys, tmp_path):
    run = ROOT / "results" / "mnist-dp-gaussian"
    np.save(tmp_path / "image.npy", np.zeros((28, 28), dtype=np.float32))
    for command in (("predict", run, tmp_path / "image.npy"), ("attack", run)):
        assert call(*command, "--model", "linear") == 2
        assert "was trained with 'cnn'; leave --model out" in capsys.readouterr().err


def test_a_factory_that_imports_from_the_current_folder_when_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "late_layers.py").write_text("from torch import nn\n\ndef head(n):\n    return nn.Linear(4, n)\n")
    text = "def factory(shape, classes):\n    from late_layers import head\n    return head(classes)\n"
    (tmp_path / "late_model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert import_factory("late_model:factory")((1, 2, 2), 3).out_features == 3
