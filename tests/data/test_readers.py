"""Readers that check magic, sizes, ranges and digests; where files are looked for; what is said when nothing works."""

import dataclasses
import gzip
import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpcert
from dpcert.data import cifar, fetch, idx, registry
from dpcert.data.arrays import read_npy
from dpcert.data.dataset import Dataset, read_npz
from dpcert.errors import DataError


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def test_idx_is_read():
    assert np.array_equal(idx.parse_idx(idx_bytes(IMAGES), 3, "x"), IMAGES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        idx_bytes(IMAGES)[:-1],
        idx_bytes(IMAGES) + b"\0",
        b"\0\0\x09\x03" + idx_bytes(IMAGES)[4:],
        idx_bytes(IMAGES.reshape(-1)),
        b"\1" + idx_bytes(IMAGES)[1:],
    ],
)
def test_idx_that_is_not_what_it_says_is_refused(data):
    with pytest.raises(DataError):
        idx.parse_idx(data, 3, "x")


@given(st.binary(max_size=300))
def test_any_bytes_give_an_array_or_the_documented_error(data):
    for read in (
        lambda: idx.parse_idx(data, 3, "x"),
        lambda: idx.parse_idx(data, 1, "x"),
        lambda: cifar.parse_batch(data, "x"),
    ):
        try:
            read()
        except DataError:
            pass


