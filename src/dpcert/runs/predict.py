"""Smoothed predictions for image files."""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST_PICTURE_BYTES = 1 << 26
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 8 bits a value
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
    is_array = file.suffix == ".npy"
    array = read_npy(file) if is_array else _read_picture(file)
    tensor = checked_images(array, str(file), shape, gray_is_repeated=not is_array)
    if tensor.ndim == 4:
        return [(f"{file}[{index}]", image) for index, image in enumerate(tensor)]
    return [(str(file), tensor)]


def checked_images(array: np.ndarray, name: str, shape: Shape | None, *, gray_is_repeated: bool) -> torch.Tensor:
    """One image or several as float32 in [0, 1]; `name` is how error messages refer to them.

    With `gray_is_repeated`, an array ``[h, w]`` becomes one copy for each channel of the model.
    """
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / 255.0
    if array.dtype.kind != "f" or array.ndim not in (2, 3, 4) or array.size == 0:
        raise DataError(
            f"{name} contains {array.dtype} of shape {list(array.shape)}; pass uint8 or floats of shape [h, w], "
            "[c, h, w] or [n, c, h, w]"
        )
    if math.prod(array.shape[-3:]) > LARGEST_IMAGE:
        raise DataError(
            f"{name} contains images of shape {list(array.shape[-3:])}, more than {LARGEST_IMAGE} values each; resize them"
        )
    if array.ndim == 2:
        array = array[None].repeat(shape[0] if shape is not None and gray_is_repeated else 1, axis=0)
    _require_shape(name, array.shape, shape)
    if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
        raise DataError(f"{name} contains values outside [0, 1]; rescale the image")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _require_shape(file: str, actual: tuple[int, ...], expected: Shape | None) -> None:
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
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST_PICTURE_BYTES)  # in memory, so that no chunk can read past the end
        return decoded_picture(data, _PICTURES, LARGEST_IMAGE)
    except Exception as error:
        raise DataError(
            f"{file} is not an image of at most {LARGEST_IMAGE} pixels; pass an opaque .png (8 bit) or an .npy array"
        ) from error


def decoded_picture(data: bytes, formats: tuple[str, ...], most_pixels: int) -> np.ndarray:
    """The pixels of a picture as uint8: ``[h, w]`` if it is gray, else ``[3, h, w]``.

    Raises some exception if it is not a picture in one of these formats, or has more pixels, which are not decoded then. So do
    pictures that 8 bits of gray or color would change: 16 bit, or transparent.
    """
    import PIL.Image

    with PIL.Image.open(io.BytesIO(data), formats=formats) as picture:
        if picture.width * picture.height > most_pixels:  # before any pixel is decoded
            raise DataError(f"{picture.width} x {picture.height} pixels")
        if picture.mode not in _MODES or _is_transparent(picture):
            raise DataError(f"mode {picture.mode}, 16 bit or transparent")
        is_color = picture.mode not in ("1", "L", "LA")
        pixels = np.asarray(picture.convert("RGB" if is_color else "L"))
    if pixels.ndim == 2:
        return pixels
    is_gray = (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all()
    return pixels[..., 0] if is_gray else pixels.transpose(2, 0, 1)


def _is_transparent(picture: "Image") -> bool:
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return False
    alpha = np.asarray(picture.convert("RGBA").getchannel("A"))
    return bool(alpha.min() < 255)
