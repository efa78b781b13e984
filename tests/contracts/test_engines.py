"""The contract of every engine: per example, bounded, indifferent to how the batch is cut."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpcert.chains.sums import sum_code
from dpcert.gradients import parts, vmap
from dpcert.gradients.choose import choose
from dpcert.gradients.compiled import compiled_engine
from dpcert.gradients.engine import Clip
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.parts import Arithmetic
from dpcert.losses import cross_entropy
from dpcert.models.registry import build_model
from dpcert.privacy.clipping import Automatic, Flat, NoClip, Psac


class Compiled:
    """The compiled engine of the model it is first called with. Skips the test where there is none for the model."""

    def of(self, model, views):
        engine = compiled_engine(model, tuple(views.shape[2:]), Layerwise())
        return engine or pytest.skip("no machine code for this model on this machine")

    def __call__(self, model, loss, views, labels, clip):
        return self.of(model, views)(model, loss, views, labels, clip)

    def per_example(self, model, loss, views, labels):
        return self.of(model, views).per_example(model, loss, views, labels)


class Summed(Layerwise):
    """The layerwise engine with the other choice of arithmetic, for all gradients that are not cheaper as factors."""

    def __init__(self):
        super().__init__(arithmetic=Arithmetic(blas=True, code=sum_code() or pytest.skip("needs a C++ compiler")))

    def per_example(self, *what):
        with mock.patch.object(parts, "WIDEST", 8):
            return super().per_example(*what)


ENGINES = {"vmap": lambda: vmap.clipped_sum, "layerwise": Layerwise, "compiled": Compiled, "summed": Summed}
CLIP = Clip(Flat(), 0.1)


def coupled_loss(logits, label):
    """A made-up loss that joins the views of one example: the regularisers to come have this shape."""
    p = F.softmax(logits, dim=1)
    return cross_entropy(logits, label) + (p - p.mean(dim=0)).square().sum() + 0.1 * torch.logsumexp(logits.flatten(), 0)


def one_at_a_time(model, loss, views, labels):
    """The oracle: an ordinary backward pass for each example alone."""
    rows = []
    for v, y in zip(views, labels, strict=True):
        gradients = torch.autograd.grad(loss(model(v), y), [p for p in model.parameters() if p.requires_grad])
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def clipped_by_hand(rows, clip):
    rows = rows.double()
    return (rows * clip.factors(rows.norm(dim=1))[:, None]).sum(dim=0)


class Residual(nn.Module):
    """A layer used twice, a residual connection, an in-place activation, in-place addition."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(1, channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.activation(self.norm(self.conv(x)))
        y = self.conv(y)
        y += x
        return F.relu_(y)


class Tokens(nn.Module):
    """Linear on a sequence, LayerNorm, Embedding of positions."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Linear(8, 6), nn.Embedding(8, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x):
        places = torch.arange(8).expand(len(x), 8)
        return self.head(self.norm(self.embed(x[:, 0]) + self.position(places)).mean(dim=1))


class WideTwice(nn.Module):
    """A wide 1 x 1 convolution used twice: its gradients stay factored, and their inputs must not share a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.wide, self.head = nn.Conv2d(1, 48, 8), nn.Conv2d(48, 48, 1), nn.Linear(48, 4)

    def forward(self, x):
        return self.head(self.wide(torch.tanh(self.wide(torch.tanh(self.first(x))))).flatten(1))


def own_eps():
    """Norms whose eps is not PyTorch's: large enough to show in every gradient."""
    norms = nn.GroupNorm(2, 4, eps=0.3), nn.BatchNorm2d(4, eps=0.3), nn.LayerNorm(4 * 36, eps=0.3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norms[0], nn.Tanh(), norms[1], nn.Flatten(), norms[2], nn.Linear(4 * 36, 4)).eval()


def frozen_batch_norm():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 4))
    model[1].running_mean.uniform_(-1, 1)
    return model.eval()


