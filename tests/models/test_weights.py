"""Public weights and the parameters that train: every wrong file or pattern is one clear line, and the ledger names the rest."""

import json
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import dpcert
from dpcert.data.fingerprint import digests, sketch
from dpcert.errors import DataError, DpcertError, DpcertWarning, ModelError, RunError
from dpcert.models.parts import head_name, selected
from dpcert.models.weights import PACKAGED, parse_weights, read_weights
from dpcert.privacy.ledger import ASSUMED_INDEPENDENT
from dpcert.store.durable import sha256_hex
from dpcert.training import provenance

SHAPE = (3, 16, 16)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (60, *SHAPE), dtype=np.uint8)
LABELS = RNG.integers(0, 3, 60)


def data(images=IMAGES):
    return dpcert.Dataset(images[:40], LABELS[:40], images[40:], LABELS[40:], classes=3, size=40)


def tensors():
    model = dpcert.build_model("resnet-32", input_shape=SHAPE, classes=7, seed=1)
    return {name: value.clone() for name, value in model.state_dict().items() if value.is_floating_point()}


def file(path, content=None, card=True, images=None):
    facts = {"dpcert_card": json.dumps({"model": "resnet-32", "data": "made-up public images"})} if card else {}
    facts |= {} if images is None else {"data_sketch": json.dumps(sketch(digests(images)))}
    safetensors.torch.save_file(tensors() if content is None else content, path, metadata=facts)
    return str(path)


def build(weights, train="all", name="resnet-32", classes=3):
    return dpcert.build_model(name, input_shape=SHAPE, classes=classes, weights=weights, train=train, seed=0)


def trained(model, tmp_path=None, **keys):
    asked = {"epochs": 1, "batch_size": 20, "head": {"steps": 2, "copies": 1}} | keys
    return dpcert.train(model, data(), dpcert.method("dp-gaussian", sigma=0.25, copies=1), out=tmp_path, **asked)


def test_weights_are_loaded_and_the_head_starts_at_zero(tmp_path):
    model, given = build(file(tmp_path / "w.safetensors")), tensors()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in given.items() if not name.startswith("head."))
    assert model.head.weight.shape == (3, 128) and not model.head.weight.any() and not model.head.bias.any()
    assert not any(layer.training for layer in model.modules())


def test_statement_ledger_and_header_name_the_public_weights_and_data(tmp_path):
    source = file(tmp_path / "w.safetensors")
    run = trained(build(source, "last:2"), tmp_path / "run")
    digest = sha256_hex((tmp_path / "w.safetensors").read_bytes())
    assert run.ledger.opening["public_inputs"] == [{"name": "w.safetensors", "sha256": digest, "data": "made-up public images"}]
    assert "made-up public images" in str(run.statement) and digest[:16] in str(run.statement)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["privacy"]["public_inputs"][0]["sha256"] == digest
    opened = dpcert.open_run(tmp_path / "run")  # without the file of public weights
    (tmp_path / "w.safetensors").unlink()
    again = dpcert.open_run(tmp_path / "run")
    assert torch.equal(opened.model.head.weight, again.model.head.weight) and "made-up" in str(again.statement)


def test_an_opened_run_leaves_its_public_weights_to_other_models(tmp_path, monkeypatch):
    """The trunk is public: only what the run trained has seen records. What it trained stays charged."""
    monkeypatch.setattr(provenance, "_SEEN_BY_TENSOR", {})
    source = file(tmp_path / "w.safetensors")
    trained(build(source, "last:2"), tmp_path / "run")
    monkeypatch.setattr(provenance, "_SEEN_BY_TENSOR", {})  # as in another process
    opened = dpcert.open_run(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = trained(build(source, "last:2"))
    assert again.ledger.opening["initial_weights"] == ASSUMED_INDEPENDENT
    with pytest.warns(DpcertWarning, match="already been trained"):
        trained(opened.model)
    reused = build(source, "last:2")
    reused.stage3 = dpcert.open_run(tmp_path / "run").model.stage3
    with pytest.warns(DpcertWarning, match="already been trained"):
        trained(reused)


def test_a_file_without_a_card_is_named_as_unknown_data(tmp_path):
    run = trained(build(file(tmp_path / "w.safetensors", card=False), "head"))
    assert "not stated by the file" in str(run.statement)


def test_training_images_of_the_pretraining_are_refused(tmp_path, evidence):
    seen = build(file(tmp_path / "w.safetensors", images=IMAGES[:40]), "head")
    with pytest.raises(DataError, match="pretrained on images of the training set"):
        trained(seen)
    tested = build(file(tmp_path / "w.safetensors", images=IMAGES[40:]), "head")
    with pytest.raises(DataError, match="pretrained on images of the test set"):
        trained(tested)
    others = RNG.integers(0, 256, (50, *SHAPE), dtype=np.uint8)
    trained(build(file(tmp_path / "w.safetensors", images=others), "head"))
    evidence(
        "D16", figure="weights trained on the training or test images are refused", trials=2, twin="other images: accepted"
    )


def test_other_weights_cannot_resume_a_run(tmp_path):
    class Crash(BaseException):
        pass

    def crash(done, total, **facts):
        if done == 2:
            raise Crash

    model = build(file(tmp_path / "w.safetensors"), "last:2")
    with pytest.raises(Crash):
        trained(model, tmp_path / "run", progress=crash)
    other = tensors()
    other["stem.weight"] += 1.0
    with pytest.raises(RunError, match="other public weights"):
        trained(build(file(tmp_path / "w.safetensors", other), "last:2"), tmp_path / "run")
    trained(build(file(tmp_path / "w.safetensors"), "last:2"), tmp_path / "run")


def _nan(content):
    content["stem.weight"][0] = float("nan")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda content: content.pop("stem.weight"), "has no tensor 'stem.weight'"),
        (lambda content: content.update(extra=torch.zeros(2)), "has an unknown tensor 'extra'"),
        (lambda content: content.update({"stem.weight": torch.zeros(5, 3, 4, 4)}), "stem.weight"),
        (_nan, "NaN"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, break_it, words):
    content = tensors()
    break_it(content)
    with pytest.raises(ModelError, match=words) as refused:
        build(file(tmp_path / "w.safetensors", content))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\x80\x04pickle", b"PK\x03\x04" + bytes(100)])
