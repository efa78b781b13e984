"""Arrays that stay on disk: the same rows as NumPy reads, little memory, and an error when the file changes underneath."""

import os
import signal
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dpcert
from dpcert.data import dataset as module
from dpcert.data import images as lazy
from dpcert.data.arrays import ArrayOnDisk
from dpcert.data.dataset import Dataset, RowsOnDisk, read_custom, read_npz, records_and_shape
from dpcert.data.images import Images
from dpcert.errors import DataError
from tests.conftest import blobs

COUNT = 40


def arrays(dtype="uint8", count=COUNT):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (count, 3, 6, 5), dtype=np.uint8)
    x = x if dtype == "uint8" else (x / 255.0).astype(dtype)
    y = np.arange(count) % 3
    return {"x_train": x, "y_train": y, "x_test": x[::-1][:9].copy(), "y_test": y[::-1][:9].copy()}


def save_npz(root, content, save=np.savez):
    save(root / "own.npz", **content)
    return root / "own.npz"


def save_npy(root, content):
    folder = root / "own"
    folder.mkdir(exist_ok=True)
    for name, array in content.items():
        np.save(folder / f"{name}.npy", array)
    return folder


@pytest.fixture
def nothing_in_memory(monkeypatch):
    """Every array of images stays on disk, however small."""
    monkeypatch.setattr(module, "LARGEST_IN_MEMORY", 0)


def source_of(images) -> object:
    return images._source if isinstance(images, Images) else None


@pytest.mark.parametrize("save", [save_npz, save_npy])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", ">f4", "float16"])
def test_rows_on_disk_are_those_in_memory(tmp_path, nothing_in_memory, save, dtype):
    content = arrays(dtype)
    data = read_custom(save(tmp_path, content))
    assert isinstance(source_of(data.x_train), RowsOnDisk) and isinstance(source_of(data.x_test), RowsOnDisk)
    native = {name: x if x.dtype == np.uint8 or x.dtype.kind == "i" else x.astype(np.float32) for name, x in content.items()}
    expected = Dataset(**native)
    for name in content:
        assert torch.equal(getattr(data, name), getattr(expected, name))
    assert records_and_shape(tmp_path / ("own.npz" if save is save_npz else "own")) == (COUNT, (3, 6, 5))
    held_out = data.holding_out(11)
    assert torch.equal(held_out.x_train[[3, 1, -1]], expected.x_train[[14, 12, COUNT - 1]])
    assert isinstance(source_of(held_out.x_train), RowsOnDisk)


@given(st.lists(st.integers(0, COUNT - 1), max_size=30))
def test_rows_in_any_order_are_numpys(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("rows") / "x.npy"
    x = arrays("float32")["x_train"]
    np.save(path, x)
    with path.open("rb") as file:
        stored = ArrayOnDisk(file, "x", path.stat().st_size - x.nbytes, x.dtype, x.shape)
    assert np.array_equal(stored.rows(np.array(numbers, dtype=np.int64)), x[numbers])


def test_grey_images_without_channels_stay_on_disk(tmp_path, nothing_in_memory):
    content = blobs(0)
    data = read_npz(save_npz(tmp_path, content))
    assert torch.equal(data.x_train, torch.from_numpy(content["x_train"])[:, None])


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)


def rewrite(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"changed")
    os.utime(path, ns=(1, 1))  # as it is on any other day


def replace(path):
    other = path.with_name("other")
    other.write_bytes(b"another file of the same name")
    other.replace(path)


@pytest.mark.parametrize("save", [save_npz, save_npy])
@pytest.mark.parametrize(
    ("spoil", "words"), [(truncate, "was truncated while in use; restore"), (rewrite, "was changed while in use")]
)
def test_a_file_that_changes_while_in_use_is_an_error_and_no_signal(tmp_path, nothing_in_memory, save, spoil, words):
    path = save(tmp_path, arrays())
    data = read_custom(path)
    data.x_train[:5]
    spoil(path if path.is_file() else path / "x_train.npy")
    with pytest.raises(DataError, match=words) as caught:
        data.x_train[:]
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_file_that_is_replaced_while_in_use_does_not_matter(tmp_path, nothing_in_memory):
    path = save_npz(tmp_path, arrays())
    data = read_npz(path)
    expected = data.x_train.whole()
    replace(path)
    assert torch.equal(data.x_train, expected)


def test_twin_a_mapped_file_that_is_truncated_kills_the_process(tmp_path):
    """Why no array is ever mapped."""
    np.save(tmp_path / "x.npy", np.ones((4000, 64, 64), np.uint8))
    lines = (
        "import numpy, os, sys",
        "x = numpy.load(sys.argv[1], mmap_mode='r')",
        "os.truncate(sys.argv[1], 1000)",
        "x[-1].sum()",
    )
    child = subprocess.run([sys.executable, "-c", "; ".join(lines), str(tmp_path / "x.npy")], check=False)
    assert child.returncode == -signal.SIGBUS


def test_arrays_mapped_by_the_user_are_read_by_offset(tmp_path):
    content = arrays()
    np.save(tmp_path / "x.npy", content["x_train"])
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = Dataset(mapped, content["y_train"], content["x_test"], content["y_test"])
    assert isinstance(source_of(data.x_train), RowsOnDisk)
    assert torch.equal(data.x_train, Dataset(**content).x_train)
    part = Dataset(mapped[5:], content["y_train"][5:], mapped[:2], content["y_train"][:2])
    assert not isinstance(source_of(part.x_train), RowsOnDisk)  # NumPy does not say where a part starts: it is copied
    assert torch.equal(part.x_train, Dataset(**content).x_train[5:])
    os.truncate(tmp_path / "x.npy", 1000)
    with pytest.raises(DataError, match="truncated while in use"):
        data.x_train[:]


