"""Map-style datasets: the same training as from arrays, read by index; bad items are refused before a ledger opens (D7)."""

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import dpcert
from dpcert.data import ahead as ahead_module
from dpcert.data import items as module
from dpcert.data.ahead import RowsAhead
from dpcert.data.dataset import read_custom
from dpcert.data.images import Images
from dpcert.data.items import MOST_FAILURES, check_items
from dpcert.data.reading import pixels_and_label, records_of
from dpcert.errors import DataError, RunError
from dpcert.runs.identity import images_sha256
from dpcert.training.provenance import record_hashes
from dpcert.training.state import data_identity
from tests.conftest import blobs
from tests.data import own_items as own
from tests.data.own_items import COUNT, Items

pytestmark = pytest.mark.filterwarnings("ignore:this model has already been trained")
SETTINGS = {"epochs": 2, "batch_size": 10, "learning_rate": 0.1, "noise_seed": 1, "delta": 1e-3}


def in_memory(count=COUNT) -> dpcert.Dataset:
    x, y = np.stack([own.pixels(index) for index in range(count)]), np.arange(count) % 3
    return dpcert.Dataset(x, y, x[:9], y[:9])


def by_index(train=None, **options) -> dpcert.Dataset:
    return dpcert.Dataset.from_items(Items() if train is None else train, Items(9), **options)


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(90, 3))


def weights(data, method="dp-gaussian", **settings) -> torch.Tensor:
    return dpcert.train(linear(), data, method, **{**SETTINGS, **settings}).model[1].weight


@pytest.mark.parametrize("workers", [0, 2])
def test_items_are_the_arrays_they_hold(workers):
    told = []
    data = by_index(workers=workers, progress=lambda done, total, **facts: told.append((done, total)))
    expected = in_memory()
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(data, name), getattr(expected, name))
    assert torch.equal(data.x_train[[5, 1, -1]], expected.x_train[[5, 1, -1]])
    assert told == sorted(told) and told[-1] == (COUNT + 9, COUNT + 9)
    assert np.array_equal(record_hashes(data.x_train), record_hashes(expected.x_train))
    assert images_sha256(data.x_test, data.y_test) == images_sha256(expected.x_test, expected.y_test)
    for one, other in ((data, expected), (data.holding_out(7), expected.holding_out(7))):
        assert data_identity(bytes(32), one.x_train, one.y_train) == data_identity(bytes(32), other.x_train, other.y_train)
        assert torch.equal(one.x_train[:3], other.x_train[:3])
    assert (data.classes, data.size, data.input_shape) == (3, COUNT, (3, 6, 5))


