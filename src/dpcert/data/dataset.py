"""The data set: images in [0, 1], labels 0..classes-1, checked once; and readers for custom data."""

import math
import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import shapes
from .._validate import integer_in
from ..errors import DataError
from ..progress import Progress, shifted, silent
from ..shapes import channels_last, transpose_advice
from . import arrays, folder
from .images import Images, RowsInMemory, chunks, rows_between
from .items import check_items, length_of
from .memory import available_memory

LARGEST_IMAGE = shapes.LARGEST_IMAGE
LARGEST_IN_MEMORY = 1 << 30  # bytes: a larger array stays on disk even if it would fit in memory
_DECODERS = 4  # processes that decode pictures which do not fit in memory
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_IMAGE_ARRAYS = ("x_train", "x_test")
_LAYOUTS = "train/CLASS/*.png and test/CLASS/*.png, or x_train.npy y_train.npy x_test.npy y_test.npy"


@dataclass
class Dataset:
    """Images ``[n, channels, height, width]`` (float32 in [0, 1]) and labels, for training and for testing.

    Accepts NumPy arrays or tensors; images ``[n, h, w]`` or ``[n, c, h, w]``, uint8 or floats in [0, 1]. Images given as
    uint8 are stored as uint8, and arrays from ``numpy.load(..., mmap_mode="r")`` stay on disk: ``x_train`` and ``x_test`` are
    then read-only tensors whose rows are read, and divided by 255 if uint8, on access (see `images`).
    `size` is the public number of training records, `classes` the public number of classes. By default they are computed
    from the data, and the privacy statement says that they are treated as public.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    name: str = "custom"
    size: int | None = None
    classes: int | None = None
    held_out: int = 0
    x_validation: Any = None
    y_validation: Any = None

    def __post_init__(self) -> None:
        self.x_train, self.x_test = _images("x_train", self.x_train), _images("x_test", self.x_test)
        self.classes_given, self.size_given = self.classes is not None, self.size is not None
        for part in ("train", "test"):
            images = getattr(self, f"x_{part}")
            setattr(self, f"y_{part}", _labels(f"y_{part}", getattr(self, f"y_{part}"), len(images), self.classes))
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"x_train has images of shape {list(self.x_train.shape[1:])}, x_test of "
                f"{list(self.x_test.shape[1:])}; they must agree"
            )
        if self.classes is None:
            self.classes = 1 + int(max(self.y_train.max(), self.y_test.max()))
        integer_in("data.classes", self.classes, 2, 1_000_000, error=DataError)
        if self.size is None:
            self.size = len(self.x_train)
        integer_in("data.size", self.size, 1, error=DataError)

    @classmethod
    def from_items(
        cls,
        train: Any,
        test: Any,
        *,
        name: str = "custom",
        size: int | None = None,
        classes: int | None = None,
        workers: int = 0,
        progress: Progress = silent,
    ) -> "Dataset":
        """Data that is read by index when it is used: objects with ``__len__`` and ``__getitem__(index) -> (image, label)``.

        For example PyTorch's map-style datasets. An image is an array, a tensor or a Pillow image, uint8 or floats in [0, 1];
        all have one shape and dtype. `workers` is the number of processes that read ahead (0: a thread).
        Every record is read once here to check it, and must stay the same: random augmentation is refused.
        """
        given = {"the training set": train, "the test set": test}
        counts = [length_of(*part) for part in given.items()]
        (x_train, y_train), (x_test, y_test) = (
            check_items(words, items, workers, shifted(progress, before, sum(counts)))
            for (words, items), before in zip(given.items(), (0, counts[0]), strict=True)
        )
        return cls(Images(x_train), y_train, Images(x_test), y_test, name=name, size=size, classes=classes)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width

    def holding_out(self, records: int) -> "Dataset":
        """The same data with the first `records` training records held out for validation.

        They are chosen by position, so that adding or removing a later record changes the training set by that record only.
        Evenly spaced records would all shift, but epsilon covers a change of one record. The public size shrinks with the
        training set; the statement says that the held-out records are not covered.
        """
        if records == 0:
            return self
        most = len(self.x_train) - 1
        integer_in("data.validation", records, 1, most, remedy="leave at least one record to train on", error=DataError)
        return Dataset(
            rows_between(self.x_train, records, len(self.x_train)),
            self.y_train[records:],
            self.x_test,
            self.y_test,
            self.name,
            self._public_size() - records if self.size_given else None,
            self.classes if self.classes_given else None,
            records,
            rows_between(self.x_train, 0, records),
            self.y_train[:records],
        )

    def _public_size(self) -> int:
        assert self.size is not None
        return self.size


class RowsOnDisk:
    """Images of an array on disk."""

    readers = 2
    known = None

    def __init__(self, array: arrays.ArrayOnDisk, shape: tuple[int, ...]) -> None:
        self._array, self.shape = array, shape

    def take(self, indices: np.ndarray) -> Tensor:
        """The rows in a dtype that torch supports."""
        return torch.from_numpy(_native(self._array.rows(indices))).reshape(len(indices), *self.shape[1:])

    def take_in_step(self, indices: np.ndarray) -> Tensor:
        """Like `take`, which fails only if the whole file was changed."""
        return self.take(indices)


def _images(name: str, images: Any, progress: Progress = silent) -> Tensor:
    if isinstance(images, Images):  # checked when it was created
        return images
    if isinstance(images, np.memmap):
        images = _unmapped(name, images)
    if isinstance(images, arrays.ArrayOnDisk):
        shape = _image_shape(name, images.shape)
        _require_image_dtype(name, images.dtype.kind == "f", str(images.dtype))
        on_disk = Images(RowsOnDisk(images, shape))
        return on_disk if images.dtype == np.uint8 else _in_range(name, on_disk, progress)
    tensor = _as_tensor(images)
    tensor = tensor.reshape(_image_shape(name, tuple(tensor.shape)))
    if tensor.dtype == torch.uint8:
        return Images(RowsInMemory(tensor.contiguous()))
    _require_image_dtype(name, tensor.is_floating_point(), str(tensor.dtype))
    return _in_range(name, tensor.float().contiguous())


def _as_tensor(images: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is never written to
        return torch.as_tensor(images)


def _unmapped(name: str, images: np.memmap) -> Any:
    """The same array, read by offset or copied: if a mapped file is truncated, reading it kills the process."""
    if not (isinstance(images.base, mmap.mmap) and images.mode in ("r", "r+") and images.filename is not None):
        return np.array(images)  # part of a mapped array, or possibly different from its file
    if not images.flags.c_contiguous:
        return np.array(images)
    with Path(images.filename).open("rb") as file:
        return arrays.ArrayOnDisk(file, f"{images.filename} ({name})", images.offset, images.dtype, images.shape)


def _image_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """``[n, channels, height, width]``; a missing dimension is the channels."""
    full = (shape[0], 1, *shape[1:]) if len(shape) == 3 else shape
    if len(full) != 4 or 0 in full:
        raise DataError(f"{name} has shape {list(shape)}, must be [n, h, w] or [n, channels, h, w] and not empty")
    if channels_last(full[1:]):
        raise DataError(f"{name} has shape {list(full)}: {transpose_advice(full)}")
    return full


def _require_image_dtype(name: str, is_float: bool, dtype: str) -> None:
    if not is_float and dtype != "uint8":
        raise DataError(f"{name} is {dtype}, must be uint8 or floats in [0, 1]")


def _in_range(name: str, images: Tensor, progress: Progress = silent) -> Tensor:
    """Return `images` if every pixel is in [0, 1]; checks a chunk at a time."""
    first = 0
    for rows in chunks(images, progress):
        bad = ~((rows >= 0.0) & (rows <= 1.0))  # also true for NaN
        if bool(bad.any()):
            record = int(bad.flatten(1).any(1).nonzero()[0])
            value = float(rows[record][bad[record]][0])
            raise DataError(
                f"{name} record {first + record} contains the value {value:g}, pixels must be in [0, 1]; rescale the images"
            )
        first += len(rows)
    return images


def _labels(name: str, labels: Any, count: int, classes: int | None) -> Tensor:
    tensor = torch.as_tensor(labels)
    if tensor.ndim != 1 or len(tensor) != count:
        raise DataError(f"{name} has shape {list(tensor.shape)}, must be one label for each of the {count} images")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"{name} is {tensor.dtype}, labels must be integers")
    tensor = tensor.long()
    bad = (tensor < 0) if classes is None else (tensor < 0) | (tensor >= classes)
    if bool(bad.any()):
        record = int(bad.nonzero()[0])
        bound = "at least 0" if classes is None else f"in 0..{classes - 1}"
        raise DataError(
            f"{name} record {record} has the label {int(tensor[record])}, labels must be {bound}; "
            "correct the labels or data.classes"
        )
    return tensor


def _native(array: np.ndarray) -> np.ndarray:
    """Convert to a dtype that torch supports: uint8, int64 or float32, in native byte order."""
    if array.dtype == np.uint8:
        return array
    with np.errstate(over="ignore"):  # infinities are refused later, with the record
        return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def read_custom(path: Path, *, size: int | None = None, classes: int | None = None, progress: Progress = silent) -> Dataset:
    """Custom data: an .npz file, a folder of .npy files, or a folder of pictures."""
    if not exists(path) or not path.is_dir():
        return read_npz(path, size=size, classes=classes, progress=progress)
    if _has_arrays(path):
        limits = _limits()
        loaded = {name: arrays.open_npy(path / f"{name}.npy", limits, on_disk=name in _IMAGE_ARRAYS) for name in _ARRAYS}
        return _of_arrays(loaded, path, size, classes, progress)
    return _of_pictures(*_listings(path), name_of(path), size, classes, progress)


def _of_pictures(
    train: folder.Listing, test: folder.Listing, name: str, size: int | None, classes: int | None, progress: Progress
) -> Dataset:
    """Pictures in memory; if they do not fit, each is decoded when it is used."""
    total = len(train.files) + len(test.files)
    if total * math.prod(folder.shape_of_first(train)) > available_memory() // 2:
        items = (folder.Pictures(listed) for listed in (train, test))
        workers = min(_DECODERS, os.cpu_count() or 1)
        return Dataset.from_items(*items, name=name, size=size, classes=classes, workers=workers, progress=progress)
    images, before = [], 0
    for listed in (train, test):
        images.append(folder.read(listed, available_memory(), train.files[0], shifted(progress, before, total)))
        before += len(listed.files)
    labels = [np.array(listed.labels, dtype=np.int64) for listed in (train, test)]
    return Dataset(images[0], labels[0], images[1], labels[1], name=name, size=size, classes=classes)


def read_npz(path: Path, *, size: int | None = None, classes: int | None = None, progress: Progress = silent) -> Dataset:
    """Custom data: ``x_train y_train x_test y_test`` in an .npz file; pickled arrays are refused."""
    _require_file(path)
    loaded = arrays.open_npz(path, _ARRAYS, _IMAGE_ARRAYS, _limits(), progress)
    return _of_arrays(loaded, path, size, classes, progress)


def records_and_shape(path: Path) -> tuple[int, tuple[int, ...]]:
    """The number of training records of custom data and the shape of an image, read from headers only."""
    if path.is_dir() and not _has_arrays(path):
        train, _ = _listings(path)
        return len(train.files), folder.shape_of_first(train)
    if not path.is_dir():
        _require_file(path)
    header = arrays.npy_header(path / "x_train.npy") if path.is_dir() else arrays.npz_header(path, "x_train")
    records, *shape = _image_shape("x_train", header.shape)
    return records, tuple(shape)


def name_of(path: Path) -> str:
    """The name of a custom data set: its file or folder name without the suffix."""
    return (path.resolve() if path.name in ("", "..") else path).stem or "custom"


def exists(path: Path) -> bool:
    """Whether a path exists; False for invalid names."""
    try:
        return path.exists()
    except OSError:
        return False


def _of_arrays(loaded: Any, path: Path, size: int | None, classes: int | None, progress: Progress) -> Dataset:
    native = {
        name: _images(name, value, progress) if isinstance(value, arrays.ArrayOnDisk) else _native(value)
        for name, value in loaded.items()
    }
    x_train, y_train, x_test, y_test = native.values()
    return Dataset(x_train, y_train, x_test, y_test, name=name_of(path), size=size, classes=classes)


def _require_file(path: Path) -> None:
    if not exists(path) or not path.is_file():
        raise DataError(
            f"data.path {str(path)!r} is not a file; pass an .npz with {' '.join(_ARRAYS)}, or a folder with {_LAYOUTS}"
        )


def _limits() -> arrays.Limits:
    memory = available_memory()
    return arrays.Limits(min(LARGEST_IN_MEMORY, memory // 4), memory)


def _has_arrays(path: Path) -> bool:
    here = [name for name in _ARRAYS if (path / f"{name}.npy").exists()]
    if here and len(here) < len(_ARRAYS):
        missing = next(name for name in _ARRAYS if name not in here)
        raise DataError(f"{path} has {here[0]}.npy but no {missing}.npy; it must contain all of {' '.join(_ARRAYS)}")
    if here and (path / "train").exists():
        raise DataError(f"{path} has both .npy arrays and a folder train; remove one of them")
    return bool(here)


def _listings(path: Path) -> tuple[folder.Listing, folder.Listing]:
    for split in ("train", "test"):
        if not (path / split).is_dir():
            raise DataError(f"{path} has no folder {split}; it must contain {_LAYOUTS}")
    train, test = folder.listing(path / "train"), folder.listing(path / "test")
    folder.require_same_classes(train, test)
    return train.mixed(), test