MODELS = {
    "cnn": lambda: build_model("cnn", input_shape=(1, 18, 18), classes=4, seed=0),
    "linear": lambda: build_model("linear", input_shape=(1, 8, 8), classes=4, seed=0),
    "residual": lambda: nn.Sequential(nn.Conv2d(1, 3, 3), Residual(3), nn.Flatten(), nn.Linear(3 * 36, 4)),
    "grouped": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, dilation=2),
        nn.Tanh(),
        nn.Conv2d(4, 8, 2, groups=2, padding="same"),
        nn.Tanh(),
        nn.Conv2d(8, 8, 1, groups=8, bias=False),
        nn.Flatten(),
        nn.Linear(32, 4),
    ),
    "conv1d": lambda: nn.Sequential(
        nn.Flatten(1, 2), nn.Conv1d(8, 5, 3, padding=1, padding_mode="circular"), nn.Tanh(), nn.Flatten(), nn.Linear(40, 4)
    ),
    "tokens": Tokens,
    "wide twice": WideTwice,
    "frozen batch norm": frozen_batch_norm,
    "own eps": own_eps,
    "partly frozen": lambda: _freeze(build_model("cnn", input_shape=(1, 18, 18), classes=4, seed=0)),
}


def _freeze(model):
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def made(name, b, r, seed=0):
    torch.manual_seed(seed)
    model = MODELS[name]()
    size = 18 if name in ("cnn", "partly frozen") else 8
    return model, torch.rand(b, r, 1, size, size), torch.randint(0, 4, (b,))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loss", [cross_entropy, coupled_loss], ids=["cross-entropy", "coupled"])
