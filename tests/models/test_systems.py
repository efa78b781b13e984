"""Models of the prior systems: noise worth sigma, weights r that use no record, and what is refused."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import dpcert
from dpcert.data.fingerprint import digests, sketch
from dpcert.errors import ConfigError, DataError, ModelError
from dpcert.models.noisy import NoisyModel
from dpcert.models.registry import build_model
from dpcert.models.systems import as_system, vulnerabilities
from dpcert.operator_norm import operator_norm
from dpcert.privacy.clipping import CLIP_RULES
from dpcert.privacy.unbounded import UNBOUNDED
from dpcert.row_proof import reason_for_no_proof
from dpcert.runs.resolve import resolve

SHAPE = (1, 28, 28)


def build(**keys):
    return build_model("cnn", seed=0, **keys)


@pytest.mark.parametrize("system", ["pixeldp", "securesgd", "stobatch"])
@pytest.mark.parametrize("sigma", [0.25, 0.5])
def test_the_noise_is_worth_sigma_at_the_input(system, sigma):
    model = build(system=system, noise=sigma)
    assert isinstance(model, NoisyModel)
    votes = model.folded()
    inner = 1.0 / float(operator_norm(votes.first, SHAPE, votes.scales).detach())
    assert (inner**2 + float(model.input_scale) ** 2) ** 0.5 == pytest.approx(sigma, rel=1e-4)


@pytest.mark.parametrize("system", ["pixeldp", "securesgd", "stobatch"])
def test_a_maximum_over_noisy_values_becomes_a_mean(system):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(4 * 25 * 25, 3))
    pools = [layer for layer in as_system(system, network, SHAPE, 0.5).rest if isinstance(layer, (nn.MaxPool2d, nn.AvgPool2d))]
    assert [(type(pool), pool.kernel_size, pool.stride) for pool in pools] == [(nn.AvgPool2d, 2, 1)]


@pytest.mark.parametrize("system", ["pixeldp", "securesgd", "stobatch"])
def test_a_pretrained_stem_keeps_its_function_and_gets_noise_worth_sigma(system):
    shape, x = (3, 32, 32), torch.rand(3, 3, 32, 32)
    plain = build_model("resnet-32", input_shape=shape, seed=0)
    model = as_system(system, plain, shape, 0.25)
    inner = 1.0 / float(operator_norm(model.first, shape, model.scales).detach())
    assert (inner**2 + float(model.input_scale) ** 2) ** 0.5 == pytest.approx(0.25, rel=1e-4)
    if system != "stobatch":  # which clips the hidden values
        assert torch.allclose(model(x), plain(x), atol=1e-4)


def test_the_weights_of_securesgd_are_positive_and_depend_on_the_initial_weights_only():
    first, again, other = (build_model("cnn", seed=seed, system="pixeldp", noise=0.5) for seed in (0, 0, 1))
    r = vulnerabilities(first)
    assert float(r.sum()) == pytest.approx(1.0) and float(r.min()) >= 0.1 / len(r)
    assert torch.equal(r, vulnerabilities(again)) and not torch.equal(r, vulnerabilities(other))
    assert float(build(system="securesgd", noise=0.5).scales.square().mean()) == pytest.approx(0.25, rel=1e-5)


def test_uniform_weights_are_pixeldp():
    a, b = build(system="securesgd", noise=0.5, noise_weights="uniform"), build(system="pixeldp", noise=0.5)
    x = torch.rand(2, a.image_size + a.noise_size)
    assert torch.allclose(a(x), b(x), atol=1e-6)


R = [1.0 / 16] * 16
BAD = {
    "not positive": ({"system": "securesgd", "noise_weights": [0.0, 2 / 16, *R[2:]]}, "positive"),
    "negative": ({"system": "securesgd", "noise_weights": [-1 / 16, 3 / 16, *R[2:]]}, "positive"),
    "not a number": ({"system": "securesgd", "noise_weights": [float("nan"), *R[1:]]}, "positive"),
    "another sum": ({"system": "securesgd", "noise_weights": [0.5, *R[1:]]}, "sum to"),
    "too few": ({"system": "securesgd", "noise_weights": [0.5, 0.5]}, "16 channels"),
    "private": ({"system": "securesgd", "noise_weights": "private"}, "no ledger charges"),
    "unknown source": ({"system": "securesgd", "noise_weights": "gradients"}, "noise_weights"),
    "of another system": ({"system": "pixeldp", "noise_weights": "uniform"}, "only system securesgd"),
    "unknown system": ({"system": "randomized"}, "model.system"),
    "noise without a system": ({"noise": 0.5}, "model.system"),
    "random classifier": ({"system": "denoiser"}, "public weights"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case):
    keys, word = BAD[case]
    with pytest.raises((ModelError, ConfigError), match=word) as caught:
        build(**keys)
    assert "\n" not in str(caught.value)


def test_a_model_whose_first_layer_is_not_linear_is_refused():
    with pytest.raises(ModelError, match="first layer"):
        as_system("pixeldp", nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(784, 10)), SHAPE, 0.5)


@pytest.mark.parametrize("name", ["pixeldp", "stobatch", "securesgd-as-published"])
def test_a_method_with_noise_inside_refuses_a_model_without(name):
    x, labels = torch.rand(8, *SHAPE), torch.arange(8) % 2
    data = dpcert.Dataset(x_train=x, y_train=labels, x_test=x, y_test=labels, classes=2)
    with pytest.raises(ModelError, match=r"set model\.system"):
        dpcert.train(build(classes=2), data, dpcert.method(name), epochs=1, batch_size=4)


def test_a_classifier_that_was_trained_on_the_private_images_is_refused(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (30, 1, 28, 28), dtype=np.uint8)
    tensors = build_model("feature-cnn", seed=0).state_dict()
    facts = {"dpcert_card": json.dumps({"data": "the same images"}), "data_sketch": json.dumps(sketch(digests(images)))}
    path = tmp_path / "own.safetensors"
    path.write_bytes(safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}, metadata=facts))
    model = build_model("feature-cnn", weights=str(path), system="denoiser", train="denoiser.*,head", seed=0)
    x, labels = torch.from_numpy(images).float() / 255.0, torch.arange(30) % 10
    data = dpcert.Dataset(x_train=x, y_train=labels, x_test=x[:10], y_test=labels[:10], classes=10)
    with pytest.raises(DataError, match="pretrained on images of"):
        dpcert.train(model, data, dpcert.method("dp-denoiser"), epochs=1, batch_size=4)


def test_the_packaged_classifier_is_small_named_and_frozen():
    model = build_model("feature-cnn", weights="fashion-cnn", system="denoiser", train="denoiser.*,head", seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(name.startswith(("denoiser.", "classifier.head.")) for name in trained)
    x = torch.rand(2, *SHAPE)
    assert torch.allclose(model(x), model.classifier(x))  # a new denoiser is the identity


@pytest.mark.parametrize("family", ["mnist", "cifar10"])
@pytest.mark.parametrize(
    "name", ["pixeldp", "securesgd", "dp-denoiser", "stobatch", "securesgd-as-published", "stobatch-as-published"]
)
def test_every_preset_names_its_system(family, name):
    config = resolve(f"{family}/{name}", {"method.sigma": 0.25})
    assert config.build_method().name == name and config.model_spec().noise == 0.25
    assert config.model.system == dpcert.methods.PRIOR[name].system


def test_every_rule_without_a_guarantee_has_a_reason():
    assert set(UNBOUNDED) < set(CLIP_RULES) and {"flat", "psac", "automatic"} == set(CLIP_RULES) - set(UNBOUNDED)


def test_the_denoiser_starts_as_the_identity_and_needs_even_sides():
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model, x = as_system("denoiser", network, (1, 8, 8), 0.5), torch.rand(2, 1, 8, 8)
    assert torch.equal(model(x), network(x)) and reason_for_no_proof(model, (1, 8, 8)) is None
    with pytest.raises(ModelError, match="7 x 8 pixels: system denoiser needs even sides"):
        as_system("denoiser", network, (1, 7, 8), 0.5)
