"""Two phases in one run: one ledger, one budget, resumable anywhere; the head phase trains on stored features."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.cli import main
from dpcert.errors import BudgetError, ConfigError, LedgerError
from dpcert.gradients.vmap import per_example_gradients
from dpcert.interrupts import Interrupted
from dpcert.privacy.accounting import GaussianSteps, compose
from dpcert.privacy.clipping import Flat
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import EarlierPhase, make_plan
from dpcert.rng import Purpose, key_from_seed, normal_at_positions
from dpcert.sections import SPEED_ONLY, validated
from dpcert.training import curve, features, loop
from dpcert.training.phases import phases_of
from dpcert.training.settings import HeadConfig, Settings
from tests.training.knobs import BASE, DATA, METHOD, files, small_blocks
from tests.training.test_resume_all import Crash, crash_after, stop_after

__all__ = ["small_blocks"]
HEAD = {"steps": 5, "learning_rate": 0.5, "clip_norm": 0.3, "copies": 3, "budget": 0.4, "averaging": "tail"}
KEYS = BASE | {"averaging": "ema", "momentum": 0.5}
TOTAL = 5 + 8


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3))


def train(out=None, model=None, method=METHOD, head=HEAD, **changes):
    return dpcert.train(model or network(), DATA, method, out=out, head=head, **(KEYS | changes))


def verify(run) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(run)])
    return int(ended.value.code or 0)


def plan(**changes):
    earlier = EarlierPhase("head", 1000, 50, 0.2, 0.4)
    sizes = {"dataset_size": 1000, "size_given": True, "classes": 3, "classes_given": True, "held_out": 0}
    budget = {"clip": Flat(), "clip_norm": 0.1, "epsilon": 3.0, "delta": 1e-5}
    return make_plan(**(sizes | budget | {"batch_size": 100, "epochs": 4, "earlier": [earlier]} | changes))


def test_both_phases_together_spend_the_budget_and_no_more(evidence):
    made = plan()
    epsilon = compose(made.releases(made.steps), 1e-5)
    assert 0.99 * 3.0 <= epsilon <= 3.0
    forgotten = compose(made.releases(made.steps)[1:], 1e-5)
    assert forgotten < 2.9, "the twin that forgets a phase is far below"
    evidence(
        "D17", figure="two phases compose to 99 to 100 % of epsilon 3", trials=1, twin=f"a forgotten phase: {forgotten:.2f}"
    )
    assert made.steps == 50 + 40 and made.releases(made.steps)[0].sampling_probability == 1.0


def test_a_larger_share_means_less_noise_in_that_phase_and_more_in_the_other():
    small, large = (plan(earlier=[EarlierPhase("head", 1000, 50, 0.2, share)]) for share in (0.2, 0.8))
    assert small.phases[0].noise_multiplier > large.phases[0].noise_multiplier
    assert small.noise_multiplier < large.noise_multiplier


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, float("nan")])
def test_a_share_that_leaves_nothing_is_refused(share):
    with pytest.raises((BudgetError, ValueError), match="share"):
        plan(earlier=[EarlierPhase("head", 1000, 50, 0.2, share)])


def test_steps_are_numbered_across_phases():
    made = plan()
    assert [made.phase_of(step) for step in (0, 49, 50, 89)] == [0, 0, 1, 1]
    assert made.first_step_of(1) == 50 and made.epochs_after(60) == pytest.approx(50 + 1.0)


def test_the_ledger_charges_each_phase_with_its_own_noise(tmp_path, small_blocks):
    run = train(tmp_path / "run")
    blocks = [event for event in run.ledger.events if event["event"] == "authorise"]
    first, last = run.plan.phases
    assert [block["steps"] for block in blocks] == [3, 2, 3, 3, 2]  # no block goes beyond its phase
    assert {block["noise_multiplier"] for block in blocks[:2]} == {first.noise_multiplier}
    assert {block["noise_multiplier"] for block in blocks[2:]} == {last.noise_multiplier}
    assert run.ledger.opening["format"] == 2 and Ledger.load(tmp_path / "run" / "ledger.jsonl").is_closed
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())["privacy"]
    assert [phase["trains"] for phase in metrics["phases"]] == ["head", "all"]
    assert "Phase 1 trains head: 5 steps" in str(run.statement) or not run.statement.private


def test_a_run_without_a_head_phase_has_the_old_format():
    run = train(head={})
    assert run.ledger.opening["format"] == 1 and "phases" not in run.ledger.opening


def test_the_head_phase_changes_the_head_only():
    model = network()
    model[1].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model=model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == {"3.weight", "3.bias"}


class Scaled(nn.Module):
    """Not its head after a trunk: features cannot be stored, and the head phase takes ordinary steps."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x):
        return 2.0 * self.head(self.body(x.flatten(1)))


