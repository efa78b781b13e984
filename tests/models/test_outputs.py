"""Models that return something else than logits, or whose forward pass cannot be mapped over examples: one clear line."""

import numpy as np
import pytest
import torch
from torch import nn

import dpcert
from dpcert.errors import ModelError
from dpcert.outputs import explaining_vmap, logits_of
from tests.conftest import blobs


class Odd(nn.Module):
    """A linear classifier whose output goes through a function."""

    def __init__(self, after, shape=(1, 8, 8)):
        super().__init__()
        self.layer = nn.Linear(int(np.prod(shape)), 3)
        self.after = after

    def forward(self, x):
        return self.after(self.layer(x.flatten(1)), x)


def in_place(logits, x):
    running = torch.zeros(len(logits), 3)
    running += logits
    return running


RETURNS = {
    "a tuple": (lambda logits, x: (logits, x), r"returns a tuple of 2.*return only the logits, e.g. output\[0\]"),
    "a list": (lambda logits, x: [logits], "returns a list of 1"),
    "a dict": (lambda logits, x: {"logits": logits, "loss": 0.0}, r"keys logits, loss.*return output\['logits'\]"),
    "an empty dict": (lambda logits, x: {}, "a mapping"),
    "nothing": (lambda logits, x: None, "returns nothing"),
    "a number": (lambda logits, x: 3.0, "a float"),
    "an array": (lambda logits, x: logits.detach().numpy(), "a ndarray|a Tensor"),
    "classes": (lambda logits, x: logits.argmax(dim=1), "torch.int64"),
    "one axis": (lambda logits, x: logits[:, 0], "shape"),
    "three axes": (lambda logits, x: logits[:, :, None], "shape"),
    "one row": (lambda logits, x: logits[:1], "shape"),
}
FORWARDS = {
    "item": (lambda logits, x: torch.stack([row * row.mean().item() for row in logits]), r"\.item\(\)"),
    "a branch": (lambda logits, x: torch.stack([row if row.mean() > 0 else 2 * row for row in logits]), "torch.where"),
    "a while loop": (lambda logits, x: logits * len([0 for _ in iter(lambda: bool(logits.sum() > 1e9), False)]), "torch.where"),
    "nonzero": (lambda logits, x: torch.stack([row + row[row > 0].sum() for row in logits]), "torch.where"),
    "tolist": (lambda logits, x: logits * torch.tensor(x.mean(dim=(1, 2, 3)).tolist())[:, None], "tensor"),
    "in place": (in_place, "in place"),
    "random": (lambda logits, x: logits + 1e-9 * torch.rand(3), "random numbers"),
}


def train(model):
    data = dpcert.Dataset(**blobs(0))
    return dpcert.train(model, data, "dpsgd", epochs=1, batch_size=60, noise_seed=1)


def one_line(call, words):
    with pytest.raises(ModelError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("name", RETURNS)
def test_what_is_no_logits_is_named_in_training_and_in_certification(name):
    after, words = RETURNS[name]
    one_line(lambda: train(Odd(after)), words)
    if name != "one row":  # the first row alone is what one input gives
        x = torch.rand(2, 1, 8, 8)
        one_line(lambda: dpcert.certify(Odd(after), x, [0, 0], sigma=0.5, n=10), words)
        one_line(lambda: dpcert.predict(Odd(after), x, sigma=0.5, n=10), words)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_pass_that_cannot_be_mapped_is_explained(name):
    after, words = FORWARDS[name]
    one_line(lambda: train(Odd(after)), words)


def test_memory_that_runs_out_is_no_fault_of_the_model_and_other_words_are_kept():
    with pytest.raises(ModelError, match="something else"), explaining_vmap():
        raise RuntimeError("something else\nand a second line")
    with pytest.raises(RuntimeError, match="allocate") as caught, explaining_vmap():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert not isinstance(caught.value, ModelError)


def test_images_with_the_channels_last_are_explained():
    x = np.random.default_rng(0).random((4, 28, 28, 3), dtype=np.float32)
    advice = r"images look like \[N,H,W,C\]; transpose to \[N,C,H,W\]: x.transpose\(0, 3, 1, 2\)"
    with pytest.raises(dpcert.errors.DataError, match=advice):
        dpcert.Dataset(x, np.zeros(4, dtype=int), x, np.zeros(4, dtype=int), classes=2)
    model = dpcert.build_model("cnn", input_shape=(3, 28, 28))
    for call in (
        lambda: dpcert.certify(model, torch.from_numpy(x), [0] * 4, sigma=0.5, n=10),
        lambda: dpcert.predict(model, torch.from_numpy(x), sigma=0.5, n=10),
    ):
        one_line(call, advice)
    dpcert.Dataset(x.transpose(0, 3, 1, 2), np.zeros(4, dtype=int), x.transpose(0, 3, 1, 2), np.zeros(4, dtype=int), classes=2)


@pytest.mark.parametrize("shape", [(16, 4, 4), (1, 8, 8), (3, 8, 8), (1, 8, 1), (3, 3, 3), (1, 1, 1), (8, 1, 1)])
def test_images_that_only_resemble_it_are_taken(shape):
    x = np.zeros((4, *shape), dtype=np.uint8)
    assert dpcert.Dataset(x, np.zeros(4, dtype=int), x, np.zeros(4, dtype=int), classes=2).input_shape == shape


def test_logits_are_handed_on():
    logits = torch.rand(5, 3)
    assert logits_of(logits) is logits and logits_of(logits, 5, 3) is logits
    for rows, classes in ((4, 3), (5, 4)):
        with pytest.raises(ModelError):
            logits_of(logits, rows, classes)