@pytest.mark.parametrize(("threads", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_training_by_index_gives_the_weights_of_memory(threads, workers, monkeypatch):
    """With any number of threads that ask, readers, and pieces that are held at once."""
    monkeypatch.setattr(ahead_module, "_PIECE_ROWS", 3)
    data, expected = by_index(None if workers else own.Torch(), workers=workers), in_memory()
    before = torch.get_num_threads()
    try:
        for held_bytes in (0, 3 * 360 * 2, 1 << 20):
            monkeypatch.setattr(ahead_module, "AHEAD_BYTES", held_bytes)
            found, wanted = (weights(each, threads=threads) for each in (data, expected))
            assert torch.equal(found, wanted)
    finally:
        torch.set_num_threads(before)


def test_a_pair_is_read_from_arrays_tensors_and_pictures():
    grey = own.pixels(0, (6, 5))
    colour = own.pixels(0).transpose(1, 2, 0)
    for image, expected in [
        (grey, grey[None]),
        (torch.from_numpy(grey), grey[None]),
        (torch.from_numpy(grey / 255.0).requires_grad_(), (grey / 255.0).astype(np.float32)[None]),
        (grey.astype(np.float16) / 300, (grey.astype(np.float16) / 300).astype(np.float32)[None]),
        (Image.fromarray(grey), grey[None]),
        (Image.fromarray(colour), colour.transpose(2, 0, 1)),
    ]:
        for label in (2, np.int64(2), np.uint8(2), torch.tensor(2), np.array(2)):
            pixels, number = pixels_and_label([image, label])
            assert np.array_equal(pixels, expected) and pixels.dtype == expected.dtype and number == 2


BAD = {
    "no pair": (lambda index: own.pixels(index), "it is a ndarray, must be a pair"),
    "three": (lambda index: (own.pixels(index), 0, 0), "it is a tuple of 3, must be a pair"),
    "none": (lambda index: None, "it is a NoneType"),
    "shape": (lambda index: (own.pixels(index, (3, 5, 6)), 0), r"is uint8 \[3, 5, 6\], that of record 0 is uint8 \[3, 6, 5\]"),
    "dtype": (lambda index: (own.pixels(index) / 255, 0), r"is float32 \[3, 6, 5\], that of record 0 is uint8"),
    "integers": (lambda index: (own.pixels(index).astype(int), 0), "its image is int64, must be uint8 or floats"),
    "objects": (lambda index: (np.array([{}]), 0), "its image is object"),
    "text": (lambda index: ("cat.png", 0), "its image is <U7"),
    "ragged": (lambda index: ([[1.0], [1.0, 2.0]], 0), "its image is a list, which is not an array"),
    "channels last": (lambda index: (own.pixels(index, (6, 5, 3)), 0), "transpose it to"),
    "batch": (lambda index: (own.pixels(index)[None], 0), "must be .h, w. or"),
    "empty": (lambda index: (own.pixels(index)[:, :0], 0), "must be .h, w. or"),
    "nan": (lambda index: (np.full((3, 6, 5), np.nan, np.float32), 0), "contains the value nan"),
    "bright": (lambda index: (np.full((3, 6, 5), 1.5, np.float32), 0), "contains the value 1.5"),
    "label text": (lambda index: (own.pixels(index), "cat"), "its label is a str, must be an integer"),
    "label float": (lambda index: (own.pixels(index), torch.tensor(1.0)), "its label is a Tensor torch.float32"),
    "label bool": (lambda index: (own.pixels(index), True), "its label is a bool"),
    "label bools": (lambda index: (own.pixels(index), torch.tensor(True)), "its label is a Tensor torch.bool"),
    "label one-hot": (lambda index: (own.pixels(index), torch.tensor([0, 1])), "its label is a Tensor"),
    "label negative": (lambda index: (own.pixels(index), -1), "its label is -1"),
    "label huge": (lambda index: (own.pixels(index), 10**30), "its label is too large"),
    "raises": (own.raising, "__getitem__ raises RuntimeError: the disk is on fire"),
}


@pytest.mark.parametrize("at", [0, 17])
@pytest.mark.parametrize("kind", BAD)
def test_bad_items_are_refused_in_one_line_that_names_the_record(kind, at):
    if at == 0 and kind in ("shape", "dtype"):
        pytest.skip("the first record says what all must be")
    odd, words = BAD[kind]
    with pytest.raises(DataError, match=words) as caught:
        by_index(Items(at=at, odd=odd))
    assert f"the training set record {at}: " in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DataError, match="the test set record"):
        dpcert.Dataset.from_items(Items(), Items(at=at, odd=odd))


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (own.NoLength(), "the training set is a NoLength, must have __len__ and __getitem__"),
        ([], "the length of the training set is 0"),
        (iter([]), "must have __len__"),
        (3, "the training set is a int, must have"),
        (own.BadLength(), "its __len__ raises OSError: no index file"),
        (own.Augmented(), "has changed since it was checked; __getitem__ must always return the same record"),
        (own.InDatabase(), "record 0: its __getitem__ raises ProgrammingError: SQLite objects created in a thread"),
        (dict(enumerate("abc")), "record 0: it is a str"),
    ],
)
def test_what_is_no_map_style_dataset_is_refused(items, words):
    with pytest.raises(DataError, match=words) as caught:
        by_index(items)
    assert "\n" not in str(caught.value)


