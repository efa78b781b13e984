"""Digests of single records, the same in every process and on every storage. Private: only a MAC of them may be stored."""

import hashlib
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from ..progress import Progress, silent
from .images import Images, rows_per_chunk

DIGEST_BYTES = 16


def digest_of(pixels: np.ndarray, label: int) -> bytes:
    """The digest of one record: its pixels (uint8 or float32) and its label. Floats that are bytes over 255 count as bytes."""
    if pixels.dtype != np.uint8:
        as_bytes = np.rint(pixels * np.float32(255)).astype(np.uint8)
        pixels = as_bytes if np.array_equal(as_bytes / np.float32(255), pixels) else pixels
    digest = hashlib.blake2b(f"{pixels.dtype} {pixels.shape} {label} ".encode(), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def record_digests(images: Tensor, labels: Tensor, progress: Progress = silent) -> Iterator[bytes]:
    """The digests of all records in order, joined, in chunks. Those that are known already are not computed again."""
    known = images.known if isinstance(images, Images) else None
    if known is not None:
        yield known.digests.tobytes()
        return
    rows = rows_per_chunk(images)
    for start in range(0, len(images), rows):
        stop = min(start + rows, len(images))
        stored = images.stored(start, stop) if isinstance(images, Images) else images[start:stop]
        pairs = zip(stored.numpy(), labels[start:stop].tolist(), strict=True)
        yield b"".join(digest_of(pixels, label) for pixels, label in pairs)
        progress(stop, len(images))
