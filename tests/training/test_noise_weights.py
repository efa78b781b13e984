"""SecureSGD's noise weights from private records: one clipped, noised and charged release before the first step."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dpcert
from dpcert.cli import main
from dpcert.errors import BudgetError, ConfigError, ModelError
from dpcert.gradients.engine import Clip
from dpcert.interrupts import Interrupted
from dpcert.models.spec import ModelSpec
from dpcert.models.systems import as_system, floored, set_weights
from dpcert.operator_norm import operator_norm
from dpcert.privacy.accounting import compose
from dpcert.privacy.clipping import Flat, NoClip
from dpcert.privacy.ledger import NOISE_WEIGHTS, Ledger
from dpcert.privacy.mechanism import Mechanism
from dpcert.privacy.noise import standard_normal
from dpcert.rng import key_from_seed
from dpcert.runs.resolve import resolve
from dpcert.training import loop, noise_weights
from dpcert.training.noise_weights import clipped_sum, vulnerabilities_of
from dpcert.tuning.budget import releases_of
from tests.conftest import blobs
from tests.contracts.systems import CLASSES, SHAPE, fresh, network, trained
from tests.training.test_phases import verify
from tests.training.test_resume_all import Crash, crash_after, stop_after

C = 0.01
DATA = dpcert.Dataset(**blobs(0, train=24, test=12, size=8), classes=3, size=24)
KEYS = {"epochs": 2, "batch_size": 6, "learning_rate": 0.1, "noise_seed": 5}
METHOD = dpcert.method("securesgd", sigma=0.5, copies=1)
FILES = ("model.safetensors", "ledger.jsonl", "config.toml", "training.tsv")


def charged_model(**keys):
    spec = ModelSpec("tiny", system="securesgd", noise=0.5, noise_weights="charged", **keys)
    return spec.build(SHAPE, CLASSES, seed=0, factory=lambda shape, classes: network())


def train(out=None, model=None, method=METHOD, **changes):
    return dpcert.train(model or charged_model(), DATA, method, out=out, **(KEYS | changes))


def total(model, x, labels, rule=Flat()):
    return clipped_sum(model, SimpleNamespace(x_train=x, y_train=labels), Clip(rule, C))


def random_records(generator):
    x = 10.0 ** (12.0 * torch.rand(4, 1, 1, 1, generator=generator) - 6.0) * torch.rand(4, *SHAPE, generator=generator)
    return x, torch.randint(0, CLASSES, (4,), generator=generator)


def furthest_moved(cases, rule=Flat()):
    """The largest change of the sum when one record is removed, and how often one was."""
    generator, worst, trials = torch.Generator().manual_seed(0), 0.0, 0
    for case in range(cases):
        model, (x, labels) = (fresh, trained)[case % 2]("securesgd"), random_records(generator)
        x[0, 0, 0, 0] = (0.5, math.nan, math.inf, 1e38)[case % 4]
        whole = total(model, x, labels, rule).value
        assert bool(torch.isfinite(whole).all())
        for left_out in range(4):
            keep = [i for i in range(4) if i != left_out]
            worst = max(worst, float((whole - total(model, x[keep], labels[keep], rule).value).norm()))
            trials += 1
    return worst, trials


def test_one_record_moves_the_release_by_at_most_the_bound(evidence, monkeypatch):
    monkeypatch.setattr(noise_weights, "_ROWS", 8)
    worst, trials = furthest_moved(260)
    assert trials >= 1_000 and 0.99 * C < worst <= C
    unclipped, _ = furthest_moved(4, NoClip())
    assert unclipped > C, "the twin that does not clip"
    evidence(
        "D2", figure="the sum of noise weights moves by at most C", trials=trials, twin=f"unclipped: {unclipped / C:.0f} C"
    )


def test_the_sum_over_many_parts_is_that_of_one(monkeypatch):
    model = fresh("securesgd")
    whole = total(model, DATA.x_train, DATA.y_train)
    monkeypatch.setattr(noise_weights, "_ROWS", 7)
    assert torch.allclose(whole.value, total(model, DATA.x_train, DATA.y_train).value, rtol=1e-6)
    assert whole.sensitivity == C and float(whole.value.norm()) <= 24 * C


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_record_without_a_finite_gradient_contributes_nothing(value):
    x, labels = random_records(torch.Generator().manual_seed(1))
    x[3, 0, 2] = value
    model = fresh("securesgd")
    assert torch.equal(total(model, x, labels).value, total(model, x[:3], labels[:3]).value)


def test_the_vector_of_a_record_is_the_mean_gradient_of_each_channel():
    model, (x, labels) = trained("securesgd"), random_records(torch.Generator().manual_seed(2))
    found = vulnerabilities_of(model, x, labels)
    for row, image, label in zip(found, x, labels, strict=True):
        hidden = model.hidden(image.unsqueeze(0)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model.rest(hidden), label.unsqueeze(0)), hidden)
        assert torch.allclose(row, slope[0].abs().mean(dim=(1, 2)).double(), rtol=1e-4, atol=1e-9)
    other = x.clone()
    other[1] = 0.5
    assert torch.equal(found[[0, 2, 3]], vulnerabilities_of(model, other, labels)[[0, 2, 3]])


def test_weights_are_floored_and_sum_to_one_whatever_the_noise():
    for noised in ([3.0, 1.0, 0.0, 0.0], [0.0] * 4, [1e-300, 0.0, 0.0, 0.0]):
        r = floored(torch.tensor(noised, dtype=torch.float64))
        assert float(r.sum()) == pytest.approx(1.0) and float(r.min()) >= 0.1 / 4
    assert torch.allclose(floored(torch.zeros(4, dtype=torch.float64)), torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("pretrained", [False, True])
def test_other_weights_change_the_shares_of_the_noise_and_not_its_worth(pretrained):
    shape = (3, 32, 32) if pretrained else SHAPE
    plain = dpcert.build_model("resnet-32", input_shape=shape, seed=0) if pretrained else network()
    model = as_system("pixeldp", plain, shape, 0.25)
    r = floored(torch.arange(len(model.scales), dtype=torch.float64))
    set_weights(model, r)
    shares = model.scales.double().square() / model.scales.double().square().sum()
    votes = model.folded()
    assert torch.allclose(shares, r, rtol=1e-5)
    assert 1.0 / float(operator_norm(votes.first, shape, votes.scales).detach()) == pytest.approx(0.25, rel=1e-4)


def test_the_scales_of_the_model_follow_from_the_noised_sum_and_nothing_else():
    """An oracle: the release by hand, with the noise of step 0 under the run key."""
    start, model = charged_model(), charged_model()
    assert torch.equal(start.scales, start.scales[:1].expand(4)), "uniform before training"
    run = train(model=model)
    phase = run.plan.phases[0]
    noise = torch.from_numpy(standard_normal(4, key_from_seed(5, "noise"), 0))
    clip = Clip(Flat(), phase.clip_norm)
    noised = clipped_sum(start, DATA, clip).value + phase.noise_multiplier * phase.clip_norm * noise
    set_weights(start, floored((noised / 24).clamp(min=0.0)))
    assert torch.equal(model.scales, start.scales)
    other = charged_model()
    train(model=other, noise_seed=6)
    assert not torch.equal(model.scales, other.scales)


def test_both_phases_are_charged_and_composed(tmp_path):
    run = train(tmp_path / "run", noise_seed=None)
    first = run.plan.phases[0]
    assert (first.trains, first.batch_size, first.steps) == (NOISE_WEIGHTS, 24, 1)
    releases = list(Ledger.load(tmp_path / "run" / "ledger.jsonl").releases())
    assert [(release.sampling_probability, release.steps) for release in releases] == [(1.0, 1), (0.25, 8)]
    assert run.epsilon == compose(releases, 1e-5) and 0.99 * 3.0 <= run.epsilon <= 3.0
    assert compose(releases[1:], 1e-5) < run.epsilon, "the twin that forgets the release"
    assert "Phase 1 releases the noise weights" in str(run.statement)
    stated = json.loads((tmp_path / "run" / "metrics.json").read_text())["privacy"]["phases"]
    assert [phase["trains"] for phase in stated] == [NOISE_WEIGHTS, "all"]
    assert verify(tmp_path / "run") == 0


def test_a_twin_that_forgets_the_release_does_not_verify(tmp_path, monkeypatch, capsys):
    real = loop.phases_of
    monkeypatch.setattr(loop, "phases_of", lambda *args, **keys: real(*args, **{**keys, "noise_weights": None}))
    train(tmp_path / "run", noise_seed=None)
    assert verify(tmp_path / "run") != 0
    assert "ledger against config" in next(line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)


def test_a_twin_that_does_not_charge_releases_nothing(monkeypatch):
    monkeypatch.setattr(Mechanism, "charge", lambda self, step: False)
    model = charged_model()
    with pytest.raises(BudgetError, match="step 0 is not authorised"):
        train(model=model)
    assert torch.equal(model.scales, charged_model().scales)


def test_the_release_is_in_the_ledger_before_a_gradient_is_taken(tmp_path, monkeypatch):
    seen, real = [], noise_weights.clipped_sum

    def spy(*args):
        seen.append(Ledger.load(tmp_path / "run" / "ledger.jsonl").steps_authorised)
        return real(*args)

    monkeypatch.setattr(noise_weights, "clipped_sum", spy)
    train(tmp_path / "run")
    assert seen == [1]


def files(out):
    return {name: (out / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("head", [{}, {"steps": 3, "copies": 2, "learning_rate": 0.1}])
def test_a_run_killed_around_the_release_ends_in_the_same_bytes(tmp_path, monkeypatch, head):
    train(tmp_path / "whole", head=head)
    real, out = noise_weights.clipped_sum, tmp_path / "killed"

    def crash(*args):
        raise Crash

    monkeypatch.setattr(noise_weights, "clipped_sum", crash)
    with pytest.raises(Crash):  # charged, not yet released
        train(out, head=head)
    monkeypatch.setattr(noise_weights, "clipped_sum", real)
    with pytest.raises(Crash):  # released, saved
        train(out, progress=crash_after(1), head=head)
    monkeypatch.setattr(noise_weights, "clipped_sum", crash)  # from here on the release is not computed again
    for step in (2, 4):
        with pytest.raises(Crash):
            train(out, progress=crash_after(step), head=head)
    train(out, head=head)
    assert files(out) == files(tmp_path / "whole")


def test_a_run_stopped_during_the_release_resumes(tmp_path):
    train(tmp_path / "whole")
    with pytest.raises(Interrupted, match="after step 0 of 9"):
        train(tmp_path / "stopped", progress=stop_after(0))
    with pytest.raises(Interrupted, match="after step 1 of 9"):
        train(tmp_path / "stopped", progress=stop_after(1))
    train(tmp_path / "stopped")
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


@pytest.mark.parametrize("name", ["securesgd-as-published", "stobatch-as-published"])
def test_a_method_without_a_guarantee_has_no_budget_to_charge(tmp_path, name):
    with pytest.raises(ConfigError, match="is not private, so there is no budget"):
        train(tmp_path / "run", method=dpcert.method(name, sigma=0.5, copies=1))
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("key", ["noise_weights_budget", "noise_weights_clip"])
def test_keys_of_a_release_that_does_not_happen_are_refused(key):
    with pytest.raises(ConfigError, match=f"privacy.{key} is set, but model.noise_weights is not charged"):
        dpcert.train(fresh("securesgd"), DATA, METHOD, **KEYS, **{key: 0.1})


@pytest.mark.parametrize("system", ["pixeldp", "stobatch", "denoiser"])
def test_systems_without_noise_weights_refuse_charged_ones(system):
    with pytest.raises(ModelError, match="only system securesgd"):
        ModelSpec("tiny", system=system, noise_weights="charged").bare(SHAPE, CLASSES, factory=lambda *_: network())
    with pytest.raises(ModelError, match="come from training"):
        as_system("securesgd", network(), SHAPE, 0.5, "charged")


def test_a_charged_search_counts_the_release_of_every_trial():
    config = resolve("mnist/securesgd", {"model.noise_weights": "charged", "train.epochs": 1})
    data = SimpleNamespace(size=60_000, size_given=True, classes=10, classes_given=True, held_out=0, input_shape=(1, 28, 28))
    assert [block[1:] for block in sorted(releases_of(config, data), key=lambda block: block[1])][-1] == (1.0, 1)


def test_shares_that_leave_nothing_for_training_are_refused():
    with pytest.raises(
        BudgetError, match=r"shares 0\.6 \(noise weights\) \+ 0\.5 \(head\) of the budget, which leaves nothing"
    ):
        train(noise_weights_budget=0.6, head={"steps": 3, "copies": 2, "budget": 0.5})


def test_a_share_and_a_bound_of_ones_own():
    run = train(noise_weights_budget=0.5, noise_weights_clip=1e-6)
    usual = train()
    assert run.plan.phases[0].clip_norm == 1e-6 and usual.plan.phases[0].clip_norm == 0.005
    assert run.plan.phases[0].noise_multiplier < usual.plan.phases[0].noise_multiplier


def test_a_charged_run_is_certified_exported_and_verified(tmp_path):
    words = ["--set", "model.noise_weights=charged", "--set", "data.classes=3", "--set", "data.size=96"]
    path = tmp_path / "blobs.npz"
    np.savez(path, **blobs(0, train=96, test=12, size=16))
    words += ["--set", f"data.path={path}", "--set", "train.epochs=1", "--set", "train.batch_size=24"]
    run = str(tmp_path / "run")
    for command in (
        ["train", "mnist/securesgd", *words, "--out", run],
        ["certify", run, "--n", "100", "--examples", "4"],
        ["verify", run],
        ["export", run, str(tmp_path / "bundle.zip")],
        ["verify", str(tmp_path / "bundle.zip")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert not ended.value.code, command
    opened = dpcert.open_run(run)
    assert len(set(opened.model.scales.tolist())) > 1
    assert float(opened.model.scales.square().mean()) == pytest.approx(0.25, rel=1e-5)