def test_what_is_not_safetensors_is_refused(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a .safetensors file"):
        build(str(path))


def test_a_damaged_card_and_missing_files_are_one_line(tmp_path):
    safetensors.torch.save_file(tensors(), tmp_path / "w.safetensors", metadata={"dpcert_card": "{"})
    for source, words in ((tmp_path / "w.safetensors", "damaged model card"), (tmp_path / "no.safetensors", "cannot be read")):
        with pytest.raises(ModelError, match=words):
            build(str(source))
    for source in ("resnet-49", "weights.pth", str(tmp_path)):
        with pytest.raises(ModelError, match="must be one of"):
            build(source)


def test_weights_of_another_architecture_name_theirs(tmp_path):
    with pytest.raises(ModelError, match="model.name=resnet-32"):
        build(file(tmp_path / "w.safetensors"), name="resnet-48")


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("all", lambda name: True),
        ("head", lambda name: name.startswith("head.")),
        ("last:1", lambda name: name.startswith("head.")),
        ("last:2", lambda name: name.startswith(("head.", "stage3."))),
        ("norms", lambda name: "norm" in name or name.startswith("head.") or ".shortcut.1." in name),
        ("biases", lambda name: name.endswith("bias")or name.startswith("head.")),
        ("stage3.1.*", lambda name: name.startswith("stage3.1.")),
        ("last:2, norms", lambda name: name.startswith(("head.", "stage3.")) or "norm" in name or ".shortcut.1." in name),
    ],
)  # fmt: skip
def test_what_model_train_selects(train, expected):
    model = dpcert.build_model("resnet-32", input_shape=SHAPE, classes=3, train=train)
    chosen = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert chosen == {name for name, _ in model.named_parameters() if expected(name)} == selected(model, train)


@pytest.mark.parametrize("train", ["stage4.*", "", "last:0", "last:x", "last:-1", "heads", "head,stag3.*"])
def test_a_selection_without_parameters_is_refused(train):
    with pytest.raises(DpcertError, match="model.train"):
        dpcert.build_model("resnet-32", input_shape=SHAPE, classes=3, train=train)


def test_the_head_of_a_model_without_that_name_is_its_last_linear_layer():
    assert head_name(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))) == "3"
    with pytest.raises(ModelError, match="no linear layer"):
        head_name(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_weights_are_small_and_say_what_they_were_trained_on(name):
    weights = read_weights(name)
    model, data, shape = {
        "resnet-48": ("resnet-48", "CIFAR-100", (3, 32, 32)),
        "fashion-cnn": ("feature-cnn", "Fashion-MNIST", (1, 28, 28)),
    }[name]
    assert weights.card["model"] == model and data in weights.data and len(weights.sketch) > 100
    dpcert.build_model(model, input_shape=shape, classes=10, weights=name, train="head")


def test_a_model_that_takes_no_input_size_says_so():
    with pytest.raises(ModelError, match="input_size"):
        dpcert.build_model("resnet-32", input_shape=SHAPE, classes=3, input_size=64)


def test_the_statistics_of_other_input_sizes_are_refused(tmp_path):
    safetensors.torch.save_file(
        tensors(), tmp_path / "w.safetensors", metadata={"dpcert_card": json.dumps({"settings": {"input_size": 96}})}
    )
    parse_weights((tmp_path / "w.safetensors").read_bytes(), "w")
    with pytest.raises(ModelError, match="are for 96"):
        dpcert.build_model("resnet-32", input_shape=SHAPE, classes=3, weights=str(tmp_path / "w.safetensors"), input_size=128)
