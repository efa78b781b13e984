"""Which engine a run uses: measured once, the same on all ranks, and repeated when the run is resumed."""

import contextlib
import json
import signal
from unittest import mock

import pytest
import torch

import dpcert
from dpcert.errors import ConfigError, RunError
from dpcert.gradients.choose import choose, name_of, repeat
from dpcert.gradients.compiled import Compiled
from dpcert.gradients.layerwise import Layerwise
from dpcert.interrupts import Interrupted
from dpcert.losses import cross_entropy
from dpcert.scale.world import ALONE, join
from dpcert.store.weights import read_facts
from dpcert.training.engines import engines_for
from tests.chains import needs_compiler
from tests.scale.group import run_ranks
from tests.training.test_loop import files, train, weights

SHAPE, MANY = (1, 8, 8), 10**9


def network():
    return dpcert.build_model("linear", input_shape=SHAPE, classes=3, seed=0)


def measured(compiled: float, plain: float = 1.0):
    """The processor times that the engines are said to take."""
    return mock.patch(
        "dpcert.gradients.choose._seconds", lambda engine, *_: compiled if isinstance(engine, Compiled) else plain
    )


@needs_compiler
@pytest.mark.parametrize(
    ("compiled", "rows", "kind"),
    [(0.5, MANY, Compiled), (0.95, MANY, Layerwise), (2.0, MANY, Layerwise), (0.5, 1000, Layerwise), (0.5, 0, Layerwise)],
)
def test_auto_compiles_only_long_runs_and_only_what_is_clearly_faster(compiled, rows, kind):
    with measured(compiled):
        engines = choose("auto", network(), cross_entropy, SHAPE, workers=3, rows=rows)
    assert len(engines) == 3 and all(type(engine) is kind for engine in engines)


@needs_compiler
def test_auto_does_not_use_machine_code_that_disagrees():
    with (
        measured(0.5),
        mock.patch.object(Compiled, "per_example", lambda *a: Layerwise().per_example(*a[1:3], a[3] + 0.1, a[4])),
    ):
        (engine,) = choose("auto", network(), cross_entropy, SHAPE, rows=MANY)
        assert isinstance(engine, Layerwise)
        with pytest.raises(ConfigError, match="compiled does not support this model: its gradient of '1.weight' differs"):
            choose("compiled", network(), cross_entropy, SHAPE)


def test_a_forced_engine_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "")
    with pytest.raises(ConfigError, match="compiled does not support this model.*no C\\+\\+ compiler.*use auto"):
        choose("compiled", network(), cross_entropy, SHAPE)
    with pytest.raises(ConfigError, match="checkpointing is on, but engine compiled keeps all activations"):
        choose("compiled", network(), cross_entropy, SHAPE, checkpointing=True)
    (engine,) = choose("auto", network(), cross_entropy, SHAPE, rows=MANY)
    assert isinstance(engine, Layerwise)


@needs_compiler
def test_a_name_says_which_bits():
    (engine,) = choose("compiled", network(), cross_entropy, SHAPE)
    name = name_of(engine)
    assert name.startswith("compiled ") and len(name) == 25
    assert len(repeat(name, network(), SHAPE, workers=2)) == 2
    assert repeat("compiled 0123456789abcdef", network(), SHAPE) is None
    assert name_of(Layerwise()) == "layerwise"


@needs_compiler
def test_the_compiled_engine_trains_alike_and_says_so(tmp_path):
    """Same ledger, the weights within rounding errors; the model's header names the engine."""
    base, other = train(tmp_path / "a"), train(tmp_path / "b", engine="compiled")
    assert (tmp_path / "a" / "ledger.jsonl").read_bytes() == (tmp_path / "b" / "ledger.jsonl").read_bytes()
    torch.testing.assert_close(weights(base.model), weights(other.model), rtol=0, atol=1e-5)
    facts = [read_facts((tmp_path / run / "model.safetensors").read_bytes(), run) for run in "ab"]
    assert "engine" not in facts[0] and facts[1]["engine"].startswith("compiled ")


def stopped(out, **changes):
    def stop_at(done, total, **facts):
        if done == 137:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(out, progress=stop_at, **changes)
    return json.loads((out / "private" / "state.json").read_text())["engine"]


