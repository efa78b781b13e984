"""Checkpoints and model files: what is loaded is what was written, or nothing is."""

import json

import pytest
import torch
from torch import nn

from dpcert.errors import RunError
from dpcert.store.durable import canonical_json, sha256_hex
from dpcert.store.runs import RunDirectory
from dpcert.training.curve import Point
from dpcert.training.state import Origin, Resumed, data_identity, load_checkpoint, model_bytes, read_model, save_checkpoint

KEY = bytes(range(32))
X, Y = torch.rand(6, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


def test_the_identity_of_the_data_covers_images_labels_and_shapes():
    identity = data_identity(KEY, X, Y)
    assert identity == data_identity(KEY, X.clone(), Y.clone())
    other_labels, other_pixel = Y.clone(), X.clone()
    other_labels[3] = 1
    other_pixel[5, 0, 1, 1] += 1e-6
    others = [(X, other_labels), (other_pixel, Y), (X.flip(0), Y), (X.view(6, 1, 4, 1), Y), (X[:5], Y[:5]), (X, Y.int())]
    assert all(data_identity(KEY, *other) != identity for other in others)
    assert data_identity(bytes(32), X, Y) != identity  # nobody without the key can compare data sets


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_state_from_before_config_and_curve_were_noted_goes_on(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    save_checkpoint(directory, 3, *made(), "head", Origin("identity", "0" * 64))
    older = json.loads(directory.state.read_text())
    del older["config_sha256"], older["curve"], older["check"]
    older["check"] = sha256_hex(canonical_json(older).encode())
    directory.state.write_text(canonical_json(older) + "\n")
    assert load_checkpoint(directory, *made()) == Resumed(3, "head", Origin("identity", None), [])


@pytest.mark.parametrize("changes", [{"step": True}, {"step": 3.0}, {"sha256": None}, {"config_sha256": 5}, {"more": 1}])
def test_a_state_of_other_kinds_is_refused_even_if_its_checksum_is_right(tmp_path, changes):
    directory = RunDirectory(tmp_path)
    directory.create()
    save_checkpoint(directory, 1, *made(), "head", Origin("identity", None))
    forged = {**json.loads(directory.state.read_text()), **changes}
    forged["checkpoint"] = f"checkpoint-{forged['step']}.safetensors"
    (directory.private / "checkpoint-1.safetensors").rename(directory.private / forged["checkpoint"])
    del forged["check"]
    forged["check"] = sha256_hex(canonical_json(forged).encode())
    directory.state.write_text(canonical_json(forged) + "\n")
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(directory, *made())


def test_a_damaged_checkpoint_is_refused(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    save_checkpoint(directory, 3, *made(), "head", Origin("identity", None), [Point(2, 0.5, None)])
    assert load_checkpoint(directory, *made()) == Resumed(3, "head", Origin("identity", None), [Point(2, 0.5, None)])
    file = directory.private / "checkpoint-3.safetensors"
    data = file.read_bytes()
    for position in range(0, len(data), 5):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(RunError, match="SHA-256"):
            load_checkpoint(directory, *made())


def test_every_changed_bit_of_a_model_is_seen(tmp_path):
    path = tmp_path / "model.safetensors"
    data = model_bytes(made()[0], {"method": "dpsgd", "epsilon": "3.0"})
    path.write_bytes(data)
    assert read_model(path)[1] == {"method": "dpsgd", "epsilon": "3.0"}
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(RunError):
            read_model(path)


def test_slots_of_another_optimiser_are_refused(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    model, _ = made()
    other = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    other(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    save_checkpoint(directory, 0, model, optimizer, "", Origin("", None))
    with pytest.raises(RunError, match="does not fit the optimizer"):
        load_checkpoint(directory, *made())
