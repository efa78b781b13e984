"""Images that are converted when they are used: the same numbers as before, a quarter of the memory, and read-only."""

import copy
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from dpcert.data import images as module
from dpcert.data.dataset import Dataset
from dpcert.data.images import Images, RowsInMemory, chunks, rows_between
from dpcert.errors import DataError
from dpcert.runs.identity import images_sha256
from dpcert.training.provenance import record_hashes
from dpcert.training.state import data_identity

COUNT = 23
BYTES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (COUNT, 3, 5, 4), dtype=np.uint8))
FLOATS = BYTES.float().div_(255.0)  # as all images were kept before


def images() -> Images:
    return Images(RowsInMemory(BYTES))


def data(x=BYTES):
    labels = torch.arange(COUNT) % 3
    return Dataset(x, labels, x[:7], labels[:7])


class Whole:
    """A twin of `Images` that converts everything whatever is asked for, and one that forgets to divide."""

    def __init__(self, divided: bool) -> None:
        self.made = FLOATS.clone() if divided else BYTES.float()

    def __getitem__(self, index):
        return self.made[index]


ROWS = st.integers(-COUNT, COUNT - 1)
INDICES = st.one_of(
    ROWS,
    st.slices(COUNT).filter(lambda one: one.step is None or one.step > 0),
    st.lists(ROWS, max_size=9),
    st.lists(ROWS, max_size=9).map(lambda rows: torch.tensor(rows, dtype=torch.long)),
    st.lists(ROWS, max_size=9).map(lambda rows: np.array(rows, dtype=np.int64)),
    st.lists(st.booleans(), min_size=COUNT, max_size=COUNT).map(torch.tensor),
    st.tuples(ROWS, st.integers(0, 2)),
    st.tuples(st.slices(COUNT).filter(lambda one: one.step is None or one.step > 0), st.integers(0, 2), st.just(slice(1, 3))),
    st.sampled_from([None, Ellipsis, (), (Ellipsis, 0), (slice(None), torch.tensor([0, 2])), torch.tensor([[0, 1], [5, -1]])]),
)


@given(INDICES)
def test_rows_are_those_of_the_float_tensor_to_the_bit(index):
    found = images()[index]
    assert type(found) is torch.Tensor and torch.equal(found, FLOATS[index]) and found.dtype == torch.float32


def test_twin_bytes_that_are_not_divided_are_seen():
    assert torch.equal(Whole(divided=True)[3], FLOATS[3]) and not torch.equal(Whole(divided=False)[3], FLOATS[3])


@pytest.mark.parametrize("index", [COUNT, -COUNT - 1, [0, COUNT], torch.tensor([0.5])])
def test_rows_that_are_not_there_are_refused(index):
    with pytest.raises(IndexError):
        images()[index]
    with pytest.raises(IndexError):
        FLOATS[index]


def test_it_is_a_tensor_to_those_who_use_it():
    x = images()
    assert isinstance(x, torch.Tensor) and x.shape == FLOATS.shape and x.dtype == torch.float32 and len(x) == COUNT
    assert torch.equal(x, FLOATS) and torch.equal(x + 1, FLOATS + 1) and float(x.max()) == float(FLOATS.max())
    assert np.array_equal(x.numpy(), FLOATS.numpy()) and np.array_equal(np.asarray(x), FLOATS.numpy())
    assert x.tolist() == FLOATS.tolist() and torch.equal(torch.cat([x, x])[COUNT:], FLOATS)
    assert all(torch.equal(own, other) for own, other in zip(x, FLOATS, strict=True))
    layer = torch.nn.Conv2d(3, 2, 3)
    assert torch.equal(layer(x), layer(FLOATS))
    assert torch.equal(
        torch.func.vmap(lambda one: layer(one[None])[0])(x), torch.func.vmap(lambda one: layer(one[None])[0])(FLOATS)
    )
    batch, labels = next(iter(DataLoader(TensorDataset(x, torch.arange(COUNT)), batch_size=4)))
    assert torch.equal(batch, FLOATS[:4]) and labels.tolist() == [0, 1, 2, 3]
    assert torch.equal(copy.copy(x), FLOATS) and torch.equal(copy.deepcopy(x), FLOATS)
    assert "Images(shape=[23, 3, 5, 4]" in repr(x)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(3, 0.5),
        lambda x: x.mul_(2.0),
        lambda x: x[3:4].shape and x.zero_(),
        lambda x: torch.add(FLOATS, 1.0, out=x),
    ],
)
def test_a_change_is_refused_and_never_lost(write):
    x = images()
    with pytest.raises(DataError, match="read-only"):
        write(x)
    assert torch.equal(x, FLOATS)
    copied = x.clone()
    copied[3] = 0.5
    assert type(copied) is torch.Tensor and torch.equal(x, FLOATS)