@pytest.mark.parametrize(("model", "body", "head"), [(network, "1", "3"), (Scaled, "body", "head")])
def test_the_head_phase_trains_nothing_but_the_head(model, body, head, monkeypatch):
    model, seen, real = model(), [], loop.private_step

    def spy(context, step):
        found = real(context, step)
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return found

    monkeypatch.setattr(loop, "private_step", spy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model=model)
    assert all(torch.equal(before[name], seen[4][name]) for name in (f"{body}.weight", f"{body}.bias"))
    assert not torch.equal(before[f"{head}.weight"], seen[0][f"{head}.weight"])
    assert not torch.equal(before[f"{body}.weight"], seen[5][f"{body}.weight"])


def test_each_phase_adds_the_noise_that_the_ledger_states(monkeypatch):
    """Without records in the batch, a release is the noise alone: its size is that of the phase."""
    released, real = [], loop.private_step
    monkeypatch.setattr(loop, "private_step", lambda context, step: released.append(real(context, step)) or released[-1])
    monkeypatch.setattr("dpcert.privacy.sampling.poisson_indices", lambda *_: np.empty(0, dtype=np.int64))
    wide = nn.Sequential(nn.Flatten(), nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 3))
    run = train(model=wide)
    first, last = run.plan.phases
    for gradient, phase in ((released[0], first), (released[-1], last)):
        expected = phase.noise_multiplier * phase.clip_norm / phase.batch_size
        assert float(gradient.std()) == pytest.approx(expected, rel=0.1)
    assert first.noise_multiplier * first.clip_norm / first.batch_size != pytest.approx(
        last.noise_multiplier * last.clip_norm / last.batch_size, rel=0.3
    )


def test_interrupted_in_each_phase_and_between_them_gives_the_same_bytes(tmp_path, small_blocks):
    train(tmp_path / "whole")
    for step in range(1, TOTAL + 1):
        out = tmp_path / f"at{step}"
        with pytest.raises(Crash):
            train(out, progress=crash_after(step))
        if step < TOTAL - 1:
            with pytest.raises(Interrupted):
                train(out, progress=stop_after(step + 1))
        train(out)
        assert files(out) == files(tmp_path / "whole"), step


