"""Detect images that occur in two collections, using a sketch of a few kilobytes that reveals nothing about other images.

A sketch contains the smallest 64-bit digests of the images of a collection. The digest of an image depends on its bytes only,
so a shuffled copy, a subset or a mixture of the collection still overlaps with the sketch.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

SKETCH_SIZE = 512
_DIGEST_CHARACTERS = 16


def digest(image: np.ndarray) -> str:
    """The first 64 bits of SHA-256 of an image's bytes (uint8, channels first), in hex."""
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()[:_DIGEST_CHARACTERS]


def digests(images: np.ndarray) -> list[str]:
    """The digest of each image; floats in [0, 1] are converted back to bytes first."""
    return [digest(_as_bytes(image)) for image in images]


def sketch(image_digests: Iterable[str]) -> list[str]:
    """The smallest `SKETCH_SIZE` digests, sorted."""
    return sorted(set(image_digests))[:SKETCH_SIZE]


def shared_share(known: list[str], image_digests: Iterable[str]) -> float:
    """The estimated share of the sketched collection that occurs among `image_digests`."""
    return len(set(known) & set(image_digests)) / len(known) if known else 0.0


def _as_bytes(image: np.ndarray) -> np.ndarray:
    return image if image.dtype == np.uint8 else np.rint(image * 255.0).astype(np.uint8)
