"""The engine on the models that are fine-tuned: equal to the reference, isolated to the bit, sensitivity at most C."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip, FirstOnly
from dpcert.gradients.layerwise import Layerwise
from dpcert.gradients.vmap import per_example_gradients
from dpcert.models.parts import freeze_others
from dpcert.privacy.clipping import Flat
from dpcert.row_proof import prove, reason_for_no_proof
from tests.contracts.test_engines import coupled_loss
from tests.contracts.vision import CLASSES, SHAPE, VISION, made, resnet

CLIP = Clip(Flat(), 0.1)
TWIN = "BatchNorm with statistics of the batch: seen"  # test_twin_batch_statistics_are_seen


def examples(b, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(b, r, *SHAPE, generator=generator), torch.randint(0, CLASSES, (b,), generator=generator)


def gradients(model, views, labels, engine=None):
    found = (engine or Layerwise()).per_example(model, coupled_loss, views, labels)
    return torch.cat([part.instantiate() for part in found.values()], dim=1).detach().clone()


@pytest.mark.parametrize("name", VISION)
def test_these_models_are_proven(name):
    assert reason_for_no_proof(made(name), SHAPE) is None


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", VISION)
def test_equals_the_reference(name, trained, evidence):
    model, (views, labels) = made(name, trained), examples(5, 3)
    engine = Layerwise()
    found = engine.per_example(model, coupled_loss, views, labels)
    assert all(engine._traced.values()), "it must run on the trace"
    expected = per_example_gradients(model, coupled_loss, views, labels)
    assert list(found) == list(expected)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key].instantiate(), gradient.flatten(1), rtol=1e-4, atol=1e-5 * scale, msg=key)
    evidence("D19", figure="every gradient agrees with the reference (relative 1e-4)", trials=5)


@pytest.mark.parametrize("name", VISION)
def test_both_engines_give_the_same_clipped_sum(name):
    model, (views, labels) = made(name, trained=True), examples(6, 2)
    (fast,), (reference,) = (choose(engine, model, coupled_loss, SHAPE) for engine in ("layerwise", "vmap"))
    found, expected = (engine(model, coupled_loss, views, labels, CLIP) for engine in (fast, reference))
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", VISION)
def test_isolation_no_bit_of_another_gradient_changes(name, trained, evidence):
    model, (views, labels) = made(name, trained), examples(4, 2)
    engine = Layerwise()
    before = gradients(model, views, labels, engine)
    for changed in range(4):
        moved, moved_labels = views.clone(), labels.clone()
        moved[changed], moved_labels[changed] = 1.0 - views[changed], (labels[changed] + 1) % CLASSES
        after = gradients(model, moved, moved_labels, engine)
        others = torch.arange(4) != changed
        assert torch.equal(before[others], after[others])
        assert not torch.equal(before[changed], after[changed])
    evidence("D19", figure="no bit of another example's gradient changes", trials=12, twin=TWIN)


@pytest.mark.parametrize("kind", ["plain", "nan", "inf", "1e38"])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", VISION)
def test_sensitivity_is_at_most_the_clip_norm(name, trained, kind, evidence):
    model, (views, labels) = made(name, trained), examples(5, 2)
    views[0] = {"nan": math.nan, "inf": math.inf, "1e38": 1e38, "plain": 0.5}[kind]
    engine = Layerwise()
    whole = engine(model, coupled_loss, views, labels, CLIP)
    assert torch.isfinite(whole.value).all()
    moves = []
    for j in range(5):
        keep = [i for i in range(5) if i != j]
        moves.append(float((whole.value - engine(model, coupled_loss, views[keep], labels[keep], CLIP).value).norm()))
    assert 0.01 < max(moves) <= 0.1
    assert kind in ("plain", "1e38") or moves[0] < 1e-7, "a record with NaN moves the others by rounding only"
    evidence("D19", figure="one record moves the clipped sum by at most C", trials=5)


def test_twin_batch_statistics_are_seen():
    """The isolation test must be able to fail: BatchNorm with statistics of the batch moves the others."""
    model, (views, labels) = resnet().train(), examples(4, 1)
    parameters = list(model.parameters())

    def rows(views):
        losses = F.cross_entropy(model(views.flatten(0, 1)), labels, reduction="none")
        return [torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]) for loss in losses]

    moved = views.clone()
    moved[0] = 1.0 - views[0]
    assert not torch.equal(rows(views)[1], rows(moved)[1])


@pytest.mark.parametrize("name", VISION)
def test_new_weights_are_used_in_the_next_call(name):
    model, (views, labels) = made(name), examples(3, 2)
    engine = Layerwise()
    gradients(model, views, labels, engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(gradients(model, views, labels, engine), gradients(model, views, labels), rtol=0, atol=0)


def test_other_trained_parameters_and_modes_are_noticed():
    model, (views, labels) = resnet("head"), examples(3, 2)
    engine = Layerwise()
    assert list(engine.per_example(model, coupled_loss, views, labels)) == ["head.weight", "head.bias"]
    model.stage3.requires_grad_(True)
    names = list(engine.per_example(model, coupled_loss, views, labels))
    assert "stage3.0.conv1.weight" in names and all(engine._traced.values())
    model.stage3[0].norm1.train()
    with pytest.raises(RuntimeError):  # as under vmap: BatchNorm would change its statistics
        engine.per_example(model, coupled_loss, views, labels)


def test_a_hook_added_later_ends_the_fast_path():
    model, (views, labels) = resnet(), examples(3, 2)
    engine = Layerwise()
    engine.per_example(model, coupled_loss, views, labels)
    model.stage2.register_forward_hook(lambda layer, inputs, output: output - output.mean(dim=0))
    engine.per_example(model, coupled_loss, views, labels)
    assert not any(engine._traced.values())


def test_frozen_layers_before_the_first_trained_one_record_nothing():
    """No call of a frozen layer is recorded, and nothing before the head can be differentiated."""
    model, (views, labels) = resnet("head"), examples(3, 2)
    engine = Layerwise()
    engine.per_example(model, coupled_loss, views, labels)
    (traced,) = engine._traced.values()
    from dpcert.gradients.traced import Run

    run = Run(traced)
    with torch.enable_grad():
        logits = run.run(views.flatten(0, 1), enable_io_processing=False)
    assert [call.name for call in run.calls] == ["head"] and run.copies == []
    assert not run.calls[0].inputs.requires_grad and logits.is_leaf and logits.requires_grad


def test_a_frozen_start_costs_one_forward_pass():
    """``model.train = last:2``: frozen layers run once, without a record; the backward pass ends at the first trained layer."""
    model, (views, labels) = resnet(), examples(3, 2)
    freeze_others(model, "last:2")
    engine, ran, differentiated = Layerwise(), [], []
    engine.per_example(model, coupled_loss, views, labels)
    (traced,) = engine._traced.values()
    for name, layer in traced.proven.module.named_modules():
        if isinstance(layer, nn.Conv2d):
            forward = layer.forward
            layer.forward = lambda x, name=name, forward=forward: ran.append((name, x.requires_grad)) or forward(x)
    record = torch.ops.aten.convolution_backward.default

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is record:
                differentiated.append(args[10][0])  # whether the gradient of the layer's input is computed
                assert not args[10][1], "no ordinary weight gradient"
            return func(*args, **(kwargs or {}))

    with Counting():
        engine(model, coupled_loss, views, labels, CLIP)
    frozen = [(name, needs) for name, needs in ran if "stage3" not in name]
    trained = [name for name, _ in ran if "stage3" in name]
    assert len(frozen) == 10 and not any(needs for _, needs in frozen)  # the stem, four of stage 1, five of stage 2
    assert len(ran) == len(set(ran)) and len(trained) == 5
    assert sum(differentiated) == 3  # of five convolutions, the first and its shortcut see frozen inputs


class Unused(nn.Module):
    """A trained layer that the forward does not use, and a class token used twice."""

    def __init__(self):
        super().__init__()
        self.unused, self.fc, self.token = nn.Linear(3, 3), nn.Linear(768, CLASSES), nn.Parameter(torch.randn(1, CLASSES))

    def forward(self, x):
        y = self.fc(x.flatten(1))
        return y * self.token + self.token.expand(x.shape[0], -1)


def test_unused_layers_have_gradient_zero_and_uses_add_up():
    model, (views, labels) = Unused(), examples(4, 2)
    engine = Layerwise()
    found = engine.per_example(model, coupled_loss, views, labels)
    assert all(engine._traced.values())
    expected = per_example_gradients(model, coupled_loss, views, labels)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key].instantiate(), gradient.flatten(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["crossvit", "resnet"])
def test_engines_leave_no_trace_on_the_model(name):
    model, (views, labels) = made(name), examples(3, 2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    Layerwise()(model, coupled_loss, views, labels, CLIP)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())


def test_a_part_in_several_pieces_is_the_same_sum(monkeypatch):
    model, (views, labels) = made("resnet"), examples(7, 2)
    whole = Layerwise()(model, coupled_loss, views, labels, CLIP)
    monkeypatch.setattr("dpcert.gradients.layerwise._MANY_PARAMETERS", 0)
    monkeypatch.setattr("dpcert.gradients.layerwise._FEW_ROWS", 4)
    pieces = Layerwise()(model, coupled_loss, views, labels, CLIP)
    torch.testing.assert_close(pieces.norms, whole.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(pieces.value, whole.value, rtol=1e-4, atol=1e-7)


def test_padding_counts_for_nothing_in_any_piece(monkeypatch):
    """Examples 4 and later only fill up the part: in pieces of two as well."""
    model, (views, labels) = made("resnet"), examples(6, 2)
    expected = Layerwise()(model, coupled_loss, views[:3], labels[:3], CLIP)
    monkeypatch.setattr("dpcert.gradients.layerwise._MANY_PARAMETERS", 0)
    monkeypatch.setattr("dpcert.gradients.layerwise._FEW_ROWS", 4)
    found = Layerwise()(model, coupled_loss, views, labels, FirstOnly(CLIP, 3))
    torch.testing.assert_close(found.value, expected.value, rtol=1e-4, atol=1e-7)


def test_the_trace_has_the_outputs_of_the_model():
    for name in VISION:
        model, x = made(name, trained=True), torch.rand(6, *SHAPE)
        with torch.no_grad():
            torch.testing.assert_close(prove(model, SHAPE).module(x), model(x), rtol=1e-4, atol=1e-5)
