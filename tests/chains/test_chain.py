"""Machine code computes what PyTorch computes, for each row and each example alone, with the same bits everywhere."""

import os
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcert.chains.build import library
from dpcert.chains.chain import SOURCE, Chain, compiled_chain
from dpcert.chains.layers import layers_of
from dpcert.gradients.compiled import compiled_engine
from dpcert.gradients.engine import Clip
from dpcert.gradients.layerwise import Layerwise
from dpcert.losses import cross_entropy
from dpcert.models.registry import build_model
from dpcert.privacy.clipping import Flat
from tests.chains import needs_compiler
from tests.contracts.test_engines import clipped_by_hand, coupled_loss, one_at_a_time

CHAINS = {
    "many channels": lambda: nn.Sequential(
        nn.Conv2d(3, 20, (3, 2), stride=(2, 1), padding=(1, 2)),
        nn.ReLU(),
        nn.AvgPool2d((2, 3), stride=(1, 2)),
        nn.Tanh(),
        nn.ReLU(),
        nn.Conv2d(20, 33, 2, bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(66, 40),
        nn.Tanh(),
        nn.Linear(40, 4),
    ),
    "padding after activations": lambda: nn.Sequential(
        nn.Conv2d(3, 5, 3),
        nn.Tanh(),
        nn.Conv2d(5, 7, 3, padding=2),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(7 * 64, 4),
    ).eval(),
    "activation first": lambda: nn.Sequential(
        nn.Tanh(), nn.Identity(), nn.Sequential(nn.MaxPool2d(3, 1), nn.Conv2d(3, 16, 6)), nn.Flatten(), nn.Linear(16, 4)
    ),
    "wide": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 70), nn.ReLU(), nn.Linear(70, 4)),
}


def made(name, b=5, r=3):
    torch.manual_seed(0)
    return CHAINS[name](), torch.randn(b, r, 3, 8, 8), torch.randint(0, 4, (b,))