@needs_compiler
def test_a_resumed_run_repeats_its_choice_to_the_same_bytes(tmp_path):
    with measured(1e-9, plain=1e9):
        train(tmp_path / "whole")
        name = stopped(tmp_path / "run")
    assert name.startswith("compiled ")
    with measured(1.0, plain=1e-9):  # now the other engine would be chosen
        train(tmp_path / "run")
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_a_resumed_run_does_not_turn_to_machine_code(tmp_path):
    train(tmp_path / "whole")
    assert stopped(tmp_path / "run") == "layerwise"
    with measured(1e-9, plain=1e9):
        train(tmp_path / "run")
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@needs_compiler
def test_a_machine_that_cannot_repeat_it_says_so_in_one_line(tmp_path, monkeypatch):
    with measured(1e-9, plain=1e9):
        stopped(tmp_path / "run")
    state = (tmp_path / "run" / "private" / "state.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "")
        with pytest.raises(RunError, match="cannot be made here.*--set gradients.engine=layerwise") as refused:
            train(tmp_path / "run")
        assert "\n" not in str(refused.value)
        assert (tmp_path / "run" / "private" / "state.json").read_bytes() == state  # nothing is lost
        train(tmp_path / "run", engine="layerwise")  # the way that the message names


@needs_compiler
def test_other_machine_code_is_not_the_same_choice(tmp_path):
    with measured(1e-9, plain=1e9):
        stopped(tmp_path / "run")
    with mock.patch("dpcert.chains.chain.Chain.fingerprint", lambda self: "0" * 16), pytest.raises(RunError, match="same bits"):
        train(tmp_path / "run")


def _named(asked, before=""):
    world = join()
    with measured(0.5):
        engines, name = engines_for(world, asked, before, network(), cross_entropy, SHAPE, MANY)
    return name, type(engines[0]).__name__


@needs_compiler
@pytest.mark.parametrize("able", [True, False])
def test_all_ranks_use_the_same_engine(tmp_path, able):
    names = run_ranks(tmp_path, 2, _named, "auto", **({} if able else {"rank1": {"CXX": ""}}))
    assert names[0] == names[1] and names[0][1] == ("Compiled" if able else "Layerwise")


@needs_compiler
def test_alone_is_the_same_as_on_ranks(tmp_path):
    with measured(0.5):
        _, name = engines_for(ALONE, "auto", "", network(), cross_entropy, SHAPE, MANY)
    assert run_ranks(tmp_path, 2, _named, "auto", name) == [(name, "Compiled")] * 2


class Wide(torch.nn.Module):
    """Not a chain, with weights that are large enough for a choice of arithmetic."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 128, 3, stride=3)
        self.last = torch.nn.Linear(128, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.relu(self.second(x + torch.tanh(x))).mean(dim=(2, 3)))


def arithmetic_takes(seconds):
    """The processor time that each arithmetic is said to take, by the start of its name."""
    return mock.patch(
        "dpcert.gradients.choose._seconds",
        lambda engine, *_: next(t for name, t in seconds.items() if engine.arithmetic.name.startswith(name)),
    )


@contextlib.contextmanager
def always_measured(seconds):
    with (
        arithmetic_takes(seconds),
        mock.patch("dpcert.gradients.choose._WORTH_COMPARING", 0),
        mock.patch("dpcert.gradients.choose._WORTH_COMPILING", 0.0),
    ):
        yield


FAST_SUMS, FAST_BLAS = {"sums": 0.5, "blas": 0.7, "": 1.0}, {"blas": 0.5, "": 1.0}


@needs_compiler
@pytest.mark.parametrize(
    ("seconds", "rows", "start"),
    [
        (FAST_SUMS, MANY, "sums-"),
        ({"blas sums": 0.5, "": 1.0}, MANY, "blas sums-"),
        ({"": 1.0}, MANY, ""),
        (FAST_SUMS, 1000, ""),
    ],
)
def test_auto_takes_the_fastest_arithmetic_of_a_long_run_with_large_weights(seconds, rows, start):
    with arithmetic_takes({name: 100 * t for name, t in seconds.items()}):
        engines = choose("auto", Wide(), cross_entropy, SHAPE, workers=3, rows=rows)
    assert {engine.arithmetic.name for engine in engines} == {engines[0].arithmetic.name} and len(engines) == 3
    assert engines[0].arithmetic.name.startswith(start) and bool(engines[0].arithmetic.name) == bool(start)


@needs_compiler
def test_a_resumed_run_repeats_its_arithmetic_to_the_same_bytes(tmp_path):
    with always_measured(FAST_SUMS | {"blas": 0.9}):
        train(tmp_path / "whole", model=Wide())
        name = stopped(tmp_path / "run", model=Wide())
    assert name.startswith("layerwise sums-")
    with arithmetic_takes(FAST_BLAS):
        train(tmp_path / "run", model=Wide())
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    assert read_facts((tmp_path / "run" / "model.safetensors").read_bytes(), "run")["engine"] == name


@needs_compiler
def test_a_run_that_runs_out_of_memory_may_resume_with_checkpointing(tmp_path):
    """The choice does not hide the setting, and the bytes are the same."""
    with always_measured(FAST_SUMS | {"blas": 0.9}):
        train(tmp_path / "whole", model=Wide())
        stopped(tmp_path / "run", model=Wide())
    with mock.patch.object(Layerwise, "_add_checkpointed", autospec=True, side_effect=Layerwise._add_checkpointed) as used:
        train(tmp_path / "run", model=Wide(), checkpointing=True)
    assert used.called
    for name in ("model.safetensors", "ledger.jsonl", "training.tsv"):
        assert files(tmp_path / "run")[name] == files(tmp_path / "whole")[name]


@needs_compiler
def test_a_machine_without_the_sums_of_a_run_says_so(tmp_path):
    with always_measured(FAST_SUMS | {"blas": 0.9}):
        stopped(tmp_path / "run", model=Wide())
    with mock.patch("dpcert.gradients.parts.sum_code", lambda: None):
        with pytest.raises(RunError, match="cannot be made here with the same bits.*gradients.engine=layerwise"):
            train(tmp_path / "run", model=Wide())
        train(tmp_path / "run", model=Wide(), engine="layerwise")