def test_labels_must_fit_the_classes():
    with pytest.raises(DataError, match="y_train record 2 has the label 2, labels must be in 0..1"):
        by_index(classes=2)
    with pytest.raises(DataError, match="workers is -1"):
        by_index(workers=-1)
    with pytest.raises(DataError, match="they must agree"):
        dpcert.Dataset.from_items(Items(), TensorDataset(torch.rand(4, 1, 7, 7), torch.arange(4)))
    lists = [(own.pixels(index), index % 3) for index in range(4)]  # a list of pairs is a map-style dataset, too
    assert len(dpcert.Dataset.from_items(lists, lists).x_train) == 4


@pytest.mark.parametrize("odd", [own.raising, own.changed, own.relabeled, own.as_floats, lambda index: None])
def test_an_item_that_fails_after_the_check_contributes_zero(odd, monkeypatch):
    """D7: the step neither stops nor differs from one where the record is NaN; elsewhere the record is named."""
    train = Items(at=8, odd=odd, after=10**9)
    data = by_index(train)
    train.after = 0
    rows = data.x_train.source.take_in_step(np.array([7, 8, 9]))
    assert rows[1].isnan().all() and torch.equal(rows[[0, 2]], in_memory().x_train[[7, 9]])
    poisoned = in_memory()
    floats = poisoned.x_train.clone()
    poisoned.x_train = floats.index_fill_(0, torch.tensor(8), torch.nan)
    monkeypatch.setattr("dpcert.training.loop.initial_facts", lambda *_: {"initial_weights": "assumed independent"})
    for method in ("dpsgd", "dp-gaussian"):
        found = weights(data, method, batch_size=30)
        assert torch.isfinite(found).all() and torch.equal(found, weights(poisoned, method, batch_size=30))
    assert not torch.equal(found, weights(in_memory(), method, batch_size=30))  # the record counted before
    with pytest.raises(DataError, match="the training set record 8: ") as caught:
        data.x_train[6:10]
    assert "\n" not in str(caught.value)


def test_twin_an_error_that_one_record_causes_stops_the_training(monkeypatch):
    """What the steps would do if they read like everybody else."""
    train = Items(at=8, odd=own.raising, after=10**9)
    data = by_index(train)
    train.after = 0
    monkeypatch.setattr(module.RowsOfItems, "take_in_step", module.RowsOfItems.take)
    with pytest.raises(DataError, match="record 8"):
        weights(data, batch_size=30)


def test_storage_that_is_gone_stops_the_training_before_it_spends_the_budget(tmp_path):
    train = Items()
    data = by_index(train)
    run = {"out": tmp_path / "run", **SETTINGS}
    train.count = 0
    with pytest.raises(DataError, match=f"none of the last {MOST_FAILURES} records can be read any more.*it resumes") as caught:
        dpcert.train(linear(), data, "dpsgd", **run)
    assert "\n" not in str(caught.value)
    train.count = COUNT
    resumed = dpcert.train(linear(), data, "dpsgd", **run)
    assert torch.equal(resumed.model[1].weight, weights(in_memory(), "dpsgd"))  # the steps of the failure are taken again


def test_one_good_record_keeps_the_training_going():
    rows = check_items("x", Items(), 0)[0]
    rows._reader = type("Gone", (), {"read": lambda self, numbers: ["gone" if n else (own.pixels(0), 0) for n in numbers]})()
    for _ in range(2 * MOST_FAILURES):
        rows.take_in_step(np.array([0, 1, 2]))
    with pytest.raises(DataError, match="none of the last"):
        for _ in range(MOST_FAILURES):
            rows.take_in_step(np.array([5]))


