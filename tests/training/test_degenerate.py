"""D7: bad records are refused before the ledger opens; after that nothing that one record does can stop or steer a step."""

import math

import numpy as np
import pytest
import torch

import dpcert
from dpcert.data.dataset import read_npz
from dpcert.errors import DataError
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.mechanism import Mechanism, opening_facts
from dpcert.rng import key_from_seed
from dpcert.training.loop import plan_for
from dpcert.training.settings import Settings
from dpcert.training.step import StepContext, clipped_sum, private_step
from tests.chains import needs_compiler
from tests.conftest import blobs

SETTINGS = {"epsilon": 3.0, "delta": 1e-5, "epochs": 2, "learning_rate": 0.5, "momentum": 0.0, "clip_norm": 0.1}
ENGINES = ("vmap", "layerwise", pytest.param("compiled", marks=needs_compiler))
METHODS = ("dpsgd", "dp-gaussian", "dp-smoothadv", "dp-stability", "dp-macer", "psac")
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "3e38": 3e38}


def problem(method="dpsgd", engine="vmap", poison=None, batch_size=10) -> StepContext:
    """A step's surroundings; record 7 holds what no loader would let in."""
    data = dpcert.Dataset(**blobs(0), classes=3, size=240)
    if poison is not None:
        data.x_train[7] = poison
    settings = Settings.of(**SETTINGS, batch_size=batch_size)
    chosen = dpcert.method(method, sigma=0.25)
    plan = plan_for(data, chosen, settings)
    model = dpcert.build_model("linear", input_shape=(1, 8, 8), classes=3, seed=0)
    key, ledger = key_from_seed(1, "test"), Ledger()
    ledger.open(opening_facts(plan, noise_is_secret=True))
    mechanism = Mechanism(plan, key, ledger)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engines = choose(engine, model, chosen.loss, (1, 8, 8))
    return StepContext(
        model, data.x_train, data.y_train, chosen, Clip(chosen.clip_rule, 0.1), engines, mechanism, optimizer, 480
    )


def sums(method, engine, kind, records):
    return clipped_sum(problem(method, engine, kind), torch.tensor(records), 0, 480)


@pytest.mark.filterwarnings("ignore::dpcert.errors.DpcertWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_a_record_whose_gradient_is_not_finite_contributes_nothing(method, engine, evidence):
    """Whatever it holds, the sum has the same bits, is finite, and is that of the others (to the order of additions)."""
    records, place = [3, 5, 7, 11, 20], 2
    clean, found = sums(method, engine, 0.5, records), {}
    for kind, value in BAD.items():
        found[kind] = sums(method, engine, value, records)
    spoiled = {kind: total for kind, total in found.items() if not math.isfinite(float(total.norms[place]))}
    assert {"nan", "inf", "-inf"} <= set(spoiled)
    for total in found.values():
        others = [i for i in range(5) if i != place]
        assert torch.equal(total.norms[others], clean.norms[others])  # not a bit of another record's gradient moves
        assert torch.isfinite(total.value).all()
    values = [total.value for total in spoiled.values()]
    assert all(torch.equal(values[0], value) for value in values[1:])
    assert float((values[0] - clean.value).norm()) <= 0.1  # one record's worth
    if method == "dpsgd":  # without noisy views (which stand by position) the others alone give the same sum
        torch.testing.assert_close(values[0], sums(method, engine, 0.5, [3, 5, 11, 20]).value, rtol=0, atol=1e-15)
    evidence("D7", figure=f"{method}, {engine}: a record of {', '.join(spoiled)} adds 0, the rest is bit-equal", trials=len(found),
             twin="weighted by 0 instead of emptied: NaN; seen")  # fmt: skip


def test_twin_weighting_by_zero_is_not_enough():
    """0 * inf is NaN: a sum that only multiplies by the factor is lost."""
    gradients = torch.tensor([[1.0, 2.0], [math.inf, 0.0]], dtype=torch.float64)
    factors = Clip(dpcert.method("dpsgd").clip_rule, 0.1).factors(gradients.norm(dim=1))
    assert float(factors[1]) == 0.0 and not torch.isfinite(factors @ gradients).all()


def test_an_empty_batch_is_a_noised_and_charged_step():
    made = problem(batch_size=1)
    mechanism = made.mechanism
    step = next(s for s in range(100) if len(mechanism.sample(240, s)) == 0)
    before = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    for s in range(step + 1):
        mechanism.charge(s)
    private_step(made, step)
    moved = torch.cat([p.detach().flatten() for p in made.model.parameters()]) - before
    noise = mechanism.plan.noise_multiplier * 0.1
    assert float(moved.std()) == pytest.approx(0.5 * noise, rel=0.2)  # 195 numbers
    assert mechanism.ledger.steps_authorised > step


@pytest.mark.filterwarnings("ignore::dpcert.errors.DpcertWarning")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("method", METHODS)
def test_no_exception_and_no_charge_depends_on_a_record(method, kind):
    """A whole training with a poisoned record: it ends, its ledger has the same bytes, its weights are numbers."""

    def train(poison):
        data = dpcert.Dataset(**blobs(0), classes=3, size=240)
        if poison is not None:
            data.x_train[7] = poison
            data.x_train[8, 0, 0] = poison
        options = {"epochs": 1, "batch_size": 24, "seed": 0, "noise_seed": 1}
        return dpcert.train("linear", data, dpcert.method(method, sigma=0.25), **options)

    clean, spoiled = train(None), train(BAD[kind])
    assert spoiled.ledger.events == clean.ledger.events and spoiled.ledger.head == clean.ledger.head
    assert all(torch.isfinite(p).all() for p in spoiled.model.parameters())


BAD_ARRAYS = {
    "NaN pixel": {"x_train": np.float32("nan")},
    "infinite pixel": {"x_train": np.float32("inf")},
    "pixel above 1": {"x_train": np.float32(1.5)},
    "negative pixel": {"x_train": np.float32(-0.1)},
    "label too large": {"y_train": 3},
    "negative label": {"y_train": -1},
    "NaN test pixel": {"x_test": np.float32("nan")},
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_records_are_refused_before_anything_is_charged_or_kept(name, tmp_path):
    arrays = blobs(0)
    for key, value in BAD_ARRAYS[name].items():
        arrays[key].flat[5] = value
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match="record"):
        dpcert.train("linear", read_npz(tmp_path / "x.npz", classes=3), "dpsgd", epochs=1, batch_size=10, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
