"""A folder of pictures, one folder for each class: ``CLASS/*.png`` (or .jpg, .jpeg), grayscale or RGB, all of one size.

Classes are the names of the folders in sorted order: labels 0, 1, 2 ... Names that start with a dot are ignored. Anything
else that is not a picture is an error, so that no picture is skipped silently.
"""

import hashlib
import io
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..progress import Progress, silent
from ..shapes import LARGEST_IMAGE

SUFFIXES = (".png", ".jpg", ".jpeg")
_FORMATS = ("PNG", "JPEG")  # no format whose reader starts another process
_MODES = {"L": "grayscale", "RGB": "RGB"}
_LARGEST_FILE_BYTES = 1 << 26
_FILES_PER_REPORT = 256


@dataclass(frozen=True)
class Listing:
    """The pictures of one split: files in a fixed order, each with the number of its class."""

    folder: Path
    classes: tuple[str, ...]
    files: list[Path]
    labels: list[int]

    def mixed(self) -> "Listing":
        """The same pictures with the classes mixed, sorted by the SHA-256 of their names.

        The first records are then a fair sample, and adding or removing a picture does not change the order of the others.
        """
        names = [file.relative_to(self.folder).as_posix().encode("utf-8", "surrogateescape") for file in self.files]
        order = sorted(range(len(names)), key=lambda place: hashlib.sha256(names[place]).digest())
        return Listing(
            self.folder, self.classes, [self.files[place] for place in order], [self.labels[place] for place in order]
        )


def listing(folder: Path) -> Listing:
    """The pictures in the class folders of `folder`, by class and name."""
    inside = _entries(folder)
    stray = [entry for entry in inside if not entry.is_dir() and entry.suffix.lower() in SUFFIXES]
    if stray:
        raise DataError(f"{stray[0]} is not in a class folder; move it to {folder}/CLASS/")
    classes = tuple(entry.name for entry in inside if entry.is_dir())
    if len(classes) < 2:
        count = f"only one class folder ({classes[0]})" if classes else "no class folder"
        raise DataError(f"{folder} has {count}; it must contain a folder of images for each of at least 2 classes")
    files, labels = [], []
    for label, name in enumerate(classes):
        pictures = _pictures(folder / name)
        files += pictures
        labels += [label] * len(pictures)
    return Listing(folder, classes, files, labels)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read as a folder ({error.strerror or error})") from error


def _pictures(folder: Path) -> list[Path]:
    entries = _entries(folder)
    other = [entry for entry in entries if entry.suffix.lower() not in SUFFIXES]
    if other:
        raise DataError(f"{other[0]} is not a .png, .jpg or .jpeg file; convert it, or move it out of the class folder")
    if not entries:
        raise DataError(f"{folder} contains no images; put .png, .jpg or .jpeg files there, or remove the folder")
    return entries


class Pictures:
    """The pictures of a listing as a map-style dataset: each is read and decoded when it is asked for."""

    def __init__(self, pictures: Listing) -> None:
        self._files, self._labels = [str(file) for file in pictures.files], pictures.labels

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return _pixels(Path(self._files[index])), self._labels[index]


def require_same_classes(train: Listing, test: Listing) -> None:
    """Refuse splits that do not have the same classes."""
    for one, other in ((test, train), (train, test)):
        extra = sorted(set(one.classes) - set(other.classes))
        if extra:
            raise DataError(
                f"{one.folder} has the class {extra[0]!r}, {other.folder} does not; both must have the same class folders"
            )


def read(pictures: Listing, memory: int, like: Path, progress: Progress = silent) -> np.ndarray:
    """The pictures as ``uint8 [n, channels, height, width]``, in the order of the listing; all must have the size of `like`."""
    first = _pixels(like)
    size = len(pictures.files) * first.size
    if size > memory:
        raise DataError(
            f"{pictures.folder} needs {size / 2**30:.2f} GiB of memory, {memory / 2**30:.2f} GiB are available; save the "
            "images as uint8 arrays x_train.npy, y_train.npy, x_test.npy and y_test.npy in a folder, which are read from disk"
        )
    images = np.empty((len(pictures.files), *first.shape), dtype=np.uint8)
    for place, file in enumerate(pictures.files):
        pixels = _pixels(file)
        if pixels.shape != first.shape:
            raise DataError(
                f"{file} is {_text(pixels)}, {like} is {_text(first)}; all images must have the same size and mode: "
                "resize or convert them"
            )
        images[place] = pixels
        if (place + 1) % _FILES_PER_REPORT == 0 or place + 1 == len(images):
            progress(place + 1, len(images))
    return images


def shape_of_first(pictures: Listing) -> tuple[int, int, int]:
    """Channels, height and width of the first picture."""
    channels, height, width = _pixels(pictures.files[0]).shape
    return channels, height, width


def _pixels(file: Path) -> np.ndarray:
    """One picture as ``uint8 [channels, height, width]``."""
    from PIL import Image

    data = _bytes_of(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about large pictures, which are refused below
            picture = Image.open(io.BytesIO(data), formats=_FORMATS)
        values = picture.width * picture.height * len(picture.getbands())
        if values <= LARGEST_IMAGE and picture.mode in _MODES:  # before any pixel is decoded
            picture.load()
    except Image.DecompressionBombError as error:
        raise DataError(f"{file} has more than {LARGEST_IMAGE} values; resize it") from error
    except Exception as error:  # Pillow raises many kinds of errors on damaged pictures
        raise DataError(f"{file} is not a readable PNG or JPEG image ({_short(error)}); replace it") from error
    if values > LARGEST_IMAGE:
        raise DataError(f"{file} is {picture.width} x {picture.height}, more than {LARGEST_IMAGE} values; resize it")
    if picture.mode not in _MODES:
        raise DataError(f"{file} has the mode {picture.mode!r}, must be 8-bit grayscale or RGB; convert it")
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _bytes_of(file: Path) -> bytes:
    """The content of a regular file or a link to one; does not block on pipes."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DataError(f"{file} is not a regular file; replace it with a .png or .jpg image")
    with os.fdopen(descriptor, "rb") as opened:
        if status.st_size > _LARGEST_FILE_BYTES:
            raise DataError(f"{file} has {status.st_size} bytes, more than {_LARGEST_FILE_BYTES}; resize the image")
        return opened.read(_LARGEST_FILE_BYTES)


def _text(pixels: np.ndarray) -> str:
    channels, height, width = pixels.shape
    return f"{width} x {height} {_MODES['L' if channels == 1 else 'RGB']}"


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else f"{text[:117]}..."