def test_gzip_is_unpacked_with_a_cap(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(100_000)))
    assert len(idx.read_bytes(path)) == 100_000
    with pytest.raises(DataError, match="more than 1000 bytes"):
        idx.read_bytes(path, most=1000)
    path.write_bytes(gzip.compress(bytes(100_000))[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        idx.read_bytes(path)


def test_cifar_binary_is_read():
    table = np.random.default_rng(0).integers(0, 256, (5, cifar.RECORD_BYTES), dtype=np.uint8)
    table[:, 0] = [3, 1, 4, 1, 5]
    images, labels = cifar.parse_batch(table.tobytes(), "x", records=5)
    assert images.shape == (5, 3, 32, 32) and labels.tolist() == [3, 1, 4, 1, 5]
    assert images[2, 1, 0, 7] == table[2, 1 + 1024 + 7]
    table[0, 0] = 10
    for bad, words in ((table.tobytes(), "label 10"), (table.tobytes()[:-1], "whole number"), (b"", "whole number")):
        with pytest.raises(DataError, match=words):
            cifar.parse_batch(bad, "x", records=5)
    with pytest.raises(DataError, match="has 5 records"):
        cifar.parse_batch(table.tobytes(), "x")


def test_mnist_is_embedded_and_whole():
    data = dpcert.load_dataset("mnist")
    assert data.x_train.shape == (60_000, 1, 28, 28) and data.x_test.shape == (10_000, 1, 28, 28)
    assert float(data.x_train.min()) == 0.0 and float(data.x_train.max()) == 1.0 and data.x_train.dtype == torch.float32
    assert torch.bincount(data.y_test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_unknown_data_set():
    with pytest.raises(DataError, match="choose one of: mnist, fashion-mnist, cifar10"):
        dpcert.load_dataset("imagenet")


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No data folder, an empty cache, nothing from the system, no network."""

    def offline(*arguments, **options):
        raise OSError("no network")

    monkeypatch.delenv("DPCERT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch.urllib.request, "urlopen", offline)
    for name, source in registry.SOURCES.items():
        monkeypatch.setitem(registry.SOURCES, name, dataclasses.replace(source, system=()))
    return tmp_path


@pytest.mark.parametrize(("name", "file"), [("fashion-mnist", "train-images-idx3-ubyte.gz"), ("cifar10", "data_batch_1.bin")])
def test_when_nothing_works_one_line_says_what_to_put_where(nowhere, name, file):
    with pytest.raises(DataError) as caught:
        dpcert.load_dataset(name)
    text = str(caught.value)
    assert file in text and str(nowhere / "cache" / "dpcert") in text and "$DPCERT_DATA/" in text and "\n" not in text


def small_source(tmp_path, monkeypatch):
    """A data set of the IDX family with four tiny files."""
    arrays = {
        "train-images-idx3-ubyte": IMAGES,
        "train-labels-idx1-ubyte": np.array([0, 1], dtype=np.uint8),
        "t10k-images-idx3-ubyte": IMAGES,
        "t10k-labels-idx1-ubyte": np.array([1, 2], dtype=np.uint8),
    }
    contents = {name: idx_bytes(array) for name, array in arrays.items()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    source = registry.Source("tiny", "tiny", "https://mirror.invalid", digests)
    monkeypatch.setitem(registry.SOURCES, "tiny", source)
    monkeypatch.delenv("DPCERT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return contents


def test_files_are_found_in_the_given_folder_packed_or_not(tmp_path, monkeypatch):
    contents = small_source(tmp_path, monkeypatch)
    monkeypatch.setenv("DPCERT_DATA", str(tmp_path / "given"))
    (tmp_path / "given" / "tiny").mkdir(parents=True)
    for place, (name, data) in enumerate(contents.items()):
        packed = place % 2 == 0
        (tmp_path / "given" / "tiny" / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    assert dpcert.load_dataset("tiny").y_test.tolist() == [1, 2]


def test_the_folder_that_was_named_comes_before_the_cache(tmp_path, monkeypatch):
    contents = small_source(tmp_path, monkeypatch)
    monkeypatch.setenv("DPCERT_DATA", str(tmp_path / "given"))
    for folder, spoilt in ((tmp_path / "given" / "tiny", b""), (tmp_path / "cache" / "dpcert" / "tiny", b"x")):
        folder.mkdir(parents=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data + spoilt)
    assert dpcert.load_dataset("tiny").y_test.tolist() == [1, 2]


def test_missing_files_are_fetched_once_and_checked(tmp_path, monkeypatch):
    contents = small_source(tmp_path, monkeypatch)
    asked = []

    class Reply:
        def __init__(self, url):
            asked.append(url)
            self.data = gzip.compress(contents[url.rsplit("/", 1)[1].removesuffix(".gz")])
            self.headers = {"Content-Length": str(len(self.data))}

        def read(self, size):
            part, self.data = self.data[:size], self.data[size:]
            return part

        def __enter__(self):
            return self

        def __exit__(self, *rest):
            return None

    monkeypatch.setattr(fetch.urllib.request, "urlopen", lambda url, timeout: Reply(url))
    data = dpcert.load_dataset("tiny")
    assert data.y_train.tolist() == [0, 1] and len(asked) == 4
    dpcert.load_dataset("tiny")
    assert len(asked) == 4
    cached = tmp_path / "cache" / "dpcert" / "tiny" / "t10k-labels-idx1-ubyte.gz"
    cached.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match="SHA-256"):
        dpcert.load_dataset("tiny")


def arrays(**changes):
    base = {
        "x_train": np.zeros((4, 8, 8), np.float32),
        "y_train": np.array([0, 1, 2, 1]),
        "x_test": np.zeros((2, 8, 8), np.float32),
        "y_test": np.array([0, 1]),
    }
    return base | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": np.full((4, 8, 8), 1.5, np.float32)}, r"record 0 contains the value 1.5, pixels must be in \[0, 1\]"),
        ({"x_train": np.full((4, 8, 8), np.nan, np.float32)}, "record 0 contains the value nan"),
        ({"x_test": np.full((2, 8, 8), -0.1, np.float32)}, "x_test record 0"),
        ({"x_train": np.zeros((4, 8, 8), np.int32)}, "must be uint8 or floats"),
        ({"x_train": np.zeros((4, 8))}, "has shape"),
        ({"x_train": np.zeros((0, 8, 8))}, "not empty"),
        ({"y_train": np.array([0, 1])}, "one label for each of the 4 images"),
        ({"y_train": np.array([0.0, 1.0, 0.0, 1.0])}, "must be integers"),
        ({"y_train": np.array([0, -1, 0, 1])}, "label -1"),
        ({"y_test": np.array([0, 5]), "classes": 3}, "record 1 has the label 5, labels must be in 0..2"),
        ({"x_test": np.zeros((2, 9, 8), np.float32)}, "they must agree"),
        ({"size": 0}, "data.size is 0"),
    ],
)
def test_bad_records_are_refused_by_name(changes, words):
    with pytest.raises(DataError, match=words):
        Dataset(**arrays(**changes))


def test_a_data_set_of_ones_own():
    images = np.arange(4 * 3 * 8 * 8, dtype=np.uint8).reshape(4, 3, 8, 8)
    data = Dataset(**arrays(x_train=images, x_test=images[:2]))
    assert data.input_shape == (3, 8, 8) and data.classes == 3 and data.size == 4
    assert not data.size_given and not data.classes_given
    assert float(data.x_train.max()) == 1.0


def test_npz_is_read_without_pickle(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays())
    assert len(read_npz(path).x_train) == 4
    np.savez(path, **arrays(y_train=np.array([0, 1, 2, 1], dtype=object)))
    with pytest.raises(DataError):
        read_npz(path)
    short = arrays()
    del short["y_test"]
    np.savez(path, **short)
    with pytest.raises(DataError, match="no array 'y_test'"):
        read_npz(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match="not a readable"):
        read_npz(path)
    with pytest.raises(DataError, match="is not a file"):
        read_npz(tmp_path / "absent.npz")


def test_an_array_in_column_order_holds_the_same_images(tmp_path):
    images = np.random.default_rng(0).random((4, 3, 8, 6)).astype(np.float32)
    np.savez(tmp_path / "own.npz", **arrays(x_train=np.asfortranarray(images), x_test=images[:2]))
    np.save(tmp_path / "own.npy", np.asfortranarray(images))
    assert np.array_equal(read_npz(tmp_path / "own.npz").x_train.numpy(), images)
    assert np.array_equal(read_npy(tmp_path / "own.npy"), images)


def test_the_first_records_are_held_out_for_validation():
    data = Dataset(**arrays(), size=4).holding_out(2)
    assert len(data.x_train) == 2 and len(data.x_validation) == 2 and data.held_out == 2 and data.size == 2
    assert data.y_validation.tolist() == [0, 1] and data.y_train.tolist() == [2, 1]
    with pytest.raises(DataError, match="leave at least one record"):
        Dataset(**arrays()).holding_out(4)


def spaced(records, total):
    """The twin: validation records spaced over the whole set."""
    chosen = {k * total // records for k in range(records)}
    return [place for place in range(total) if place not in chosen]


def test_one_record_less_changes_the_training_set_by_one_record():
    """Epsilon is about neighbours that differ in one record: the split must not turn them into sets that differ in many."""
    values = torch.arange(20) / 20
    images, labels = values[:, None, None].expand(20, 2, 2), torch.zeros(20, dtype=torch.long)
    rest = {"x_test": images[:1], "y_test": labels[:1], "classes": 2}

    def trained_on(kept):
        return set(Dataset(images[kept], labels[kept], **rest).holding_out(5).x_train[:, 0, 0, 0].tolist())

    whole = trained_on(list(range(20)))
    for removed in range(20):
        kept = [place for place in range(20) if place != removed]
        assert len(whole ^ trained_on(kept)) == 1
    assert len({*spaced(5, 20)} ^ {*spaced(5, 19)}) > 1  # without the last record
