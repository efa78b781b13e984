"""Device discipline without a GPU: the hot path on the `meta` device, where tensors have a shape and no values.

A tensor made on the CPU meets one on the meta device and raises, as it would on a GPU. So does everything that reads a value.
Images and labels stay on the CPU, as in training.
"""

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert import rng
from dpcert.certification import votes
from dpcert.certification.bank import draw_bank, split_at
from dpcert.certification.heads import SharedHeads, each_vote_alone
from dpcert.certification.votes import BankVotes, FreshVotes
from dpcert.gradients.engine import Clip, FirstOnly, trainable
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.vmap import clipped_sum
from dpcert.methods import METHODS, Method
from dpcert.privacy.clipping import CLIP_RULES, Flat
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import Mechanism, make_plan, opening_facts
from dpcert.rng import Purpose, key_from_seed
from dpcert.training.averaging import Average, AveragingKeys
from dpcert.training.step import StepContext, private_step
from dpcert.views import Gaussian, Original

META, KEY, EXAMPLES = torch.device("meta"), key_from_seed(0, "meta"), 5
SHAPES = {"cnn": (1, 28, 28), "resnet-32": (3, 32, 32), "crossvit-tiny": (3, 32, 32)}


class OwnForward(nn.Module):
    """No rule and no proof covers it: each example runs alone."""

    def __init__(self):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(10)), nn.Linear(784, 10)

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.scale


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch):
    """The meta device has no generator and no values to count: shapes take their place."""
    monkeypatch.setattr(rng, "_drawn_on", lambda device, seed, shape: torch.empty(shape, device=device))
    monkeypatch.setattr(votes, "_counted", lambda ballots, classes: _shape_of(ballots, classes))


def _shape_of(ballots: torch.Tensor, classes: int) -> np.ndarray:
    assert ballots.device == META and ballots.ndim == 1
    return np.full(classes, len(ballots))


def on_meta(name: str) -> nn.Module:
    if name == "own forward":
        return OwnForward().to(META)
    return dpcert.build_model(name, input_shape=SHAPES[name], classes=10, seed=0).eval().to(META)


def shape_for(name: str) -> tuple[int, ...]:
    return SHAPES.get(name, (1, 28, 28))


