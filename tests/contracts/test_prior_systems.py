"""D1, D2, D19 for the systems the paper quotes: sound ones hold the bound, those as published do not."""

import math

import pytest
import torch
import torch.nn.functional as F

import dpcert
from dpcert.gradients.engine import Clip, trainable
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.vmap import per_example_gradients
from dpcert.models.autoencoder import Reconstructing
from dpcert.models.check import check_model
from dpcert.privacy.clipping import BatchMean, Flat, is_bias
from dpcert.row_proof import reason_for_no_proof
from dpcert.training.step import check_views
from tests.contracts.systems import CLASSES, SHAPE, SOUND, fresh, images, method_of, model_of, noise_for
from tests.contracts.test_isolation import changed_pairs

CLIP_NORM = 0.1
KINDS = ("fresh", "trained")


def gradients(method, model, x, labels, noise, engine="layerwise"):
    """Per-example gradients ``[b, parameters]`` as a step takes them."""
    views, network = method.views(model, x, labels, noise), method.network(model)
    if engine == "vmap":
        found = per_example_gradients(network, method.loss, views, labels)
        return torch.cat([gradient.flatten(1) for gradient in found.values()], dim=1).detach()
    parts = Layerwise().per_example(network, method.loss, views, labels)
    return torch.cat([part.instantiate() for part in parts.values()], dim=1).detach()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOUND)
def test_isolation_of_every_sound_system(name, kind):
    method, model, (x, labels) = method_of(name), model_of(name, kind), images()
    check_model(model, SHAPE, CLASSES)
    check_views(method.views, model, SHAPE)
    for b in (1, 3, 5):
        noise = noise_for(method, model, b)
        compute = lambda a, y, e: gradients(method, model, a, y, e)  # noqa: E731
        assert changed_pairs(compute, x[:b], labels[:b], noise, CLASSES) == 0


def test_a_reconstruction_of_the_whole_batch_would_be_seen():
    """The twin: an auto-encoder whose residual is averaged over the batch."""
    method, model, (x, labels) = method_of("stobatch"), fresh("stobatch"), images()

    def leaky(a, y, e):
        rows = method.views(model, a, y, e).flatten(0, 1)
        outputs = Reconstructing(model)(rows).unflatten(0, (len(a), -1))
        outputs = torch.cat([outputs[..., :-1], outputs[..., -1:].mean(dim=0, keepdim=True).expand(len(a), -1, -1)], dim=-1)
        losses = [method.loss(o, label) for o, label in zip(outputs, y, strict=True)]
        own = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        return torch.stack([torch.cat([g.flatten() for g in row]) for row in own])

    assert changed_pairs(leaky, x[:3], labels[:3], noise_for(method, model, 3), CLASSES) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOUND)
def test_both_engines_agree_and_the_network_is_proven(name, kind):
    method, model, (x, labels) = method_of(name), model_of(name, kind), images()
    noise = noise_for(method, model, 6)
    slow, fast = (gradients(method, model, x[:6], labels[:6], noise, engine) for engine in ("vmap", "layerwise"))
    assert torch.allclose(slow, fast, rtol=0, atol=1e-5 * float(slow.abs().max()))
    views = method.views(model, x[:2], labels[:2], noise[:2])
    assert reason_for_no_proof(method.network(model), tuple(views.shape[2:])) is None


def leave_one_out(method, model, x, labels, noise):
    """Largest ‖S(D) - S(D without j)‖ over j; the views of the others are as they were."""

    def total(keep):
        views = method.views(model, x[keep], labels[keep], noise[keep])
        return Layerwise()(method.network(model), method.loss, views, labels[keep], Clip(method.clip_rule, CLIP_NORM)).value

    everyone = list(range(len(x)))
    whole = total(everyone)
    assert torch.isfinite(whole).all()
    return max(float((whole - total([i for i in everyone if i != j])).norm()) for j in everyone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOUND)
def test_sensitivity_of_every_sound_system(name, kind):
    method, model, (x, labels) = method_of(name), model_of(name, kind), images()
    worst = 0.0
    for case, value in enumerate((0.5, math.nan, math.inf, 1e38, 1e-42)):
        some = x[4 * case : 4 * case + 4].clone()
        some[0] = value
        wrong = (labels[4 * case : 4 * case + 4] + 1) % CLASSES
        worst = max(worst, leave_one_out(method, model, some, wrong, noise_for(method, model, 4, case)))
    assert 0.5 * CLIP_NORM < worst <= CLIP_NORM