def test_a_run_is_resumed_with_the_same_items_only(tmp_path):
    def stopping(done, total, **facts):
        if done == 3:
            signal.raise_signal(signal.SIGTERM)

    def train(data, **options):
        return dpcert.train(linear(), data, "dpsgd", out=tmp_path / "run", **SETTINGS, **options)

    with pytest.raises(dpcert.interrupts.Interrupted):
        train(by_index(), progress=stopping)
    for other in (Items(at=4, odd=own.changed), Items(at=4, odd=own.relabeled)):
        with pytest.raises(RunError, match="other training data"):
            train(by_index(other))
    run = train(in_memory())  # the same records, wherever they are
    assert torch.equal(run.model[1].weight, weights(in_memory(), "dpsgd"))
    opened = dpcert.open_run(tmp_path / "run", model=linear(), data=by_index())
    certs = opened.certify(examples=5, n=100, seed=0)
    assert len(certs.radius) == 5 and opened.certify(examples=5, n=100, seed=0).acr == certs.acr
    with pytest.raises(DataError, match="test images are not those"):
        dpcert.open_run(tmp_path / "run", model=linear(), data=dpcert.Dataset.from_items(Items(), Items(8))).data  # noqa: B018


def test_a_second_training_on_the_same_items_is_charged_without_reading_them_again():
    train, model = Items(), linear()
    data = by_index(train)
    first = dpcert.train(model, data, "dpsgd", epochs=1, batch_size=10, delta=1e-3)
    reads = sum(train.calls.values())
    with pytest.warns(dpcert.errors.DpcertWarning, match="already been trained"):
        second = dpcert.train(model, in_memory(), "dpsgd", epochs=1, batch_size=10, delta=1e-3)
    assert second.epsilon > first.epsilon and sum(train.calls.values()) == reads


def test_the_dataset_is_called_from_one_thread_only(tmp_path):
    """A file that is shared by threads would give mixed rows; and each record is read once for the check."""
    rows = np.stack([own.pixels(index) for index in range(COUNT)])
    (tmp_path / "x.bin").write_bytes(rows.tobytes())
    train = own.FromFile(tmp_path / "x.bin", COUNT)
    data = by_index(train)
    before = torch.get_num_threads()
    try:
        assert torch.equal(weights(data, threads=3, batch_size=30), weights(in_memory(), threads=3, batch_size=30))
    finally:
        torch.set_num_threads(before)
    counted = Items()
    by_index(counted)
    assert len(counted.threads) == 1 and sum(counted.calls.values()) == COUNT + module._READ_TWICE + 1


def test_a_dataset_that_cannot_be_pickled_is_refused_with_workers(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(90 * COUNT))
    with pytest.raises(DataError, match="the training set cannot be sent to worker processes .*; open files") as caught:
        by_index(own.FromFile(tmp_path / "x.bin", COUNT), workers=1)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="cannot be sent to worker processes"):
        by_index(Items(at=3, odd=lambda index: None), workers=1)


def test_an_item_that_ends_its_process_is_named_and_the_others_are_read():
    with pytest.raises(DataError, match="the training set record 17: its __getitem__ ends the process that runs it"):
        by_index(Items(at=17, odd=own.ending), workers=2)
    data = by_index(Items(9), workers=1)
    source = data.x_train.source
    os.kill(next(iter(source._reader._pool._processes)), signal.SIGKILL)  # the system is short of memory
    assert torch.equal(source.take_in_step(np.arange(9)), torch.from_numpy(np.stack([own.pixels(i) for i in range(9)])))