def batch(shape: tuple[int, ...], copies: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, labels = torch.empty((EXAMPLES, *shape), device=META), torch.empty(EXAMPLES, dtype=torch.long, device=META)
    return x, labels, torch.empty((EXAMPLES, copies, *shape), device=META)


def views_and_sum(method: Method, model: nn.Module, shape: tuple[int, ...], engine) -> None:
    """Views, losses and engine; raises if one of them leaves the device."""
    x, labels, noise = batch(shape, method.views.copies)
    views = method.views(model, x, labels, noise)
    assert views.device == META and views.shape == (EXAMPLES, method.views.count, *shape)
    clipped = engine(model, method.loss, views, labels, FirstOnly(Clip(method.clip_rule, 0.1), EXAMPLES - 1))
    assert clipped.value.device == META and clipped.value.dtype == torch.float64
    assert clipped.value.shape == (sum(parameter.numel() for parameter in trainable(model).values()),)
    assert clipped.norms.device == META and clipped.norms.shape == (EXAMPLES,)


ENGINES = {"vmap": lambda: clipped_sum, "layerwise": Layerwise}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_views_losses_and_engines_of_every_method(name, engine):
    views_and_sum(dpcert.method(name), on_meta("cnn"), (1, 28, 28), ENGINES[engine]())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", ["resnet-32", "crossvit-tiny", "own forward"])
def test_engines_on_every_kind_of_model(model, engine):
    views_and_sum(
        dpcert.method("dp-gaussian" if "vit" in model else "dp-smoothadv"), on_meta(model), shape_for(model), ENGINES[engine]()
    )


@pytest.mark.parametrize("rule", CLIP_RULES.values(), ids=CLIP_RULES)
def test_clip_rules(rule):
    norms = torch.empty(7, dtype=torch.float64, device=META)
    assert Clip(rule, 0.1).factors(norms).device == META


# Twins: a tensor on the CPU in a view, a loss, a regulariser, a clip rule; a value that is read.


class CpuViews(Gaussian):
    def __call__(self, model, x, labels, noise):
        return super().__call__(model, x, labels, noise) + torch.zeros(x.shape[-1])


def cpu_regulariser(logits, label):
    return (torch.arange(logits.shape[1]) * logits).sum()


def reading_regulariser(logits, label):
    return logits.sum() * float(logits.max())


class CpuRule(Flat):
    def factors(self, norms, clip_norm):
        return super().factors(norms, clip_norm) * torch.ones(EXAMPLES).double()


BROKEN = {
    "a view on the CPU": Method(views=CpuViews()),
    "a loss on the CPU": Method(views=Gaussian(), regulariser=cpu_regulariser),
    "a loss that reads a value": Method(views=Gaussian(), regulariser=reading_regulariser),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("broken", BROKEN)
def test_twin_a_tensor_on_the_wrong_device_fails(broken, engine):
    with pytest.raises((RuntimeError, NotImplementedError, dpcert.errors.ModelError)):
        views_and_sum(BROKEN[broken], on_meta("cnn"), (1, 28, 28), ENGINES[engine]())


def test_twin_a_clip_rule_on_the_cpu_fails():
    with pytest.raises(RuntimeError):
        Clip(CpuRule(), 0.1).factors(torch.empty(EXAMPLES, dtype=torch.float64, device=META))


# A whole step: the batch is sampled and the noise drawn on the CPU, and both move to the device.


def context_for(method: Method, model: nn.Module, shape: tuple[int, ...], optimizer=torch.optim.SGD) -> StepContext:
    plan = make_plan(
        dataset_size=40,
        size_given=True,
        classes=10,
        classes_given=True,
        held_out=0,
        batch_size=16,
        epochs=10,
        clip=method.clip_rule,
        clip_norm=0.1,
        epsilon=3.0,
        delta=1e-5,
    )
    ledger = Ledger(None, KEY)
    ledger.open(opening_facts(plan, noise_is_secret=False))
    mechanism = Mechanism(plan, KEY, ledger)
    mechanism.charge(0)
    images, labels = torch.rand(40, *shape), torch.zeros(40, dtype=torch.long)
    made = optimizer(trainable(model).values(), lr=0.1)
    return StepContext(model, images, labels, method, Clip(method.clip_rule, 0.1), (Layerwise(),), mechanism, made, 24)


@pytest.mark.parametrize("name", ["dpsgd", "dp-gaussian", "dp-smoothadv"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_whole_step(name, optimizer):
    model = on_meta("cnn")
    context = context_for(dpcert.method(name), model, (1, 28, 28), optimizer)
    average = Average(trainable(model).values(), AveragingKeys(averaging="ema"), 10)
    gradient = private_step(context, 0)
    average.include(1)
    assert gradient.device == META and gradient.dtype == torch.float64
    assert all(value.device == META for value in average.values)


def test_twin_noise_that_stays_on_the_cpu_fails(monkeypatch):
    from dpcert.privacy import noise

    def on_cpu(bounded, noise_multiplier, key, step):
        drawn = torch.from_numpy(noise.standard_normal(bounded.value.numel(), key, step))
        return bounded.value + noise_multiplier * bounded.sensitivity * drawn

    monkeypatch.setattr(noise, "add", on_cpu)
    with pytest.raises(RuntimeError, match="device"):
        private_step(context_for(dpcert.method("dpsgd"), on_meta("cnn"), (1, 28, 28)), 0)


# Votes


def heads_on_meta() -> SharedHeads:
    trunk = nn.Sequential(nn.Conv2d(1, 3, 5), nn.Flatten())
    return SharedHeads(trunk, [nn.Linear(3 * 24 * 24, 10) for _ in range(2)]).eval().to(META)


@pytest.mark.parametrize("name", ["cnn", "resnet-32", "heads"])
@pytest.mark.parametrize("batch", [None, 7])
def test_votes_with_fresh_noise(name, batch):
    model = heads_on_meta() if name == "heads" else on_meta(name)
    with torch.inference_mode():
        counter = FreshVotes(model, 0.5, KEY, batch)
        counts = counter.count(torch.rand(shape_for(name)), 0, 20, Purpose.PREDICT, 0)
    assert counts.tolist() == [20] * (20 if name == "heads" else 10)


@pytest.mark.parametrize("name", ["cnn", "heads"])
def test_votes_from_a_bank(name):
    model = heads_on_meta() if name == "heads" else on_meta(name)
    first = next(name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    with torch.inference_mode():
        cut = split_at(first, model, (1, 28, 28), each_vote_alone(model, (1, 28, 28)))
        bank = draw_bank(cut, 0.5, KEY, {Purpose.PREDICT: 20}, (1, 28, 28), META)
        assert bank is not None and bank.parts[Purpose.PREDICT].device == META
        counts = BankVotes(cut, bank, 0.5).count(torch.rand(1, 28, 28), 0, 20, Purpose.PREDICT, 0)
    assert counts.tolist() == [20] * (20 if name == "heads" else 10)


class CpuModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, x):
        return self.layer(x.flatten(1)) + torch.zeros(10)


def test_twin_a_model_that_makes_a_cpu_tensor_fails_to_vote():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="device"):
        FreshVotes(CpuModel().to(META), 0.5, KEY).count(torch.rand(1, 28, 28), 0, 20, Purpose.PREDICT, 0)


def test_an_original_view_is_the_example_itself():
    x, labels, noise = batch((1, 4, 4), 0)
    assert Original()(nn.Identity(), x, labels, noise).device == META


def test_norms_are_looked_at_on_a_cpu_only():
    """The masked path of other devices gives the bits of the CPU's, unusable rows or not."""
    from dpcert.gradients import engine

    model = dpcert.build_model("cnn", seed=0)
    method, views = dpcert.method("dp-gaussian"), torch.rand(4, 3, 1, 28, 28)
    for bad in (False, True):
        views[1] = torch.nan if bad else views[1]
        for run in (clipped_sum, Layerwise()):
            looked = run(model, method.loss, views, torch.arange(4), Clip(method.clip_rule, 0.1))
            with pytest.MonkeyPatch.context() as patch:
                for place in ("dpcert.gradients.engine", "dpcert.gradients.sums"):
                    patch.setattr(f"{place}.may_be_unusable", lambda norms: True)
                masked = run(model, method.loss, views, torch.arange(4), Clip(method.clip_rule, 0.1))
            assert torch.equal(looked.value, masked.value) and torch.isfinite(looked.value).all()
    assert not engine.may_be_unusable(torch.ones(3)) and engine.may_be_unusable(torch.empty(3, device=META))
