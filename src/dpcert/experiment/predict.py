"""Smoothed predictions for one's own files."""

import io
import math
from pathlib import Path

import numpy as np
import torch

from ..certification.sweep import certify
from ..data.arrays import read_npy
from ..errors import DataError, RunError
from ..progress import Progress, silent
from ..rounding import floor_text
from ..store.runs import RunDirectory
from ..training.state import load_tensors
from .run import load_run, read_config

_LARGEST_IMAGE = 1 << 22
_LARGEST_PICTURE_BYTES = 1 << 26
_PICTURES = ("PNG", "JPEG", "BMP", "PPM")  # no format whose reader starts another program


def predict_files(
    path: Path,
    files: list[Path],
    *,
    sigma: float | None,
    n: int,
    alpha: float,
    device: str = "cpu",
    progress: Progress = silent,
) -> list[tuple[str, str, str, str]]:
    """File, class or "abstain", certified radius, lower bound of the class's probability; one row an image."""
    directory = RunDirectory(path)
    directory.require(directory.config, directory.ledger, directory.model)
    config = read_config(path)
    images = [(name, image) for file in files for name, image in read_images(file)]
    shapes = {tuple(image.shape) for _, image in images}
    if len(shapes) > 1:
        raise DataError(f"the images have different shapes ({', '.join(map(str, sorted(shapes)))}); give them one by one")
    shape = shapes.pop()
    run = load_run(path, (shape[0], shape[1], shape[2]), _classes(directory.model), device)
    found = certify(
        run.model,
        torch.stack([image for _, image in images]),
        [-2] * len(images),
        sigma=config.certification_sigma if sigma is None else sigma,
        n=n,
        alpha=alpha,
        progress=progress,
    )
    return [
        (name, "abstain" if p < 0 else str(p), "" if p < 0 else floor_text(radius, 4), floor_text(bound, 4))
        for (name, _), p, radius, bound in zip(
            images, found.predict.tolist(), found.radius.tolist(), found.p_lower.tolist(), strict=True
        )
    ]


def _classes(model: Path) -> int:
    """The number of classes: the length of the last layer's bias."""
    tensors = list(load_tensors(model).values())
    if not tensors or tensors[-1].ndim == 0:
        raise RunError(f"{model} holds no layers; restore it from a copy")
    return len(tensors[-1])


def read_images(file: Path) -> list[tuple[str, torch.Tensor]]:
    """The images of a file as ``[channels, height, width]`` in [0, 1]: one for a PNG, one or many for an .npy."""
    if not file.is_file():
        raise DataError(f"{file} is not a file; give an image (.png) or an array (.npy)")
    array = read_npy(file) if file.suffix == ".npy" else _read_picture(file)
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / 255.0
    if array.dtype.kind != "f" or array.ndim not in (2, 3, 4) or array.size == 0:
        raise DataError(
            f"{file} holds {array.dtype} of shape {list(array.shape)}; give uint8 or floats of shape [h, w], "
            "[c, h, w] or [n, c, h, w]"
        )
    if math.prod(array.shape[-3:]) > _LARGEST_IMAGE:  # a model for it would not fit in memory
        raise DataError(f"{file} holds images of shape {list(array.shape[-3:])}, more than {_LARGEST_IMAGE} numbers each")
    if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
        raise DataError(f"{file} holds values outside [0, 1]; rescale the image")
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    if tensor.ndim == 4:
        return [(f"{file}[{index}]", image) for index, image in enumerate(tensor)]
    return [(str(file), tensor.unsqueeze(0) if tensor.ndim == 2 else tensor)]


def _read_picture(file: Path) -> np.ndarray:
    from PIL import Image

    try:
        with file.open("rb") as opened:
            data = io.BytesIO(opened.read(_LARGEST_PICTURE_BYTES))  # in memory no chunk can ask for more than there is
        with Image.open(data, formats=_PICTURES) as picture:
            if picture.width * picture.height > _LARGEST_IMAGE:  # before a pixel is unpacked
                raise DataError("too large")
            colour = picture.mode not in ("1", "L", "LA", "I", "I;16", "F")
            pixels = np.asarray(picture.convert("RGB" if colour else "L"))
    except Exception as error:
        raise DataError(
            f"{file} is not an image of at most {_LARGEST_IMAGE} pixels; give a .png (8 bit) or an .npy array"
        ) from error
    if pixels.ndim == 2:
        return pixels
    grey = (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 1] == pixels[..., 2]).all()
    return pixels[..., 0] if grey else pixels.transpose(2, 0, 1)
