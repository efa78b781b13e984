"""Test images as pictures for a page, with the noise that the smoothed model sees."""

import base64
import io

import numpy as np


def as_data_url(image: np.ndarray) -> str:
    """An image ``[channels, height, width]``, clipped to [0, 1], as a PNG data URL."""
    from PIL import Image

    pixels = np.rint(255 * np.clip(image, 0.0, 1.0)).astype(np.uint8).transpose(1, 2, 0)
    picture = Image.fromarray(
        pixels[:, :, 0] if pixels.shape[2] != 3 else pixels
    )  # for other channel counts, show the first channel
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def noisy(image: np.ndarray, sigma: float, idx: int) -> np.ndarray:
    """The image with Gaussian noise. The noise depends only on the example's index, so every page shows the same."""
    noise: np.ndarray = np.random.default_rng(idx).standard_normal(image.shape)
    return image + sigma * noise
