"""Smoothed predictions for image files."""

import io
import math
from pathlib import Path

import numpy as np
import torch

from ..data.arrays import read_npy
from ..data.dataset import LARGEST_IMAGE
from ..errors import DataError
from ..models.factory import Factory, Shape
from ..privacy.ledger import Ledger
from ..progress import Progress, silent
from ..rounding import floor_text
from ..shapes import channels_last, mismatch, transpose_advice
from ..store.runs import RunDirectory
from .open import open_run, recorded_shape
from .resolve import read_config

_LARGEST_PICTURE_BYTES = 1 << 26
_PICTURES = ("PNG", "JPEG", "BMP", "PPM")  # no format whose reader starts another process


def predict_files(
    path: Path,
    files: list[Path],
    *,
    sigma: float | None,
    n: int,
    alpha: float,
    device: str = "cpu",
    model: Factory | None = None,
    data: Path | None = None,
    progress: Progress = silent,
) -> list[tuple[str, str, str, str]]:
    """One row per image: file, class or "abstain", certified radius, lower bound of the probability of the class."""
    directory = RunDirectory(path)
    directory.require(directory.config, directory.ledger, directory.model)
    shape = recorded_shape(read_config(path), Ledger.load(directory.ledger))
    images = [(name, image) for file in files for name, image in read_images(file, shape)]
    if shape is None:  # an older run whose data is not available: loading the weights checks the shape
        shape = _common_shape([image for _, image in images])
    run = open_run(path, model, data, device=device, input_shape=shape)
    classifier = run.smoothed(sigma)
    certificates = classifier.certify(torch.stack([image for _, image in images]), n=n, alpha=alpha, progress=progress)
    return [
        (name, "abstain" if p < 0 else str(p), "" if p < 0 else floor_text(radius, 4), floor_text(bound, 4))
        for (name, _), p, radius, bound in zip(
            images, certificates.predict.tolist(), certificates.radius.tolist(), certificates.p_lower.tolist(), strict=True
        )
    ]


def _common_shape(images: list[torch.Tensor]) -> Shape:
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise DataError(f"the images have different shapes ({', '.join(map(str, sorted(shapes)))}); pass them one at a time")
    channels, height, width = shapes.pop()
    return channels, height, width


def read_images(file: Path, shape: Shape | None = None) -> list[tuple[str, torch.Tensor]]:
    """The images of a file as ``[channels, height, width]`` in [0, 1]: one for a PNG, one or many for an .npy.

    If the input `shape` of the model is known, other shapes are refused; a gray picture is repeated for each channel.
    """
    if not file.is_file():
        raise DataError(f"{file} is not a file; pass an image (.png) or an array (.npy)")
    array = read_npy(file) if file.suffix == ".npy" else _read_picture(file)
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / 255.0
    if array.dtype.kind != "f" or array.ndim not in (2, 3, 4) or array.size == 0:
        raise DataError(
            f"{file} contains {array.dtype} of shape {list(array.shape)}; pass uint8 or floats of shape [h, w], "
            "[c, h, w] or [n, c, h, w]"
        )
    if math.prod(array.shape[-3:]) > LARGEST_IMAGE:
        raise DataError(
            f"{file} contains images of shape {list(array.shape[-3:])}, more than {LARGEST_IMAGE} values each; resize them"
        )
    if array.ndim == 2:
        array = array[None].repeat(shape[0] if shape is not None and file.suffix != ".npy" else 1, axis=0)
    _require_shape(file, array.shape, shape)
    if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
        raise DataError(f"{file} contains values outside [0, 1]; rescale the image")
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    if tensor.ndim == 4:
        return [(f"{file}[{index}]", image) for index, image in enumerate(tensor)]
    return [(str(file), tensor)]


def _require_shape(file: Path, actual: tuple[int, ...], expected: Shape | None) -> None:
    """Refuse images the model does not accept; if its shape is unknown, refuse those that look like ``[h, w, channels]``."""
    image = actual[-3:]
    if image == expected:
        return
    if channels_last(image):
        raise DataError(f"{file} has shape {list(actual)}: {transpose_advice(actual)}")
    why = None if expected is None else mismatch(image, expected)
    if why is not None:
        raise DataError(f"{file} {why}")


def _read_picture(file: Path) -> np.ndarray:
    from PIL import Image

    try:
        with file.open("rb") as opened:
            data = io.BytesIO(opened.read(_LARGEST_PICTURE_BYTES))  # in memory, so that no chunk can read past the end
        with Image.open(data, formats=_PICTURES) as picture:
            if picture.width * picture.height > LARGEST_IMAGE:  # before any pixel is decoded
                raise DataError("too large")
            is_color = picture.mode not in ("1", "L", "LA", "I", "I;16", "F")
            pixels = np.asarray(picture.convert("RGB" if is_color else "L"))
    except Exception as error:
        raise DataError(
            f"{file} is not an image of at most {LARGEST_IMAGE} pixels; pass a .png (8 bit) or an .npy array"
        ) from error
    if pixels.ndim == 2:
        return pixels
    is_gray = (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all()
    return pixels[..., 0] if is_gray else pixels.transpose(2, 0, 1)
