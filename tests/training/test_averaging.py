"""Averages of the weights: what they are, that they are what is released, and that the raw weights train on untouched."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import dpcert
from dpcert.errors import DpcertWarning, RunError
from dpcert.interrupts import Interrupted
from dpcert.release.files import read_public_files
from dpcert.release.verify import FAILED, NOT_CHECKED, OK, verify
from dpcert.training.averaging import AVERAGES, Average, AveragingKeys
from dpcert.training.curve import accuracy
from dpcert.training.state import model_bytes, read_model
from tests.training.knobs import BASE, DATA, METHOD, STEPS, files, fresh, notes, small_blocks, train, weights

__all__ = ["notes", "small_blocks"]
CHOICES = [{"averaging": "ema", "ema_decay": 0.7}, {"averaging": "tail", "tail": 0.5}, {"averaging": "tail", "tail": 1.0}]


def plain_ema(iterates, decay):
    """Exponential weights, by a plain loop over all iterates at once."""
    weight = [decay ** (len(iterates) - 1 - place) for place in range(len(iterates))]
    return sum(w * iterate.double() for w, iterate in zip(weight, iterates, strict=True)) / sum(weight)


def expected(choice, iterates):
    if choice["averaging"] == "ema":
        return plain_ema(iterates, choice["ema_decay"])
    return torch.stack(iterates).double()[-max(1, round(choice["tail"] * len(iterates))) :].mean(dim=0)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_released_weights_are_the_average_of_the_iterates(choice, notes):
    """Twins: the last iterate, and an average that begins with the initial weights."""
    run = train(**choice)
    found = weights(run.model).double()
    torch.testing.assert_close(found, expected(choice, notes.iterates), rtol=0, atol=1e-6)
    with_initial = [weights(fresh()), *notes.iterates]
    for twin in (notes.iterates[-1].double(), expected({**choice, "tail": 1.0}, with_initial)):
        assert not torch.allclose(found, twin, atol=1e-5)


def test_averaging_changes_no_step_and_no_byte_of_the_ledger(tmp_path, notes):
    train(tmp_path / "raw")
    for number, choice in enumerate(CHOICES):
        train(tmp_path / str(number), **choice)
        assert files(tmp_path / str(number))["ledger.jsonl"] == files(tmp_path / "raw")["ledger.jsonl"]
        for place in range(STEPS):
            assert torch.equal(notes.iterates[place], notes.iterates[(number + 1) * STEPS + place])


@given(averaging=st.sampled_from(["ema", "tail"]), knob=st.floats(1e-6, 1, exclude_max=True), steps=st.integers(1, 60))
def test_an_average_stays_within_the_iterates_and_ends_where_its_definition_says(averaging, knob, steps):
    choice = {"averaging": averaging, {"ema": "ema_decay", "tail": "tail"}[averaging]: knob}
    parameter = nn.Parameter(torch.zeros(3))
    average = Average([parameter], AveragingKeys(**choice), steps)
    iterates = list(torch.randn(steps, 3, generator=torch.Generator().manual_seed(steps)))
    for done, iterate in enumerate(iterates, 1):
        parameter.data.copy_(iterate)
        average.include(done)
        assert 0 < AVERAGES[averaging](AveragingKeys(**choice), done, steps) <= 1
        assert (average.values[0] <= torch.stack(iterates[:done]).amax(dim=0).double() + 1e-12).all()
    torch.testing.assert_close(average.values[0], expected(choice, iterates), rtol=0, atol=1e-9)


def test_the_raw_weights_come_back_bit_for_bit_and_buffers_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = Average(model.parameters(), AveragingKeys(averaging="tail", tail=1.0), 2)
    for done in (1, 2):
        for parameter in model.parameters():
            parameter.data += 0.1 * done
        average.include(done)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError), average.released():
        inside = {name: value.clone() for name, value in model.state_dict().items()}
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    parameters = {name for name, _ in model.named_parameters()}
    assert {name for name in before if not torch.equal(inside[name], before[name])} == parameters


def test_without_averaging_nothing_is_held():
    average = Average(fresh().parameters(), AveragingKeys(), STEPS)
    average.include(1)
    assert average.values == [] and AveragingKeys().averaging_in_words is None


@pytest.mark.parametrize("choice", CHOICES[:2], ids=str)
def test_the_average_is_what_is_written_evaluated_and_loaded(tmp_path, choice, notes):
    run = train(tmp_path / "run", learning_rate=5.0, **choice)
    tensors, header = read_model(tmp_path / "run" / "model.safetensors")
    written = torch.cat([tensors[name].flatten() for name, _ in run.model.named_parameters()])
    assert torch.equal(written, weights(run.model)) and not torch.equal(written, notes.iterates[-1])
    assert torch.equal(weights(train(tmp_path / "run", learning_rate=5.0, **choice).model), written)  # finished: only loaded
    words = {"ema": "ema, ema_decay 0.7", "tail": "tail, tail 0.5"}[choice["averaging"]]
    assert header["averaging"] == words
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["clean_accuracy"] == accuracy(run.model, DATA.x_test, DATA.y_test)


def test_the_curve_shows_the_average_at_each_of_its_points(tmp_path, notes):
    """Twin: the accuracies of the raw weights, which are others here."""
    choice = {"averaging": "tail", "tail": 1.0, "epsilon": 0.05, "batch_size": 24, "epochs": STEPS}
    train(tmp_path / "run", **choice)
    lines = [line.split("\t") for line in (tmp_path / "run" / "training.tsv").read_text().splitlines()]
    place = lines[0].index("test_accuracy")
    shown, model = [float(line[place]) for line in lines[1:]], fresh()

    def accuracies(vectors):
        found = []
        for vector in vectors:
            nn.utils.vector_to_parameters(vector, model.parameters())
            found.append(accuracy(model, DATA.x_test, DATA.y_test))
        return found

    means = [torch.stack(notes.iterates[:done]).double().mean(dim=0).float() for done in range(1, STEPS + 1)]
    assert shown == pytest.approx(accuracies(means)) and shown != pytest.approx(accuracies(notes.iterates))


def test_a_checkpoint_keeps_raw_and_averaged_weights(tmp_path, notes, small_blocks):
    def stop(done, total, **facts):
        if done == 5:
            import signal

            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(tmp_path / "run", progress=stop, **CHOICES[0])
    stored = load_file(tmp_path / "run" / "private" / "checkpoint-5.safetensors")
    raw = torch.cat([value.flatten() for name, value in stored.items() if name.startswith("model.")])
    averaged = torch.cat([stored[f"average.{place}"].flatten() for place in range(2)])
    names = [name.removeprefix("model.") for name in stored if name.startswith("model.")]
    sizes = {name: value.numel() for name, value in fresh().named_parameters()}
    own = dict(zip(names, raw.split([sizes[name] for name in names]), strict=True))
    assert torch.equal(torch.cat([own[name] for name in sizes]), notes.iterates[4])
    assert averaged.dtype == torch.float64
    torch.testing.assert_close(averaged, plain_ema(notes.iterates, 0.7), rtol=0, atol=1e-12)


def test_a_checkpoint_of_another_averaging_is_refused(tmp_path):
    from dpcert.store.runs import RunDirectory
    from dpcert.training.state import Origin, load_checkpoint, save_checkpoint

    def parts(choice):
        model = fresh()
        return (
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            Average(model.parameters(), AveragingKeys(**choice), 3).values,
        )

    directory = RunDirectory(tmp_path)
    directory.create()
    choices = ({}, CHOICES[0])
    for before, now in (choices, choices[::-1]):
        model, optimizer, average = parts(before)
        save_checkpoint(directory, 1, model, optimizer, "", Origin("", None), average=average)
        assert load_checkpoint(directory, *parts(before)) is not None
        with pytest.raises(RunError, match="does not fit train.averaging"):
            load_checkpoint(directory, *parts(now))


def test_an_averaged_run_verifies_and_a_header_of_another_averaging_does_not(tmp_path):
    run = train(tmp_path / "run", **CHOICES[0])
    assert {check.outcome for check in verify(read_public_files(tmp_path / "run"))} <= {OK, NOT_CHECKED}
    path = tmp_path / "run" / "model.safetensors"
    header = read_model(path)[1]
    for averaging in ({}, {"averaging": "ema, ema_decay 0.9"}):
        others = {name: value for name, value in header.items() if name != "averaging"}
        path.write_bytes(model_bytes(run.model, {**others, **averaging}))
        failed = [check for check in verify(read_public_files(tmp_path / "run")) if check.outcome == FAILED]
        assert any("averaging" in check.detail for check in failed)


def test_averaged_weights_are_known_to_have_seen_the_records():
    """A copy of what was released is charged for both trainings."""
    first, copy = train(noise_seed=None, **CHOICES[0]), fresh()
    copy.load_state_dict(first.model.state_dict())
    with pytest.warns(DpcertWarning, match="already been trained"):
        second = dpcert.train(copy, DATA, METHOD, **(BASE | {"noise_seed": None}))
    assert second.epsilon > 1.2 * first.epsilon