CASES = 315  # 2,520 leave-one-outs a system, 10,080 in all


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOUND)
def test_sensitivity_in_ten_thousand_cases(name, kind, evidence):
    """Images of every brightness from 1e-6 to 1e6, with any label, and new noise in each case."""
    method, model, (x, _) = method_of(name), model_of(name, kind), images()
    generator = torch.Generator().manual_seed(5)
    worst = 0.0
    for case in range(CASES):
        some = x[torch.randint(0, len(x), (4,), generator=generator)]
        bright = 10.0 ** (12.0 * torch.rand(4, 1, 1, 1, generator=generator) - 6.0)
        labels = torch.randint(0, CLASSES, (4,), generator=generator)
        worst = max(worst, leave_one_out(method, model, bright * some, labels, noise_for(method, model, 4, case)))
    assert 0.5 * CLIP_NORM < worst <= CLIP_NORM
    evidence(
        "D2", figure="never above C", trials=4 * CASES, twin="SecureSGD as published: one record moves a mean by more than C"
    )


PUBLISHED_CLIP, BATCH = 0.001, 16


def mean_gradients(x, labels):
    """The mean gradient of each parameter of SecureSGD's network, trained."""
    method, model = method_of("securesgd-as-published"), model_of("securesgd", "trained")
    views = method.views(model, x, labels, torch.empty(len(x), 2, 0))
    found = per_example_gradients(method.network(model), method.loss, views, labels)
    return [found[name].mean(dim=0) for name in trainable(model)]


def moved_by_an_outlier(of_mean):
    """How far the released mean moves, in L2, if one record of a batch has another label than the others."""
    x, labels = images()
    x, labels = x[:1].repeat(BATCH, 1, 1, 1), labels[:1].repeat(BATCH)
    other = labels.clone()
    other[0] = (labels[0] + 1) % CLASSES
    with_it, without = of_mean(mean_gradients(x, other)), of_mean(mean_gradients(x[1:], labels[1:]))
    return float(torch.cat([(a - b).flatten() for a, b in zip(with_it, without, strict=True) if not is_bias(a)]).norm())


def test_one_outlier_moves_securesgd_as_published_far_more_than_it_charges():
    """Its noise is for a change of C / B. But the clipped mean of a tensor turns around: by up to 2 C."""
    moved = moved_by_an_outlier(lambda means: BatchMean().of_mean(means, PUBLISHED_CLIP))
    assert 1.2 * PUBLISHED_CLIP < moved <= 2 * PUBLISHED_CLIP * math.sqrt(2)  # of two tensors
    assert moved > 10 * PUBLISHED_CLIP / BATCH  # the sound mechanism moves by at most C / B: see the test above


def test_the_noise_of_stobatch_as_published_reveals_the_difference_of_two_images():
    model, (x, labels) = fresh("stobatch"), images()
    for name, revealed in (("stobatch-as-published", True), ("stobatch", False)):
        method = method_of(name)
        rows = method.views(model, x[:2], labels[:2], noise_for(method, model, 2))
        seen = rows[0, 0] - rows[1, 0]
        difference = (x[0] - x[1]).flatten()
        assert torch.allclose(seen[:64], difference, atol=1e-6) == revealed
        assert bool((seen[64:] == 0).all()) == revealed


@pytest.mark.parametrize("name", [*SOUND, "securesgd-as-published", "stobatch-as-published"])
def test_sound_systems_draw_fresh_noise_for_every_view(name):
    """The same image twice, with one label: only noise can tell their first (not attacked) copies apart."""
    method = method_of(name)
    model, (x, labels) = fresh(name), images(1)
    views = method.views(model, x.repeat(2, 1, 1, 1), labels.repeat(2), noise_for(method, model, 2)).flatten(2)
    first = int(method.views.keep_original)
    assert torch.equal(views[0, first], views[1, first]) == (name not in SOUND)
    assert name not in SOUND or not torch.equal(views[:, -1], views[:, -2])