def test_bytes_stay_bytes_in_a_data_set():
    made = data()
    assert isinstance(made.x_train, Images) and isinstance(made.x_test, Images)
    assert isinstance(data(FLOATS).x_train, torch.Tensor) and not isinstance(data(FLOATS).x_train, Images)
    held_out = made.holding_out(4)
    assert isinstance(held_out.x_train, Images) and isinstance(held_out.x_validation, Images)
    assert torch.equal(held_out.x_train, FLOATS[4:]) and torch.equal(held_out.x_validation, FLOATS[:4])
    assert torch.equal(rows_between(held_out.x_train, 2, 5), FLOATS[6:9])


class Counting(RowsInMemory):
    """Remembers the most rows that were taken at once: the largest tensor that was made."""

    most = 0

    def take(self, indices):
        self.most = max(self.most, len(indices))
        return super().take(indices)


def test_digests_are_those_of_the_float_tensors_and_no_more_than_a_chunk_is_made(monkeypatch):
    """Digests in stored results were taken of float images: they stay the same values."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 60 * 5)  # five images
    source, labels = Counting(BYTES), torch.arange(COUNT)
    x = Images(source)
    before = hashlib.sha256(FLOATS.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert images_sha256(x, labels) == images_sha256(FLOATS, labels) == before
    for form in ("", "records:"):  # of older versions, of this one: the data may change its place and dtype, not its values
        assert data_identity(bytes(32), x, labels, like=form) == data_identity(bytes(32), FLOATS, labels, like=form)
        assert data_identity(bytes(32), x, labels, like=form) != data_identity(bytes(32), FLOATS, labels + 1, like=form)
        assert data_identity(bytes(32), x, labels, like=form) != data_identity(bytes(32), 0.999 * FLOATS, labels, like=form)
    assert torch.equal(torch.cat(list(chunks(x))), FLOATS)
    assert source.most == 5
    monkeypatch.setattr("dpcert.data.hashes._ROWS", 6)
    assert np.array_equal(record_hashes(x), record_hashes(FLOATS)) and source.most == 6
    x.max()
    assert source.most == COUNT  # the twin: what converts everything is seen


def test_training_takes_the_rows_of_its_batches_only(monkeypatch):
    """And gives the same weights as on float images."""
    import dpcert

    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 60 * 5)
    monkeypatch.setattr("dpcert.data.hashes._ROWS", 5)
    rows = BYTES.repeat(20, 1, 1, 1)
    labels = torch.arange(len(rows)) % 3
    source = Counting(rows)

    def train(x):
        made = Dataset(x, labels, FLOATS, labels[:COUNT], classes=3)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 3))
        settings = {"epochs": 2, "batch_size": 8, "learning_rate": 0.1, "noise_seed": 1, "delta": 1e-3}
        return dpcert.train(model, made, "dp-gaussian", **settings).model[1].weight

    assert torch.equal(train(Images(source)), train(rows.float().div_(255.0)))
    assert source.most <= 32


def test_certificates_take_one_image_at_a_time_and_are_those_of_floats(tmp_path, monkeypatch):
    """`dpcert.certify` and the rows of a run: never all images at once, and the same votes."""
    import dpcert
    from dpcert.certification import bank, sweep

    monkeypatch.setattr(sweep, "_CHECKED_BYTES", 4 * 60 * 5)
    monkeypatch.setattr(bank, "PROBED", 4)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 3))
    labels, source, request = torch.arange(COUNT) % 3, Counting(BYTES), sweep.Request(0.5, 10, 50)
    found = []
    for x in (Images(source), FLOATS):
        certs = dpcert.certify(model, x, labels, sigma=0.5, n0=10, n=50, seed=0)
        path = tmp_path / f"{type(x).__name__}.tsv"
        rows = sweep.certify_to_file(model, x, labels, range(0, COUNT, 2), path, request, key=bytes(32))
        decided = sweep.decide_to_file(model, x, labels, [1, 4], path.with_suffix(".r"), request, 0.1, key=bytes(32))
        results = [(row.idx, row.radius) for row in rows], [(row.idx, row.robust) for row in decided]
        found.append((certs.radius.tolist(), *results))
    assert found[0] == found[1] and 1 < source.most <= 10
    dpcert.predict(model, Images(source), sigma=0.5, n=10)
    assert source.most <= 10
