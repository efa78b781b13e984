"""The data set as tensors: images in [0, 1], labels 0..classes-1, checked once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._validate import integer_in
from ..errors import DataError
from ..shapes import channels_last, transpose_advice
from . import arrays

LARGEST_IMAGE = 1 << 22  # numbers in one image: a model for more would not fit in memory
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass
class Dataset:
    """Images ``[n, channels, height, width]`` (float32 in [0, 1]) and labels, for training and for testing.

    Takes NumPy arrays or tensors; images ``[n, h, w]`` or ``[n, c, h, w]``, uint8 (divided by 255) or floats in [0, 1].
    `size` is the public number of training records, `classes` the public number of classes; where they are not given they
    are read off the data, and the privacy statement says that they are treated as public.
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

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width

    def holding_out(self, records: int) -> "Dataset":
        """The same data with the first `records` training records set aside for validation.

        By place, so that one record more or less behind them changes the training set by that record alone: records spaced
        over the whole set would all move, and epsilon is about one. The public size shrinks with the training set; the
        statement says that these records are not covered.
        """
        if records == 0:
            return self
        most = len(self.x_train) - 1
        integer_in("data.validation", records, 1, most, remedy="leave some records to train on", error=DataError)
        return Dataset(
            self.x_train[records:],
            self.y_train[records:],
            self.x_test,
            self.y_test,
            self.name,
            self._public_size() - records if self.size_given else None,
            self.classes if self.classes_given else None,
            records,
            self.x_train[:records],
            self.y_train[:records],
        )

    def _public_size(self) -> int:
        assert self.size is not None
        return self.size


def _images(name: str, images: Any) -> Tensor:
    tensor = torch.as_tensor(images)
    if tensor.ndim == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.ndim != 4 or tensor.numel() == 0:
        raise DataError(f"{name} has shape {list(tensor.shape)}, must be [n, h, w] or [n, channels, h, w] and not empty")
    if channels_last(tensor.shape[1:]):
        raise DataError(f"{name} has shape {list(tensor.shape)}: {transpose_advice(tensor.shape)}")
    if tensor.dtype == torch.uint8:
        return tensor.float().div_(255.0)
    if not tensor.is_floating_point():
        raise DataError(f"{name} is {tensor.dtype}, must be uint8 or floats in [0, 1]")
    tensor = tensor.float()
    bad = ~((tensor >= 0.0) & (tensor <= 1.0))  # NaN is neither
    if bool(bad.any()):
        record = int(bad.flatten(1).any(1).nonzero()[0])
        value = float(tensor[record][bad[record]][0])
        raise DataError(f"{name} record {record} holds the value {value:g}, pixels must be in [0, 1]; rescale the images")
    return tensor.contiguous()


def _labels(name: str, labels: Any, count: int, classes: int | None) -> Tensor:
    tensor = torch.as_tensor(labels)
    if tensor.ndim != 1 or len(tensor) != count:
        raise DataError(f"{name} has shape {list(tensor.shape)}, must be one label for each of the {count} images")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"{name} is {tensor.dtype}, labels must be whole numbers")
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
    """Numbers as torch knows them: bytes, whole numbers or float32, in this machine's byte order."""
    if array.dtype == np.uint8:
        return array
    with np.errstate(over="ignore"):  # what becomes infinite is refused by its record
        return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def read_npz(path: Path, *, size: int | None = None, classes: int | None = None) -> Dataset:
    """A data set of one's own: ``x_train y_train x_test y_test`` in an .npz file; pickled arrays are refused."""
    if not path.is_file():
        raise DataError(f"data.path {str(path)!r} is not a file; give an .npz with {' '.join(_ARRAYS)}")
    found = arrays.read_npz(path, _ARRAYS)
    x_train, y_train, x_test, y_test = (_native(found[name]) for name in _ARRAYS)
    return Dataset(x_train, y_train, x_test, y_test, name=path.stem, size=size, classes=classes)
