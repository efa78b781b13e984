"""CIFAR-10 in its official *binary* layout (never the pickled one): records of a label byte and 3,072 pixel bytes."""

import numpy as np

from ..errors import DataError

RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = 10


def parse_batch(data: bytes, name: str, records: int | None = 10_000) -> tuple[np.ndarray, np.ndarray]:
    """Images ``[n, 3, 32, 32]`` and labels ``[n]`` of one batch file."""
    if len(data) == 0 or len(data) % RECORD_BYTES:
        raise DataError(f"{name} has {len(data)} bytes, not a whole number of {RECORD_BYTES}-byte records; it is damaged")
    table = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    if records is not None and len(table) != records:
        raise DataError(f"{name} holds {len(table)} records, {records} are expected")
    labels = table[:, 0]
    if labels.max() >= CLASSES:
        raise DataError(f"{name} holds the label {labels.max()}, CIFAR-10 has labels 0..{CLASSES - 1}; it is damaged")
    return table[:, 1:].reshape(-1, 3, 32, 32), labels