@needs_compiler
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("frozen", [False, True])
def test_logits_and_gradients_are_those_of_pytorch(name, frozen):
    model, views, labels = made(name)
    if frozen:
        next(model.parameters()).requires_grad_(False)
        next(reversed(list(model.parameters()))).requires_grad_(False)
    chain = compiled_chain(model, (3, 8, 8))
    rows = views.flatten(0, 1)
    torch.testing.assert_close(chain.forward(rows, chain.pack(model)), model(rows), rtol=1e-5, atol=1e-6)
    engine = compiled_engine(model, (3, 8, 8), None)
    found, clip = engine(model, coupled_loss, views, labels, Clip(Flat(), 0.1)), Clip(Flat(), 0.1)
    expected = one_at_a_time(model, coupled_loss, views, labels)
    torch.testing.assert_close(found.norms, expected.double().norm(dim=1), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(found.value, clipped_by_hand(expected, clip), rtol=1e-4, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("name", ["many channels", "wide"])
def test_a_row_has_the_same_bits_in_every_batch_and_place(name):
    """Isolation holds to the bit, whatever the number of rows: nothing has to be measured for it."""
    model, views, labels = made(name, b=13)
    engine = compiled_engine(model, (3, 8, 8), None)

    def gradients(some):
        found = engine.per_example(model, cross_entropy, views[some], labels[some])
        return torch.cat([part.instantiate() for part in found.values()], dim=1)

    whole = gradients(list(range(13)))
    for some in ([4], [12, 4], [0, 1, 2, 4], list(range(12, -1, -1))):
        assert torch.equal(gradients(some), whole[some])
    chain = compiled_chain(model, (3, 8, 8))
    rows, weights = views.flatten(0, 1), chain.pack(model)
    logits = chain.forward(rows, weights)
    for some in ([7], [3, 7, 1], list(range(38, -1, -1))):
        assert torch.equal(chain.forward(rows[some], weights), logits[some])
        assert torch.equal(chain.forward(rows[some], weights, chain.work(len(some))), logits[some])


@needs_compiler
def test_shifted_and_channels_last_rows():
    model, views, _ = made("many channels")
    chain, rows = compiled_chain(model, (3, 8, 8)), views.flatten(0, 1)
    weights, shift = chain.pack(model), torch.randn(1, 3, 8, 8)
    expected = chain.forward(rows + shift, weights)
    assert torch.equal(chain.forward(rows, weights, shift=shift), expected)
    last = [tensor.movedim(1, -1).contiguous() for tensor in (rows, shift)]
    assert torch.equal(chain.forward(last[0], weights, shift=last[1], last=True), expected)


@needs_compiler
def test_tanh_is_as_accurate_as_float32_allows():
    model = nn.Sequential(nn.Flatten(), nn.Tanh())
    x = torch.cat([torch.linspace(-12, 12, 4000), torch.logspace(-30, 1, 4000), torch.tensor([0.0, 1e30, -1e30, torch.inf])])
    found = compiled_chain(model, (1,)).forward(x[:, None], torch.zeros(0))[:, 0]
    exact = torch.tanh(x.double())
    assert float(((found - exact).abs() / exact.abs().clamp(min=1e-30)).max()) < 4 * 2.0**-24
    assert torch.isnan(compiled_chain(model, (1,)).forward(torch.tensor([[torch.nan]]), torch.zeros(0))).all()


@needs_compiler
def test_the_first_of_equal_values_in_a_pool_gets_the_gradient():
    """As in PyTorch: images with constant areas are full of ties."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(18, 4))
    views, labels = torch.ones(2, 1, 1, 4, 4), torch.tensor([0, 1])
    found = compiled_engine(model, (1, 4, 4), None)(model, cross_entropy, views, labels, Clip(Flat(), 1e3))
    expected = clipped_by_hand(one_at_a_time(model, cross_entropy, views, labels), Clip(Flat(), 1e3))
    torch.testing.assert_close(found.value, expected, rtol=1e-5, atol=1e-6)


@needs_compiler
def test_norm_and_sum_are_float64_of_the_same_numbers():
    model, views, labels = made("wide", b=9)
    engine, clip = compiled_engine(model, (3, 8, 8), None), Clip(Flat(), 0.1)
    rows = torch.cat([p.instantiate() for p in engine.per_example(model, coupled_loss, views, labels).values()], dim=1).double()
    found = engine(model, coupled_loss, views, labels, clip)
    torch.testing.assert_close(found.norms, rows.norm(dim=1), rtol=1e-14, atol=0)
    torch.testing.assert_close(found.value, clip.factors(found.norms) @ rows, rtol=1e-13, atol=1e-17)


@needs_compiler
def test_many_examples_are_summed_in_order_whatever_fits_at_a_time(monkeypatch):
    model, views, labels = made("wide", b=11)
    engine, clip = compiled_engine(model, (3, 8, 8), None), Clip(Flat(), 0.1)
    whole = engine(model, cross_entropy, views, labels, clip)
    monkeypatch.setattr("dpcert.gradients.compiled._AT_ONCE", 3 * 13_800)
    found = engine(model, cross_entropy, views, labels, clip)
    assert torch.equal(found.value, whole.value) and torch.equal(found.norms, whole.norms)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs GCC")
@pytest.mark.parametrize("narrow", ["g++ -mno-avx512f", "g++ -O2"])
def test_the_bits_depend_neither_on_the_vectors_of_the_processor_nor_on_the_optimizer(narrow, monkeypatch):
    model, _, _ = made("many channels")
    layers = layers_of(model, (3, 8, 8))
    here = compiled_chain(model, (3, 8, 8)).fingerprint()
    monkeypatch.setenv("CXX", narrow)
    other = Chain(library(SOURCE, f"LAYERS={', '.join(layer.text for layer in layers)}"), layers)
    assert other.fingerprint() == here


def test_twin_a_fingerprint_sees_one_changed_operation(tmp_path):
    source = SOURCE.read_text().replace("1.0f / 720", "1.0f / 721")
    changed = tmp_path / "chain.cpp"
    changed.write_text(source)
    model, _, _ = made("many channels")
    here = compiled_chain(model, (3, 8, 8))
    if here is None:
        pytest.skip("needs a C++ compiler")
    other = Chain(library(changed, f"LAYERS={', '.join(layer.text for layer in here.layers)}"), here.layers)
    assert other.fingerprint() != here.fingerprint()


class Hooked(nn.Tanh):
    pass


def hooked():
    model = CHAINS["wide"]()
    model[2].register_forward_hook(lambda *_: None)
    return model


def shared():
    layer = nn.Linear(192, 192)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Linear(192, 4))


def tied():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 192), nn.Linear(192, 192), nn.Linear(192, 4))
    model[2].weight = model[1].weight
    return model


OTHERS = {
    "a hook": hooked,
    "a layer twice": shared,
    "tied weights": tied,
    "a subclass": lambda: nn.Sequential(nn.Flatten(), Hooked(), nn.Linear(192, 4)),
    "groups": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten(), nn.Linear(216, 4)),
    "dilation": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, dilation=2), nn.Flatten(), nn.Linear(96, 4)),
    "circular": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(384, 4)),
    "same": lambda: nn.Sequential(nn.Conv2d(3, 6, 2, padding="same"), nn.Flatten(), nn.Linear(384, 4)),
    "padded pool": lambda: nn.Sequential(nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.Linear(75, 4)),
    "ceil": lambda: nn.Sequential(nn.AvgPool2d(3, ceil_mode=True), nn.Flatten(), nn.Linear(27, 4)),
    "dilated pool": lambda: nn.Sequential(nn.MaxPool2d(2, dilation=2), nn.Flatten(), nn.Linear(27, 4)),
    "divisor": lambda: nn.Sequential(nn.AvgPool2d(2, divisor_override=3), nn.Flatten(), nn.Linear(48, 4)),
    "part of a flatten": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(64, 4), nn.Flatten(), nn.Linear(12, 4)),
    "no flatten": lambda: nn.Sequential(nn.Linear(8, 4), nn.Flatten(), nn.Linear(96, 4)),
    "images as logits": lambda: nn.Sequential(nn.Conv2d(3, 2, 7), nn.Flatten()),
    "another norm": lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(192, 4)),
    "float64": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).double(),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 4)).train(),
    "custom forward": lambda: Layered(),
}


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(192, 4)

    def forward(self, x):
        return self.fc(x.flatten(1))


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_machine_code_does_not_know_is_not_compiled(name):
    assert layers_of(OTHERS[name](), (3, 8, 8)) is None


@needs_compiler
@pytest.mark.parametrize("change", ["hook", "freeze", "mode", "shape", "dtype"])
def test_a_model_that_changes_later_goes_to_the_other_engine(change):
    model, views, labels = made("padding after activations")
    engine = compiled_engine(model, (3, 8, 8), Layerwise())
    if change == "hook":
        model[1].register_forward_hook(lambda module, args, output: 2.0 * output)
    elif change == "freeze":
        model[0].weight.requires_grad_(False)
    elif change == "mode":
        model.append(nn.Tanh())
    elif change == "shape":
        model, views = model[:2].append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten()), views[..., 1:, 1:]
        labels %= 3
    else:
        model, views = model.double(), views.double()
    found = engine(model, cross_entropy, views, labels, Clip(Flat(), 0.1))
    expected = clipped_by_hand(one_at_a_time(model, cross_entropy, views, labels), Clip(Flat(), 0.1))
    torch.testing.assert_close(found.value, expected, rtol=1e-4, atol=1e-6)


@needs_compiler
def test_the_weights_are_those_of_now():
    model, views, labels = made("wide")
    engine = compiled_engine(model, (3, 8, 8), None)
    before = engine(model, cross_entropy, views, labels, Clip(Flat(), 0.1))
    with torch.no_grad():
        model[1].weight.mul_(1.5)
    after = engine(model, cross_entropy, views, labels, Clip(Flat(), 0.1))
    expected = clipped_by_hand(one_at_a_time(model, cross_entropy, views, labels), Clip(Flat(), 0.1))
    assert not torch.equal(before.value, after.value)
    torch.testing.assert_close(after.value, expected, rtol=1e-4, atol=1e-6)


@needs_compiler
def test_the_papers_cnn_is_compiled():
    model = build_model("cnn", seed=0)
    rows = torch.rand(5, 1, 28, 28)
    chain = compiled_chain(model, (1, 28, 28))
    torch.testing.assert_close(chain.forward(rows, chain.pack(model)), model(rows), rtol=1e-5, atol=1e-6)
    assert chain.size == 26_010 and os.environ["XDG_CACHE_HOME"]
    assert F.cross_entropy(chain.forward(rows, chain.pack(model)), torch.zeros(5, dtype=torch.long)).isfinite()