def test_items_may_be_copied_and_pickled():
    data = by_index(workers=0)
    assert torch.equal(pickle.loads(pickle.dumps(data.x_train))[:], data.x_train[:])  # noqa: S301
    assert copy.deepcopy(data).x_train is data.x_train


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import dpcert
from tests.data.own_items import Items
if __name__ == "__main__":
    data = dpcert.Dataset.from_items(Items(9), Items(9), workers=1)
    print(*[pid for x in (data.x_train, data.x_test) for pid in x.source._reader._pool._processes], flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py"), str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        workers = [int(pid) for pid in child.stdout.readline().split()]
        assert len(workers) == 2 and all(map(alive, workers))
        for pid in workers:  # what a terminal and a batch system send to the whole group
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.3)
        assert all(map(alive, workers))
        child.kill()
    until = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, workers))


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    (tmp_path / "child.py").write_text(CHILD.replace('if __name__ == "__main__":', "if True:"))
    command = [sys.executable, str(tmp_path / "child.py"), str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "call dpcert under if __name__ == '__main__':" in done.stderr.splitlines()[-1]


def test_workers_end_with_the_data_set():
    data = by_index(Items(9), workers=1)
    (pid,) = data.x_train.source._reader._pool._processes
    assert alive(pid)
    del data
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
        multiprocessing.active_children()
    assert not alive(pid)


class Counted:
    """A source that remembers how many rows are held ahead and how they were read."""

    readers, known, shape = 2, None, (1000, 1, 2, 2)

    def __init__(self) -> None:
        self.read: list[int] = []

    def take(self, indices):
        self.read += indices.tolist()
        return torch.from_numpy(indices).float().reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2)

    take_in_step = take


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_rows_read_ahead_are_those_asked_for_in_any_order(most, monkeypatch):
    """Against the source itself: parts in any order, rows asked for twice, turns that are abandoned, rows nobody announced."""
    monkeypatch.setattr(ahead_module, "_PIECE_ROWS", 4)
    monkeypatch.setattr(ahead_module, "AHEAD_BYTES", most)
    generator, source = np.random.default_rng(0), Counted()
    rows = RowsAhead(source)
    batches = [np.flatnonzero(generator.random(1000) < share) for share in (0.03, 0.0, 0.05, 1.0, 0.02, 0.02, 0.1)]
    rows.expect(batches[0])
    for turn, batch in enumerate(batches):
        rows.begin()
        if turn + 1 < len(batches):
            rows.expect(batches[turn + 1])
        if turn == 4:
            continue  # a step that is abandoned
        parts = [batch[start : start + 7] for start in range(0, len(batch), 7)]
        for part in [parts[place] for place in generator.permutation(len(parts))] + parts[:2] + [np.array([999, 3])]:
            assert torch.equal(rows.take(part)[:, 0, 0, 0], torch.from_numpy(part).float())
    rows.begin()
    assert not rows._places and not rows._tails and rows._held == 0
    rows.close()


def test_rows_are_read_once_and_ahead(monkeypatch):
    source = Counted()
    rows = RowsAhead(source)
    rows.expect(np.arange(0, 100, 2))
    rows.begin()
    rows.expect(np.arange(1, 100, 2))
    until = time.monotonic() + 5
    while len(source.read) < 100 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(source.read) == list(range(100))  # before anybody took one
    rows.take(np.arange(0, 100, 2))
    rows.begin()
    rows.take(np.arange(1, 100, 2))
    assert len(source.read) == 100
    rows.close()


def test_an_abandoned_step_leaves_no_thread_and_no_row(tmp_path):
    import threading

    def stopping(done, total, **facts):
        if done == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(dpcert.interrupts.Interrupted):
        dpcert.train(linear(), by_index(), "dpsgd", out=tmp_path / "run", **SETTINGS, progress=stopping)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("dpcert-ahead", "dpcert-draw"))]


def test_a_head_phase_reads_like_the_steps():
    """Features of the frozen layers: a record that fails contributes zero, and the rest is as in memory."""
    train = Items(at=8, odd=own.raising, after=10**9)
    data = by_index(train)
    train.after = 0
    poisoned = in_memory()
    poisoned.x_train = poisoned.x_train.clone().index_fill_(0, torch.tensor(8), torch.nan)
    found = []
    for each in (data, poisoned, in_memory()):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(90, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        with torch.no_grad():
            for place, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(place)) - 0.5)
        dpcert.train(model, each, "dp-gaussian", **SETTINGS, head={"steps": 2, "batch_size": 30, "copies": 2})
        found.append(model[3].weight.detach())
    assert torch.isfinite(found[0]).all() and torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_records_of_isolates_each_record():
    found = records_of(Items(at=2, odd=own.raising), [1, 2, 3])
    assert isinstance(found[1], str) and all(isinstance(record, tuple) for record in (found[0], found[2]))


def test_images_say_where_they_are(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    for name, array in blobs(0).items():
        np.save(folder / f"{name}.npy", array)
    assert not isinstance(read_custom(folder).x_train, Images)