def test_a_view_has_the_noise_of_the_law_at_every_site():
    """The law that the certificate assumes: input_scale on the pixels, standard coordinates inside (the model scales them)."""
    model, (x, labels) = fresh("stobatch"), images(3)
    method = dpcert.Method(views=dpcert.views.Inner(0.5, 2))
    noise = noise_for(method, model, 3)
    rows = method.views(model, x, labels, noise)
    assert torch.allclose(rows[..., :64], x.flatten(1)[:, None] + 0.5 / math.sqrt(2) * noise[..., :64], atol=1e-6)
    assert torch.equal(rows[..., 64:], noise[..., 64:])
    clean = dpcert.views.Inner(0.5, 2, keep_original=True)(model, x, labels, noise)
    assert torch.equal(clean[:, 0, :64], x.flatten(1)) and not bool(clean[:, 0, 64:].any())


def test_the_column_of_the_reconstruction_has_the_gradient_of_the_error():
    model, (x, _) = fresh("stobatch"), images(3)
    rows = model.pack(x, torch.randn(3, *model.hidden_shape))
    found = torch.autograd.grad(Reconstructing(model)(rows)[:, -1].sum(), list(model.parameters()), allow_unused=True)
    images_, noise, zero = model.split(rows)
    hidden = F.hardtanh(model.linear(images_, zero) + model.shift + noise)
    kernel = model.first.weight / model.divisor(zero)[0]
    back = F.conv_transpose2d(hidden, kernel, None, model.first.stride, model.first.padding, 1)
    error = (images_ - back).square().flatten(1).mean(dim=1).sum()
    expected = torch.autograd.grad(error, list(model.parameters()), allow_unused=True)
    for mine, true in zip(found, expected, strict=True):
        assert (mine is None or not bool(mine.any())) if true is None else torch.allclose(mine, true, atol=1e-6)


def test_stobatch_attacks_stay_in_their_ball_and_raise_the_loss():
    method, model, (x, labels) = (
        method_of("stobatch", stobatch_size=0.2, stobatch_steps=3),
        model_of("stobatch", "trained"),
        images(),
    )
    noise = noise_for(method, model, len(x))
    rows = method.views(model, x, labels, noise)
    benign, attacked = rows[:, :2], rows[:, 2:]
    assert torch.equal(benign[..., 64:], attacked[..., 64:])
    radius = 0.2 * torch.special.ndtr(noise[..., -2:-1])
    moved = (attacked - benign)[..., :64]
    assert bool((moved.abs() <= radius + 1e-6).all()) and float(moved.abs().mean()) > 0
    before, after = (F.cross_entropy(model(part.flatten(0, 1)), labels.repeat_interleave(2)) for part in (benign, attacked))
    assert after > before


@pytest.mark.parametrize(
    ("name", "word"),
    [("securesgd-as-published", "mean of a batch is clipped"), ("stobatch-as-published", "cancels in x_i - x_j")],
)
def test_as_published_trains_and_says_that_it_is_not_private(name, word):
    x, labels = images()
    data = dpcert.Dataset(x_train=x, y_train=labels, x_test=x, y_test=labels, classes=CLASSES, size=len(x))
    model = fresh(name)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run = dpcert.train(model, data, method_of(name), epochs=1, batch_size=8, learning_rate=0.1, seed=0)
    assert run.statement.short.startswith("epsilon = inf (not private: ") and word in run.statement.short
    assert math.isinf(run.epsilon) and any(bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True))


def test_the_noiseless_bracket_clips_and_is_not_private():
    x, labels = images()
    data = dpcert.Dataset(x_train=x, y_train=labels, x_test=x, y_test=labels, classes=CLASSES, size=len(x))
    method = dpcert.Method(views=method_of("dp-denoiser").views, clip="noiseless", name="dp-denoiser")
    run = dpcert.train(fresh("dp-denoiser"), data, method, epochs=1, batch_size=8, seed=0)
    assert run.statement.short == "epsilon = inf (not private: no noise is added)"
    norms = torch.tensor([0.01, 5.0], dtype=torch.float64)
    assert torch.equal(method.clip_rule.factors(norms, CLIP_NORM), Flat().factors(norms, CLIP_NORM))