def test_slow_steps_are_saved_between_blocks(tmp_path, monkeypatch):
    """Killed in the middle of a block, the run resumes from its last step and ends in the same bytes."""
    train(tmp_path / "whole")
    monkeypatch.setattr("dpcert.training.lifecycle.SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    with pytest.raises(Crash):
        train(tmp_path / "run", progress=crash_after(7))
    state = json.loads((tmp_path / "run" / "private" / "state.json").read_text())
    assert state["step"] == 6
    train(tmp_path / "run")
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@pytest.fixture
def eight_records_at_a_time(monkeypatch):
    monkeypatch.setattr(features, "_ROWS", 32)


def test_stored_features_are_those_of_the_views(eight_records_at_a_time):
    model, key = network(), key_from_seed(0, "test")
    method = features.method_of_head_phase(METHOD, 3)
    trunk = features.trunk_of(model, method, (1, 4, 4))
    stored = features.stored_features(trunk, DATA.x_train, method, key, 7, torch.device("cpu"), 1, lambda *_: None)
    noise = normal_at_positions(key, Purpose.VIEWS, 0, len(DATA.x_train), (3, 1, 4, 4), torch.device("cpu"), 7)
    views = method.views(model, DATA.x_train, DATA.y_train, noise)
    expected = model[:3](views.flatten(0, 1)).unflatten(0, views.shape[:2])
    assert torch.allclose(stored, expected, atol=1e-6) and stored.shape == (24, 4, 6)


def test_a_record_changes_its_own_features_only(eight_records_at_a_time):
    model, method = network(), features.method_of_head_phase(METHOD, 3)

    def stored(images):
        trunk = features.trunk_of(model, method, (1, 4, 4))
        return features.stored_features(trunk, images, method, bytes(32), 0, torch.device("cpu"), 1, lambda *_: None)

    other = DATA.x_train.clone()
    other[5] = 1.0 - other[5]
    before, after = stored(DATA.x_train), stored(other)
    rest = torch.arange(24) != 5
    assert torch.equal(before[rest], after[rest]) and not torch.equal(before[5], after[5])
    assert torch.equal(before[:23], stored(DATA.x_train[:23]))  # nor does their number


class Residual(nn.Module):
    """A convolution with BatchNorm and a shortcut, then the head: its trunk is proven, folded and runs in passes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 5)
        self.norm.running_mean.fill_(0.3)
        self.norm.running_var.fill_(0.5)

    def forward(self, x):
        return self.head(torch.relu(x + self.norm(self.conv(x))).mean(dim=(2, 3)))


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_passes_folding_and_precision_change_features_by_rounding_only(monkeypatch, precision, tolerance):
    monkeypatch.setattr(features, "_ROWS", 32)
    monkeypatch.setattr(features, "_ROWS_AT_ONCE", 12)
    model, method, key = Residual().eval(), features.method_of_head_phase(METHOD, 3), key_from_seed(0, "test")

    def stored(images):
        trunk = features.trunk_of(model, method, (1, 4, 4))
        device = torch.device("cpu")
        return features.stored_features(trunk, images, method, key, 7, device, 1, lambda *_: None, precision=precision)

    noise = normal_at_positions(key, Purpose.VIEWS, 0, len(DATA.x_train), (3, 1, 4, 4), torch.device("cpu"), 7)
    views = method.views(model, DATA.x_train, DATA.y_train, noise)
    model.head, head = nn.Identity(), model.head
    expected = model(views.flatten(0, 1)).unflatten(0, views.shape[:2])
    model.head = head
    found = stored(DATA.x_train)
    assert found.dtype == torch.float32 and torch.allclose(
        found, expected, atol=tolerance * float(expected.detach().abs().max())
    )
    other = DATA.x_train.clone()
    other[5] = 1.0 - other[5]
    rest = torch.arange(24) != 5
    assert torch.equal(found[rest], stored(other)[rest]) and torch.equal(found[:23], stored(DATA.x_train[:23]))


def test_the_precision_of_features_is_a_setting_that_resume_compares():
    assert "precision" not in HeadConfig(steps=3).stated() and HeadConfig(steps=3, precision="bfloat16").stated()["precision"]
    assert "precision" not in HeadConfig.keys_marked(SPEED_ONLY)
    with pytest.raises(ConfigError, match=r"head\.precision is 'float16'"):
        validated(Settings, {"head": {"precision": "float16"}}, "test")


def test_the_head_phase_takes_the_step_of_the_whole_model(monkeypatch):
    """An oracle: per-example gradients of the whole model by the reference engine, with the same views."""
    contexts, real = [], loop.private_step
    monkeypatch.setattr(loop, "private_step", lambda context, step: contexts.append(context) or real(context, step))
    model = network()
    train(model=model, head=HEAD | {"steps": 1, "averaging": "none"}, method=dpcert.method("dp-stability", sigma=0.25))
    context = contexts[0]
    assert context.stored_views and isinstance(context.model, nn.Linear)
    fresh = network()
    for name, parameter in fresh.named_parameters():
        parameter.requires_grad_(name.startswith("3."))
    noise = normal_at_positions(context.mechanism.key, Purpose.VIEWS, 0, 24, (3, 1, 4, 4), torch.device("cpu"), 0)
    views = context.method.views(fresh, DATA.x_train, DATA.y_train, noise)
    expected = per_example_gradients(fresh, context.method.loss, views, DATA.y_train)
    head = nn.Linear(6, 3)
    head.load_state_dict({"weight": network()[3].weight, "bias": network()[3].bias})
    found = per_example_gradients(head, context.method.loss, context.images, DATA.y_train)
    for name in ("weight", "bias"):
        assert torch.allclose(found[name], expected[f"3.{name}"], atol=1e-6)


def only_head_trains(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("3."))


def test_the_curve_of_a_head_phase_computes_the_test_features_once():
    model = network()
    only_head_trains(model)
    test_set = curve._TestSet(model, DATA)
    for seed in range(3):
        torch.manual_seed(seed)
        nn.init.normal_(model[3].weight)
        assert test_set.accuracy() == curve.accuracy(model, DATA.x_test, DATA.y_test)
    kept = test_set._features
    test_set.accuracy()
    assert test_set._features is kept and kept.shape == (len(DATA.x_test), 6)


def test_features_of_the_test_set_do_not_outlive_the_head_phase():
    model = network()
    test_set = curve._TestSet(model, DATA)
    only_head_trains(model)
    test_set.accuracy()
    for parameter in model.parameters():
        parameter.requires_grad_()
    test_set.accuracy()
    with torch.no_grad():
        model[1].weight.neg_()
    only_head_trains(model)
    assert test_set.accuracy() == curve.accuracy(model, DATA.x_test, DATA.y_test)
    assert torch.allclose(test_set._features, model[:3](DATA.x_test))


def test_a_model_that_is_not_its_head_after_a_trunk_has_no_stored_features():
    assert features.trunk_of(Scaled(), METHOD, (1, 4, 4)) is None
    assert train(model=Scaled()).plan.steps == TOTAL  # it trains all the same


def test_adversarial_views_get_a_phase_of_their_own_even_for_the_head():
    settings = Settings.of(**KEYS, head=HEAD)
    assert [phase.trains for phase in phases_of(settings, 24, "head", adversarial=False)] == ["head"]
    assert [phase.trains for phase in phases_of(settings, 24, "head", adversarial=True)] == ["head", "head"]
    assert [phase.trains for phase in phases_of(settings, 24, "all", adversarial=False)] == ["head", "all"]
    run = train(method=dpcert.method("dp-smoothadv", sigma=0.25, smoothadv_warmup=0.0))
    assert run.plan.steps == TOTAL


def test_the_head_alone_spends_the_whole_budget():
    model = dpcert.build_model("linear", input_shape=(1, 4, 4), classes=3, train="head")
    run = train(model=model, noise_seed=None)
    assert run.plan.phases == () and run.plan.steps == 5 and run.ledger.opening["format"] == 1
    assert 2.97 <= run.epsilon <= 3.0


def test_verify_recomputes_epsilon_over_the_phases_and_notices_a_forgotten_one(tmp_path, capsys):
    train(tmp_path / "run", noise_seed=None)
    assert verify(tmp_path / "run") == 0
    assert "5 steps with noise multiplier" in capsys.readouterr().out
    ledger = Ledger.load(tmp_path / "run" / "ledger.jsonl")
    forged = Ledger()
    forged.open({key: value for key, value in ledger.opening.items() if key not in ("event", "format")})
    with pytest.raises(LedgerError):
        forged.authorise(5, 8, 1.0, 0.25)  # the first phase cannot be skipped
    forged.authorise(0, 8, ledger.opening["noise_multiplier"], ledger.opening["sampling_probability"])
    forged.close()
    (tmp_path / "run" / "ledger.jsonl").write_bytes(forged.without_macs())
    assert verify(tmp_path / "run") != 0


def test_verify_notices_a_phase_that_was_charged_with_the_noise_of_another(tmp_path, capsys):
    run = train(tmp_path / "run", noise_seed=None)
    first, last = run.plan.phases
    forged = Ledger()
    forged.open({key: value for key, value in run.ledger.opening.items() if key not in ("event", "format")})
    forged.authorise(0, first.steps, 3 * first.noise_multiplier, 1.0)
    forged.authorise(first.steps, last.steps, last.noise_multiplier, run.plan.rate_of(last))
    forged.close()
    (tmp_path / "run" / "ledger.jsonl").write_bytes(forged.without_macs())
    assert verify(tmp_path / "run") != 0
    assert "some steps have noise multiplier and q" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"phases": []}, {"phases": [{"trains": "head"}]}, {"phases": "two"}, {"steps": 99}, {"phases": None}]
)
def test_a_ledger_whose_phases_do_not_add_up_is_refused(tmp_path, change):
    run = train()
    facts = {key: value for key, value in run.ledger.opening.items() if key not in ("event", "format")}
    forged = Ledger()
    forged.open(facts | change)
    with pytest.raises(LedgerError):
        Ledger.parse(forged.without_macs(), "forged")


def test_a_phase_without_noise_is_not_private():
    run = train(noise_seed=None)
    facts = {key: value for key, value in run.ledger.opening.items() if key not in ("event", "format")}
    facts["phases"] = [{**facts["phases"][0], "noise_multiplier": 0.0}, facts["phases"][1]]
    forged = Ledger()
    forged.open(facts)
    from dpcert.privacy.statement import state

    assert state(forged).reason == "no noise is added"


def test_closed_form_releases_are_composed_exactly_with_sampled_ones():
    """Twenty full-batch steps are one Gaussian release: composing them one by one in buckets would only be looser."""
    sampled = GaussianSteps(1.0, 0.1, 10)
    one = compose([GaussianSteps(2.0, 1.0, 1), sampled], 1e-5)
    many = compose([GaussianSteps(2.0 * 20**0.5, 1.0, 20), sampled], 1e-5)
    assert many == pytest.approx(one, rel=1e-6)
