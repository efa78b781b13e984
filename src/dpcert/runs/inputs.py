"""What the model of a finished run takes and answers: recorded facts, never guessed from the weights.

The order in which a weights file yields its tensors differs from process to process, so nothing may depend on it.
"""

import math
from pathlib import Path
from typing import Any

from .._validate import integer_in
from ..data.dataset import LARGEST_IMAGE, exists
from ..data.registry import SOURCES
from ..errors import LedgerError
from ..privacy.ledger import Ledger
from ..store.runs import RunDirectory
from .run import load_data, read_config

Shape = tuple[int, int, int]


def recorded_classes(ledger: Ledger) -> int:
    """The number of classes, which the opening line of every ledger states."""
    stated: Any = ledger.opening.get("classes")
    return integer_in("the ledger's classes", stated, 2, 10**6, error=LedgerError, remedy="restore the ledger from a copy")


def recorded_shape(directory: RunDirectory, ledger: Ledger) -> Shape | None:
    """Channels, height and width of the images the run was trained on.

    Runs of older versions do not state it: it is then that of their data set, or None where that is out of reach.
    """
    stated = ledger.opening.get("input_shape")
    if stated is not None:
        return _checked(stated)
    config = read_config(directory.path)
    if config.data.path:
        return load_data(config).input_shape if exists(Path(config.data.path)) else None
    source = SOURCES.get(config.data.name)
    return None if source is None else source.input_shape


def _checked(stated: Any) -> Shape:
    whole = isinstance(stated, list) and len(stated) == 3 and all(type(size) is int and size >= 1 for size in stated)
    if not whole or math.prod(stated) > LARGEST_IMAGE:
        raise LedgerError("the ledger's first line states no usable 'input_shape'; restore the ledger from a copy")
    channels, height, width = stated
    return channels, height, width
