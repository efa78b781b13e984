"""The larger small models, their settings, and the backbone whose head sees several stages."""

import pytest
import torch
from torch import nn

import dpcert
from dpcert.errors import ConfigError, ModelError
from dpcert.gradients.engine import trainable
from dpcert.models.registry import build_model
from dpcert.models.resnet import stages_of
from dpcert.models.spec import public_weights_of
from dpcert.models.weights import read_weights
from dpcert.runs.resolve import resolve


def parameters(model):
    return sum(parameter.numel() for parameter in trainable(model).values())


def test_the_papers_model_is_the_same_with_and_without_the_settings():
    plain, spelled = build_model("cnn", seed=3), build_model("cnn", seed=3, width=1, pool="max", norm="none")
    assert parameters(plain) == 26_010 and [type(a) for a in plain] == [type(b) for b in spelled]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), spelled.parameters(), strict=True))
    assert "width" not in resolve("mnist/dp-gaussian", {}).to_toml()


@pytest.mark.parametrize(
    ("name", "settings", "count"),
    [
        ("cnn", {"width": 2}, 101_162),
        ("cnn", {"norm": "group"}, 26_106),
        ("cnn", {"norm": "plain", "pool": "average"}, 26_010),
        ("cnn", {"blur": 1.0, "input_scale": 0.5}, 26_010),
        ("lenet", {}, 431_220),
        ("lenet", {"norm": "none"}, 431_080),
    ],
)
def test_every_setting_builds_a_model_that_trains_and_certifies(name, settings, count):
    model = build_model(name, seed=0, **settings)
    assert parameters(model) == count
    x = torch.rand(3, 1, 28, 28)
    assert model(x).shape == (3, 10)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5), "rows are independent"
    certificates = dpcert.certify(model, x, torch.zeros(3, dtype=torch.long), sigma=0.5, n0=10, n=100, alpha=0.01)
    assert len(certificates.radius) == 3


def test_the_front_end_is_a_fixed_low_pass_filter():
    front = build_model("cnn", blur=1.5, input_scale=0.25)[0]
    assert isinstance(front, nn.Conv2d) and not front.weight.requires_grad
    flat = front(torch.ones(1, 1, 28, 28))
    assert torch.allclose(flat[0, 0, 10:-10, 10:-10], torch.tensor(0.25), atol=1e-6), "a constant image is scaled only"
    noise = torch.randn(1, 1, 64, 64)
    assert front(noise).std() < 0.1 * 0.25 * 4 * noise.std(), "noise is averaged"
    scaled = build_model("cnn", input_scale=0.5)[0]
    assert torch.equal(scaled(noise), 0.5 * noise)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("linear", {"width": 2}, "model.width is set, but model linear has no such setting"),
        ("cnn", {"input_size": 32}, "model.input_size is set, but model cnn has no such setting"),
        ("cnn", {"stages": "2,3"}, "model.stages is set, but model cnn has no such setting"),
        ("cnn", {"width": 0}, "model.width is 0"),
        ("cnn", {"pool": "median"}, "model.pool 'median' is unknown"),
        ("cnn", {"norm": "batch"}, "model.norm 'batch' is unknown"),
        ("cnn", {"blur": -1.0}, "model.blur is -1.0"),
        ("cnn", {"input_scale": 0.0}, "model.input_scale is 0.0"),
        ("resnet-48", {"stages": "4", "input_shape": (3, 32, 32)}, "model.stages is '4'"),
        ("resnet-48", {"stages": "3,2", "input_shape": (3, 32, 32)}, "must be 3, 2,3 or 1,2,3"),
        ("resnet-48", {"stages": "2", "input_shape": (3, 32, 32)}, "with the last one"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line(name, settings, match):
    with pytest.raises(ModelError, match=match) as caught:
        build_model(name, **settings)
    assert "\n" not in str(caught.value)


def test_config_files_check_the_settings_too():
    with pytest.raises(ConfigError, match=r"model.width is 99"):
        resolve("mnist/dp-gaussian", {"model.width": 99})
    config = resolve("mnist/dp-gaussian", {"model.width": 2, "model.pool": "average"})
    assert config.model_spec().settings == {"width": 2, "pool": "average"}


def test_the_head_of_the_backbone_may_see_two_stages():
    plain, both = (
        build_model("resnet-48", input_shape=(3, 32, 32), weights="resnet-48", train="head", **more)
        for more in ({}, {"stages": "2,3"})
    )
    x = torch.rand(4, 3, 32, 32)
    assert (plain.head.in_features, both.head.in_features) == (192, 288) and stages_of("1, 2, 3") == (1, 2, 3)
    features = both.standardize(both.features(x))
    assert torch.equal(features[:, 96:], plain.standardize(plain.features(x))), "the last stage is as before"
    assert 0.1 < features[:, :96].std() < 10.0 and list(trainable(both)) == ["head.weight", "head.bias"]
    facts = public_weights_of(both).facts
    assert facts["sha256"] == read_weights("resnet-48").sha256 and "statistics of stages 2, 3: SHA-256" in facts["name"]
    assert facts["data"] == public_weights_of(plain).facts["data"]


def test_other_weights_have_no_statistics_of_other_stages(tmp_path):
    from importlib import resources

    copy = tmp_path / "mine.safetensors"
    copy.write_bytes(resources.files("dpcert.models").joinpath("pretrained/resnet-48.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"which mine.safetensors has for its last stage only"):
        build_model("resnet-48", input_shape=(3, 32, 32), weights=str(copy), stages="2,3")