def test_equals_one_example_at_a_time(engine, name, loss):
    model, views, labels = made(name, 5, 3)
    found = ENGINES[engine]()(model, loss, views, labels, CLIP)
    rows = one_at_a_time(model, loss, views, labels)
    torch.testing.assert_close(found.norms, rows.double().norm(dim=1), rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(found.value, clipped_by_hand(rows, CLIP), rtol=1e-4, atol=1e-6)
    assert found.sensitivity == 0.1


@pytest.mark.parametrize("engine", ["vmap", "layerwise"])  # the compiled engine: tests/chains
@settings(max_examples=40)
@given(
    b=st.integers(1, 6),
    r=st.integers(1, 4),
    channels=st.integers(1, 3),
    out=st.integers(1, 5),
    kernel=st.integers(1, 4),
    kernel_w=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_equals_one_example_at_a_time_for_any_convolution(
    engine, b, r, channels, out, kernel, kernel_w, stride, padding, dilation, seed
):
    torch.manual_seed(seed)
    conv = nn.Conv2d(channels, out, (kernel, kernel_w), stride=(stride, max(1, stride - 1)), padding=padding, dilation=dilation)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    views, labels = torch.rand(b, r, channels, 9, 8), torch.randint(0, 3, (b,))
    model(views[0])
    found = ENGINES[engine]()(model, coupled_loss, views, labels, CLIP)
    expected = clipped_by_hand(one_at_a_time(model, coupled_loss, views, labels), CLIP)
    torch.testing.assert_close(found.value, expected, rtol=1e-4, atol=1e-6)


def per_example(engine, model, loss, views, labels):
    if engine == "vmap":
        found = vmap.per_example_gradients(model, loss, views, labels).values()
        return torch.cat([g.flatten(1) for g in found], dim=1).detach()
    found = ENGINES[engine]().per_example(model, loss, views, labels)
    return torch.cat([part.instantiate() for part in found.values()], dim=1).detach()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("b", [2, 3, 5, 12])
@pytest.mark.parametrize("r", [1, 3])
def test_isolation_no_other_gradient_changes(engine, b, r):
    model, views, labels = made("cnn", b, r)
    before = per_example(engine, model, coupled_loss, views, labels)
    for changed in range(b):
        others = [i for i in range(b) if i != changed]
        moved, moved_labels = views.clone(), labels.clone()
        moved[changed] = torch.rand_like(views[0])
        moved_labels[changed] = (labels[changed] + 1) % 4
        after = per_example(engine, model, coupled_loss, moved, moved_labels)
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[changed], after[changed])


def test_isolation_twin_a_batch_mean_is_seen():
    """The test above must be able to fail: a loss with a batch mean moves the others."""
    model, views, labels = made("cnn", 4, 2)

    def leaky(views):
        logits = model(views.flatten(0, 1)).unflatten(0, (4, 2))
        own = torch.stack([cross_entropy(one, y) for one, y in zip(logits, labels, strict=True)])
        losses = own + (logits - logits.mean(dim=0)).square().sum(dim=(1, 2))
        return [torch.cat([g.flatten() for g in torch.autograd.grad(x, model.parameters(), retain_graph=True)]) for x in losses]

    moved = views.clone()
    moved[0] = torch.rand_like(views[0])
    assert not torch.equal(leaky(views)[1], leaky(moved)[1])


def extreme(views, kind):
    """Rows that break careless code. The model's first weight is scaled so that gradients overflow or vanish."""
    views = views.clone()
    views[0] = {"nan": math.nan, "inf": math.inf, "1e38": 1e38, "denormal": 1e-42, "plain": 0.5}[kind]
    return views


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["nan", "inf", "1e38", "denormal", "plain"])
@pytest.mark.parametrize("rule", [Flat(), Psac(), Automatic()], ids=lambda rule: rule.name)
def test_sensitivity_is_at_most_the_clip_norm(engine, kind, rule):
    clip = Clip(rule, 0.1)
    model, views, labels = made("linear", 12, 3)
    views = extreme(views, kind)
    whole = ENGINES[engine]()(model, coupled_loss, views, labels, clip)
    assert torch.isfinite(whole.value).all()
    for j in range(12):
        keep = [i for i in range(12) if i != j]
        less = ENGINES[engine]()(model, coupled_loss, views[keep], labels[keep], clip)
        assert float((whole.value - less.value).norm()) <= 0.1
    if kind in ("nan", "inf"):  # it contributes nothing at all
        others = ENGINES[engine]()(model, coupled_loss, views[1:], labels[1:], clip)
        torch.testing.assert_close(whole.value, others.value, rtol=0, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_sensitivity_in_ten_thousand_cases(engine):
    """D2. About a minute; no false alarms: the bound is a theorem."""
    worst = 0.0
    for case in range(850):
        model, views, labels = made("linear", 12, 1 + case % 3, seed=case)
        for parameter in model.parameters():
            parameter.data.mul_(10.0 ** (case % 7 - 3))
        views = extreme(views, ["nan", "inf", "1e38", "denormal", "plain"][case % 5])
        run = ENGINES[engine]()
        whole = run(model, coupled_loss, views, labels, CLIP).value
        for j in range(12):
            keep = [i for i in range(12) if i != j]
            worst = max(worst, float((whole - run(model, coupled_loss, views[keep], labels[keep], CLIP).value).norm()))
    assert 0.0999 < worst <= 0.1


def test_sensitivity_twin_float32_sums_pass_the_bound():
    """Why sums are float64: the same gradients summed in float32 move by more than C in some case."""
    worst = 0.0
    for seed in range(40):
        rows = torch.randn(64, 5000, generator=torch.Generator().manual_seed(seed)) + 3.0
        rows = rows / rows.norm(dim=1, keepdim=True) * 0.1
        worst = max(worst, max(float((rows.sum(0) - rows[torch.arange(64) != j].sum(0)).norm()) for j in range(0, 64, 8)))
    assert worst > 0.1


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_add_up_to_the_whole(engine):
    model, views, labels = made("cnn", 11, 3)
    run = ENGINES[engine]()
    whole = run(model, cross_entropy, views, labels, CLIP)
    for size in (1, 2, 4, 7, 11, 100):
        cuts = range(0, 11, size)
        parts = [run(model, cross_entropy, views[i : i + size], labels[i : i + size], CLIP) for i in cuts]
        added = parts[0]
        for part in parts[1:]:
            added = added + part
        assert added.sensitivity == whole.sensitivity
        torch.testing.assert_close(added.value, whole.value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_batch_is_zero(engine):
    model, views, labels = made("cnn", 2, 3)
    found = ENGINES[engine]()(model, cross_entropy, views[:0], labels[:0], CLIP)
    assert found.value.shape == (sum(p.numel() for p in model.parameters()),)
    assert not found.value.any() and found.sensitivity == 0.1


def test_without_clipping_the_sum_is_the_ordinary_gradient():
    model, views, labels = made("cnn", 6, 1)
    found = Layerwise()(model, cross_entropy, views, labels, Clip(NoClip(), 1.0))
    loss = F.cross_entropy(model(views[:, 0]), labels, reduction="sum")
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(found.value.float(), expected, rtol=1e-4, atol=1e-5)
    assert math.isinf(found.sensitivity)


def test_norms_of_both_forms_agree_to_float64():
    from dpcert.gradients.parts import Factored, Instantiated

    inputs, deltas = torch.randn(5, 7, 30), torch.randn(5, 7, 20)
    factored = Factored(inputs, deltas)
    exact = Instantiated(torch.bmm(deltas.double().mT, inputs.double()).flatten(1))
    torch.testing.assert_close(factored.norms_squared(), exact.norms_squared(), rtol=1e-11, atol=0)
    weights = torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(factored.weighted_sum(weights), exact.weighted_sum(weights), rtol=1e-12, atol=1e-12)


class OwnWeights(nn.Module):
    """Uses a layer's weight without calling the layer: no hook can see it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        return self.fc(x.flatten(1)) + F.linear(x.flatten(1).square(), self.fc.weight)


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        return self.fc(x.flatten(1)) * self.scale


def tied():
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Linear(64, 4))


class NoRule(nn.Module):
    """Nothing but a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 4))

    def forward(self, x):
        return x.flatten(1) @ self.weight


