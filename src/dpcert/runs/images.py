"""The test images of the certificates of a run, for reports. Joins configs, data sets and sidecars of certificates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..data.dataset import Dataset, exists
from ..data.registry import SOURCES, missing_files
from ..errors import DpcertError
from .certify import read_facts
from .config import Config
from .identity import images_sha256
from .resolve import read_config
from .sources import data_for


class TestImages:
    """Loads the test splits of runs, each data set once; reports never trigger a download."""

    __test__ = False  # not a test class, despite its name

    def __init__(self, given: Dataset | Path | str | None = None) -> None:
        self._given = given
        self._loaded: dict[str, tuple[Sequence[np.ndarray], str] | str] = {}

    def of(self, run: Path, certificates: str) -> tuple[Sequence[np.ndarray] | None, str]:
        """The test images, each ``[channels, height, width]``, or None and a short reason that contains no path.

        They must be the certified images, whose SHA-256 is in the sidecar of the rows.
        """
        config = read_config(run)
        key = config.data.model_dump_json()
        if key not in self._loaded:
            self._loaded[key] = _load(config, self._given)
        loaded = self._loaded[key]
        if isinstance(loaded, str):
            return None, loaded
        images, digest = loaded
        certified = _certified_images(run / certificates)
        if certified is None:
            return None, "the sidecar of the certificates does not record which images were certified"
        return (images, "") if certified == digest else (None, "the data set on this machine is not the one that was certified")


def _certified_images(rows: Path) -> str | None:
    """The SHA-256 of the images in the sidecar of the rows; None if the sidecar is missing, damaged or too old to have it."""
    try:
        stated = read_facts(rows.with_suffix(".json")).get("images_sha256")
    except DpcertError:
        return None
    return stated if isinstance(stated, str) else None


def _load(config: Config, given: Dataset | Path | str | None) -> tuple[Sequence[np.ndarray], str] | str:
    why = unavailable(config) if given is None else None
    if why is not None:
        return why
    try:
        data = data_for(config, given)
    except DpcertError:
        return "the data set on this machine cannot be read"
    return _Arrays(data.x_test), images_sha256(data.x_test, data.y_test)


def unavailable(config: Config) -> str | None:
    """Why the data set of a config cannot be read without a download, in words that contain no path; None if it can."""
    if config.data.path:
        return None if exists(Path(config.data.path)) else "the data file is not at the path in config.toml"
    if config.data.name not in SOURCES:
        return "the data set was passed in Python"
    if missing_files(SOURCES[config.data.name]):
        return "the data set is not on this machine (download it with dpcert data fetch)"
    return None


class _Arrays(Sequence[np.ndarray]):
    """Images as arrays, each read on access: a report shows only a few of them."""

    def __init__(self, images: Tensor) -> None:
        self._images = images

    @property
    def shape(self) -> tuple[int, ...]:
        """Images, channels, height, width."""
        return tuple(self._images.shape)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: Any) -> Any:
        return self._images[index].numpy()
