"""Activation checkpointing: the same bits as without it, from fewer activations; refused where it cannot work."""

import itertools
import math

import pytest
import torch
from torch import nn

import dpcert
from dpcert.errors import ConfigError
from dpcert.gradients import sums
from dpcert.gradients.checkpointed import segments
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip, FirstOnly
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.traced import Traced
from dpcert.losses import cross_entropy
from dpcert.models.resnet import ResNet
from dpcert.privacy.clipping import Flat
from dpcert.row_proof import prove
from dpcert.training.settings import GradientsConfig
from tests.contracts import test_engines as engines
from tests.contracts.test_engines import coupled_loss
from tests.contracts.test_vision import Unused
from tests.contracts.vision import CLASSES, SHAPE, VISION, made

CLIP = Clip(Flat(), 0.1)


def wide_resnet():
    """Its last convolutions have more than 16,384 weights, so their gradients are formed late."""
    torch.manual_seed(0)
    return ResNet(SHAPE, CLASSES, 12).eval()


def frozen_start():
    model = wide_resnet()
    for part in (model.stem, model.stem_norm, model.stage1, model.stage2[0].norm1):
        part.requires_grad_(False)
    return model


def frozen_middle():
    model = wide_resnet()
    model.stage2.requires_grad_(False)
    return model


BACKBONES = {"wide resnet": wide_resnet, "frozen start": frozen_start, "frozen middle": frozen_middle}


def examples(b, r, shape=SHAPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(b, r, *shape, generator=generator), torch.randint(0, CLASSES, (b,), generator=generator)


def both(model, views, labels, clip=CLIP):
    engines = Layerwise(), Layerwise(checkpointing=True)
    return [engine(model, coupled_loss, views, labels, clip) for engine in engines]


def same_bits(one, other):
    return torch.equal(one.value, other.value) and torch.equal(one.norms, other.norms)


def split(model, shape=SHAPE):
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    traced = Traced(prove(model, shape), names)
    return traced, segments(traced)


@pytest.mark.parametrize("name", [*VISION, *BACKBONES])
def test_the_bits_are_those_without_checkpointing(name, monkeypatch):
    monkeypatch.setattr(sums, "_AT_ONCE", 200_000)  # a few examples at a time, not all
    model = BACKBONES[name]() if name in BACKBONES else made(name, trained=True)
    views, labels = examples(7, 2)
    assert same_bits(*both(model, views, labels))
    assert same_bits(*both(model, views, labels, FirstOnly(CLIP, 5)))


@pytest.mark.parametrize("name", ["cnn", "linear", "grouped", "frozen batch norm", "own eps", "partly frozen"])
def test_chains_have_the_same_bits_too(name):
    model, views, labels = engines.made(name, 5, 3)
    assert same_bits(*both(model, views, labels))


def test_a_record_whose_gradient_is_not_finite_contributes_nothing():
    model, (views, labels) = wide_resnet(), examples(6, 2)
    views[2] = math.nan
    plain, checkpointed = both(model, views, labels)
    assert torch.equal(plain.value, checkpointed.value) and torch.isfinite(checkpointed.value).all()
    keep = [0, 1, 3, 4, 5]
    expected = Layerwise()(model, coupled_loss, views[keep], labels[keep], CLIP)
    torch.testing.assert_close(checkpointed.value, expected.value, rtol=1e-4, atol=1e-7)


def test_sensitivity_is_at_most_the_clip_norm():
    model, (views, labels) = wide_resnet(), examples(4, 2)
    run = Layerwise(checkpointing=True)
    whole = run(model, coupled_loss, views, labels, CLIP).value
    for j in range(4):
        keep = [i for i in range(4) if i != j]
        assert float((whole - run(model, coupled_loss, views[keep], labels[keep], CLIP).value).norm()) <= 0.1


@pytest.mark.parametrize("name", ["wide resnet", "frozen start"])
def test_segments_cover_the_trace_and_share_no_parameter(name):
    model = BACKBONES[name]()
    traced, found = split(model)
    calls = [node for node in traced.proven.module.graph.nodes if node.op not in ("get_attr", "placeholder", "output")]
    assert len(found) >= 4
    assert [node for segment in found for node in segment.nodes] == calls
    assert sorted(name for segment in found for name in segment.names) == sorted(traced.names)
    for before, after in itertools.pairwise(found):
        assert after.entry is before.exit


class Again(nn.Module):
    """A layer that is used at the start and at the end: no segment may end between."""

    def __init__(self):
        super().__init__()
        self.twice, self.others = nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = torch.tanh(self.twice(x.flatten(1)))
        return self.head(torch.tanh(self.head_of(torch.tanh(self.twice(torch.tanh(self.others(x)))))))

    def head_of(self, x):
        return x * 2.0


def test_a_parameter_that_is_used_twice_stays_in_one_segment():
    model, (views, labels) = Again(), examples(5, 2, (1, 8, 8))
    _, found = split(model, (1, 8, 8))
    (owner,) = [segment for segment in found if "twice.weight" in segment.names]
    assert {f"others.{place}.weight" for place in range(6)} <= set(owner.names)
    assert same_bits(*both(model, views, labels))


def test_a_parameter_that_is_not_used_has_gradient_zero():
    assert same_bits(*both(Unused(), *examples(4, 2)))


def most_saved(engine, model, views, labels, monkeypatch):
    """The most bytes that autograd keeps for one backward pass."""
    most, now, differentiate = 0, 0, torch.autograd.grad

    def pack(tensor):
        nonlocal now
        now += tensor.nbytes
        return tensor

    def grad(*args, **kwargs):
        nonlocal most, now
        most, now = max(most, now), 0
        return differentiate(*args, **kwargs)

    with monkeypatch.context() as patched, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        patched.setattr(torch.autograd, "grad", grad)
        engine(model, cross_entropy, views, labels, CLIP)
    return most


def test_less_is_kept_for_the_backward_pass(monkeypatch):
    model, (views, labels) = wide_resnet(), examples(4, 2)
    plain, checkpointed = (most_saved(Layerwise(on), model, views, labels, monkeypatch) for on in (False, True))
    assert 0 < checkpointed < 0.5 * plain


def test_where_it_cannot_work_one_line_says_so():
    with pytest.raises(ConfigError, match="engine vmap keeps all activations; use auto or turn it off"):
        choose("vmap", wide_resnet(), coupled_loss, SHAPE, checkpointing=True)
    for name in ("auto", "layerwise"):
        with pytest.raises(ConfigError, match="checkpointing cannot be used with this model: .*; turn it off"):
            choose(name, engines.NoRule(), coupled_loss, (1, 8, 8), checkpointing=True)
    fast, other = choose("auto", wide_resnet(), coupled_loss, SHAPE, workers=2, checkpointing=True)
    assert fast._checkpointing and other._checkpointing


def trained(**settings):
    x, y = torch.rand(24, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.arange(24) % CLASSES
    data = dpcert.Dataset(x, y, x[:1], y[:1], classes=CLASSES)
    method = dpcert.method("dp-gaussian", sigma=0.5, copies=1)
    model = wide_resnet()
    dpcert.train(model, data, method, epochs=1, batch_size=12, noise_seed=1, learning_rate=0.05, **settings)
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_training_with_it_gives_the_same_weights():
    assert torch.equal(trained(), trained(checkpointing=True))


def test_configs_without_it_keep_their_bytes():
    assert GradientsConfig().stated() == {"engine": "auto"}
    assert GradientsConfig(checkpointing=True).stated() == {"engine": "auto", "checkpointing": True}