@pytest.mark.parametrize("model", [OwnWeights, NoRule], ids=["own weights", "no rule"])
def test_what_layerwise_cannot_do_the_reference_takes_over(model):
    module = model()
    assert choose("auto", module, cross_entropy, (1, 8, 8), workers=2) == (vmap.clipped_sum,)
    with pytest.raises(ValueError, match="layerwise does not support this model"):
        choose("layerwise", module, cross_entropy, (1, 8, 8))


@pytest.mark.parametrize("model", [OwnParameter, tied], ids=["own parameter", "tied"])
def test_parameters_without_a_rule_get_the_reference_gradient_in_the_same_pass(model):
    module, views, labels = model(), torch.rand(5, 3, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    (engine,) = choose("layerwise", module, coupled_loss, (1, 8, 8))
    expected = vmap.per_example_gradients(module, coupled_loss, views, labels)
    found = engine.per_example(module, coupled_loss, views, labels)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].instantiate(), gradient.flatten(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_auto_takes_the_fast_engine_where_it_can(name):
    model, views, _ = made(name, 1, 1)
    assert Layerwise().unsupported(model, tuple(views.shape[2:])) is None
    engines = choose("auto", model, coupled_loss, tuple(views.shape[2:]), workers=3)
    assert len(engines) == 3 and all(isinstance(engine, Layerwise) for engine in engines)


def test_engines_leave_no_trace_on_the_model():
    model, views, labels = made("residual", 3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Layerwise()(model, cross_entropy, views, labels, CLIP)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5, 1e7])
def test_views_that_cancel_are_still_clipped_to_the_bound(size):
    """The ghost norm loses digits where the views of an example nearly cancel; its error bound keeps the sum within C."""
    from dpcert.gradients.parts import Factored

    generator = torch.Generator().manual_seed(0)
    a, d = size * torch.randn(8, 1, 300, generator=generator), torch.randn(8, 1, 40, generator=generator)
    small = 1e-7 * size * torch.randn(8, 1, 300, generator=generator)
    part = Factored(torch.cat([a, -a + small], dim=1), torch.cat([d, d], dim=1))
    factors = CLIP.factors(part.norms_squared().sqrt())
    for i in range(8):
        alone = torch.zeros(8, dtype=torch.float64)
        alone[i] = factors[i]
        assert float(part.weighted_sum(alone).norm()) <= 0.1


def test_norms_and_sums_are_float64():
    """From the same float32 gradients, clip_and_sum gives the float64 sum; float32 sums would be off by 1e-7 of their size."""
    from dpcert.gradients.engine import clip_and_sum

    parts = [torch.randn(500, 40, generator=torch.Generator().manual_seed(s)) + 3.0 for s in range(2)]
    found = clip_and_sum(parts, CLIP)
    rows = torch.cat(parts, dim=1).double()
    torch.testing.assert_close(found.norms, rows.norm(dim=1), rtol=1e-14, atol=0)
    torch.testing.assert_close(found.value, (rows * CLIP.factors(rows.norm(dim=1))[:, None]).sum(dim=0), rtol=1e-13, atol=0)