def test_training_on_disk_gives_the_weights_of_memory_and_reads_what_it_needs(tmp_path, monkeypatch):
    """The largest piece read at once is bounded by a chunk and a batch, not by the file."""
    content = arrays(count=2000)
    path = save_npz(tmp_path, content)

    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(90, 3))
        settings = {"epochs": 1, "batch_size": 50, "learning_rate": 0.1, "noise_seed": 1, "delta": 1e-3}
        return dpcert.train(model, read_npz(path), "dpsgd", **settings).model[1].weight

    in_memory = train()
    most, rows = [0], ArrayOnDisk.rows

    def counted(self, numbers):
        most[0] = max(most[0], len(numbers))
        return rows(self, numbers)

    monkeypatch.setattr(ArrayOnDisk, "rows", counted)
    monkeypatch.setattr(module, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(lazy, "CHUNK_BYTES", 100 * 90 * 4)
    monkeypatch.setattr("dpcert.data.hashes._ROWS", 100)
    assert torch.equal(train(), in_memory) and 0 < most[0] <= 300


def test_a_file_of_64_mib_is_opened_in_little_memory(tmp_path, nothing_in_memory):
    images = np.zeros((2048, 1, 181, 181), np.uint8)
    content = {"x_train": images, "y_train": np.arange(2048) % 2, "x_test": images[:2], "y_test": np.array([0, 1])}

    def peak(path):
        tracemalloc.start()
        try:
            data = read_custom(path)
            data.x_train[:8]
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(save_npz(tmp_path, content)) < 8 << 20 and peak(save_npy(tmp_path, content)) < 8 << 20
    assert peak(save_npz(tmp_path, content, np.savez_compressed)) > 60 << 20  # the twin: compressed, it has to be loaded


def test_compressed_arrays_that_do_not_fit_are_refused_with_the_remedy(tmp_path, monkeypatch):
    content = arrays(count=400)
    monkeypatch.setattr(module, "available_memory", lambda: 20_000)
    packed = save_npz(tmp_path, content, np.savez_compressed)
    with pytest.raises(
        DataError, match="GiB are available; save it uncompressed with numpy.savez, so that it is read from disk"
    ):
        read_npz(packed)
    assert len(read_npz(save_npz(tmp_path, content)).x_train) == 400
    column = content | {"x_train": np.asfortranarray(content["x_train"])}
    with pytest.raises(DataError, match="column-major order; convert it with numpy.ascontiguousarray"):
        read_npz(save_npz(tmp_path, column))


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def test_damage_is_seen_when_the_file_is_opened(tmp_path, nothing_in_memory):
    path = save_npz(tmp_path, arrays())
    with zipfile.ZipFile(path) as file:
        start = file.getinfo("x_train.npy").header_offset
    flip(path, start + 1000)
    with pytest.raises(DataError, match="not a readable .npz file .*CRC"):
        read_npz(path)
    for length in (10, 300, 2000):
        path.write_bytes(save_npz(tmp_path, arrays()).read_bytes()[:length])
        with pytest.raises(DataError):
            read_npz(path)
    folder = save_npy(tmp_path, arrays())
    truncate(folder / "x_train.npy")
    with pytest.raises(DataError, match="x_train.npy has .* bytes after its header"):
        read_custom(folder)


@pytest.mark.parametrize("bad", [1.5, -0.1, np.nan, np.inf])
def test_values_out_of_range_are_named_by_their_record(tmp_path, nothing_in_memory, monkeypatch, bad):
    monkeypatch.setattr(lazy, "CHUNK_BYTES", 4 * 90 * 7)
    content = arrays("float32")
    content["x_train"][31, 1, 2, 3] = bad
    with pytest.raises(DataError, match=f"x_train record 31 contains the value {bad:g}"):
        read_npz(save_npz(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "y_test.npy").unlink(), "has x_train.npy but no y_test.npy"),
        (lambda folder: (folder / "train").mkdir(), "both .npy arrays and a folder train"),
        (lambda folder: np.save(folder / "x_train.npy", np.zeros((COUNT, 6, 5, 3), np.uint8)), "transpose"),
        (lambda folder: np.save(folder / "x_train.npy", np.zeros((COUNT, 3, 6, 5), np.int32)), "must be uint8 or floats"),
        (lambda folder: np.save(folder / "y_train.npy", np.array([{}] * COUNT, dtype=object)), "y_train.npy"),
        (lambda folder: ((folder / "x_test.npy").unlink(), os.mkfifo(folder / "x_test.npy")), "is not a regular file"),
        (lambda folder: ((folder / "x_test.npy").unlink(), (folder / "x_test.npy").mkdir()), "is not a regular file"),
    ],
)
@pytest.mark.timeout(30)
def test_bad_folders_of_arrays_are_refused_in_one_line(tmp_path, nothing_in_memory, change, words):
    folder = save_npy(tmp_path, arrays())
    read_custom(folder)
    change(folder)
    with pytest.raises(DataError, match=words) as caught:
        read_custom(folder)
    assert "\n" not in str(caught.value)


def test_available_memory_is_read_from_machine_and_container(tmp_path, monkeypatch):
    from dpcert.data import memory

    assert memory.available_memory() > 1 << 20
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    assert memory.available_memory() == 50 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.available_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == 50 * 1024
    (tmp_path / "meminfo").unlink()
    assert memory.available_memory() > 1 << 20
