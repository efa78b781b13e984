"""A folder of pictures is a data set: read exactly, in a fixed order, and refused with the name of what is wrong."""

import os
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dpcert.data import dataset as module
from dpcert.data import folder
from dpcert.data.dataset import name_of, read_custom, records_and_shape
from dpcert.data.images import Images
from dpcert.errors import DataError

SIZE = (5, 4)  # height, width


def picture(number: int, channels: int = 1, size: tuple[int, int] = SIZE) -> np.ndarray:
    shape = size if channels == 1 else (*size, channels)
    return np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)


def save(path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def make(root, channels: int = 1, classes=("bee", "ant", "cat"), train: int = 6, test: int = 2):
    """Pictures numbered 0, 1 ... in the order they are written."""
    number = 0
    for split, count in (("train", train), ("test", test)):
        for name in classes:
            for place in range(count):
                save(root / split / name / f"{place}.png", picture(number, channels))
                number += 1
    return root


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_read_to_the_byte_with_sorted_classes(tmp_path, channels):
    """The oracle: Pillow, file by file."""
    root = make(tmp_path / "zoo", channels)
    data = read_custom(root)
    assert data.name == "zoo" and data.classes == 3 and not data.classes_given and data.size == 18
    assert isinstance(data.x_train, Images) and data.x_train.shape == (18, channels, *SIZE) and len(data.x_test) == 6
    classes = sorted(("bee", "ant", "cat"))
    for split, images, labels in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        expected = {}
        for file in (root / split).glob("*/*.png"):
            with Image.open(file) as opened:
                pixels = np.asarray(opened).reshape(*SIZE, channels).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
            expected[pixels.tobytes()] = classes.index(file.parent.name)
        found = {image.contiguous().numpy().tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
        assert found == expected
    assert data.y_test.tolist() == [0, 0, 1, 1, 2, 2]
    assert records_and_shape(root) == (18, (channels, *SIZE))


def test_the_order_does_not_depend_on_the_file_system(tmp_path):
    """The same files written in another order, some as links, in other case: the same tensors."""
    first = read_custom(make(tmp_path / "a"))
    root = tmp_path / "b"
    for file in sorted((tmp_path / "a").glob("*/*/*.png"), reverse=True):
        target = root / file.relative_to(tmp_path / "a")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file)
    (root / "train" / ".DS_Store").write_bytes(b"x")
    (root / "train" / "ant" / ".hidden").write_bytes(b"x")
    second = read_custom(root)
    assert torch.equal(first.x_train, second.x_train) and first.y_train.tolist() == second.y_train.tolist()
    assert torch.equal(first.x_test, second.x_test)


def test_the_first_training_records_are_of_all_classes_and_one_file_moves_no_other(tmp_path):
    """data.validation takes the first records: by class they would all be of one."""
    root = make(tmp_path / "zoo", train=20)
    assert len(set(read_custom(root).holding_out(15).y_validation.tolist())) == 3
    listed = folder.listing(root / "train")
    assert len({listed.labels[place] for place in range(15)}) == 1  # the twin: in the order of names
    before = listed.mixed().files
    gone = before[7]
    gone.unlink()
    assert folder.listing(root / "train").mixed().files == [file for file in before if file != gone]


def test_jpeg_and_endings_in_capitals_are_read(tmp_path):
    root = make(tmp_path, 3)
    Image.fromarray(picture(99, 3)).save(root / "train" / "ant" / "photo.JPG", format="JPEG")
    Image.fromarray(picture(98, 3)).save(root / "train" / "ant" / "photo.jpeg")
    assert len(read_custom(root).x_train) == 20


def one_class(root):
    for split in ("train", "test"):
        for name in ("bee", "cat"):
            for file in (root / split / name).iterdir():
                file.unlink()
            (root / split / name).rmdir()


def truncated(root):
    file = root / "train" / "bee" / "3.png"
    file.write_bytes(file.read_bytes()[:-30])


def bomb(width, height):
    """A PNG of a few bytes that says how large it is."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


BAD = {
    "one class": (one_class, "has only one class folder .ant.; it must contain a folder of images for each of at least 2"),
    "a class without images": (
        lambda root: [file.unlink() for file in (root / "train/cat").iterdir()],
        "train/cat contains no images",
    ),
    "truncated": (truncated, "3.png is not a readable PNG or JPEG image"),
    "not a picture": (lambda root: (root / "train/ant/9.png").write_text("no"), "9.png is not a readable PNG"),
    "another size": (
        lambda root: save(root / "train/ant/9.png", picture(1, 1, (6, 4))),
        r"4 x 6 grayscale, .* is 4 x 5 grayscale",
    ),
    "another size in test": (lambda root: save(root / "test/ant/9.png", picture(1, 1, (6, 4))), r"test/ant/9.png is 4 x 6"),
    "another mode": (lambda root: save(root / "test/ant/9.png", picture(1, 3)), r"4 x 5 RGB, .* is 4 x 5 grayscale"),
    "transparency": (
        lambda root: save(root / "test/ant/9.png", picture(1, 4)),
        "has the mode 'RGBA', must be 8-bit grayscale or RGB",
    ),
    "a class in test only": (
        lambda root: save(root / "test/dog/0.png", picture(1)),
        "test has the class 'dog', .*train does not",
    ),
    "a class in train only": (
        lambda root: save(root / "train/dog/0.png", picture(1)),
        "train has the class 'dog', .*test does not",
    ),
    "another kind of file": (lambda root: (root / "train/ant/a.webp").write_text("x"), "a.webp is not a .png, .jpg or .jpeg"),
    "outside the classes": (lambda root: save(root / "train/9.png", picture(1)), "9.png is not in a class folder"),
    "a pipe": (lambda root: os.mkfifo(root / "train/ant/9.png"), "9.png is not a regular file"),
    "a folder called .png": (lambda root: (root / "train/ant/9.png").mkdir(), "9.png is not a regular file"),
    "a broken link": (lambda root: (root / "train/ant/9.png").symlink_to("nowhere"), "9.png cannot be read"),
    "a bomb": (lambda root: (root / "train/ant/9.png").write_bytes(bomb(60_000, 60_000)), "9.png has more than 4194304 values"),
    "a large picture": (
        lambda root: (root / "train/ant/9.png").write_bytes(bomb(4096, 2048)),
        "9.png is 4096 x 2048, more than",
    ),
    "no train": (lambda root: (root / "train").rename(root / "training"), "has no folder train; it must contain train/CLASS"),
    "no test": (lambda root: (root / "test").rename(root / "testing"), "has no folder test"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.timeout(30)
def test_bad_folders_are_refused_in_one_line(tmp_path, name):
    spoil, words = BAD[name]
    root = make(tmp_path)
    read_custom(root)  # the twin: unspoilt, it is read
    spoil(root)
    with pytest.raises(DataError, match=words) as caught:
        read_custom(root)
    assert "\n" not in str(caught.value)


def test_the_command_says_it_in_one_line_and_writes_nothing(tmp_path, capsys):
    from dpcert.cli.app import main

    root = make(tmp_path / "zoo")
    truncated(root)
    with pytest.raises(SystemExit) as caught:
        main(["train", "--set", f"data.path={root}", "--out", str(tmp_path / "run")])
    assert caught.value.code == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith("error: ") and "3.png" in errors[-1] and not (tmp_path / "run").exists()


@given(st.integers(0, 10**6))
def test_a_picture_cut_anywhere_is_refused_or_whole(tmp_path_factory, cut):
    file = tmp_path_factory.mktemp("cut") / "a.png"
    pixels = picture(7, 3, (16, 16))
    save(file, pixels)
    file.write_bytes(file.read_bytes()[: cut % file.stat().st_size])
    try:
        assert np.array_equal(folder._pixels(file), pixels.transpose(2, 0, 1))
    except DataError:
        pass


def test_a_folder_larger_than_memory_is_decoded_picture_by_picture(tmp_path, monkeypatch):
    root, told = make(tmp_path), []
    expected = read_custom(root)
    monkeypatch.setattr(module, "available_memory", lambda: 300)
    data = read_custom(root, progress=lambda done, total, **facts: told.append((done, total)))
    assert type(data.x_train.source).__name__ == "RowsOfItems" and told[-1] == (24, 24)
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(data, name), getattr(expected, name))
    bad = next((root / "train").rglob("*.png"))
    bad.write_bytes(b"no picture")
    with pytest.raises(DataError, match=f"the training set record .*{bad.name} is not a readable PNG or JPEG image") as caught:
        read_custom(root)
    assert "\n" not in str(caught.value)


def test_progress_is_told_to_the_end(tmp_path):
    told = []
    read_custom(make(tmp_path), progress=lambda done, total, **facts: told.append((done, total)))
    assert told[-1] == (24, 24) and told == sorted(told)


@pytest.mark.parametrize(("path", "name"), [("/a/zoo", "zoo"), ("/a/zoo.npz", "zoo"), ("/a/zoo/", "zoo")])
def test_the_name_is_that_of_the_folder(path, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert name_of(module.Path(path)) == name and name_of(module.Path(".")) == tmp_path.name
