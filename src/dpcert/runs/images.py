"""The test images behind a run's certificates, for who shows them. Joins configs, data sets and sidecars of certificates."""

from pathlib import Path

import numpy as np

from ..data.dataset import Dataset
from ..data.registry import SOURCES, missing_files
from ..errors import DpcertError
from .certify import read_facts
from .config import Config
from .identity import images_sha256
from .resolve import read_config
from .sources import data_for


class TestImages:
    """Loads the test splits of runs, each data set once; nothing is ever downloaded for a page."""

    __test__ = False  # its name is not meant for pytest

    def __init__(self, given: Dataset | Path | str | None = None) -> None:
        self._given = given
        self._loaded: dict[str, tuple[np.ndarray, str] | str] = {}

    def of(self, run: Path, certificates: str) -> tuple[np.ndarray | None, str]:
        """The test split ``[n, channels, height, width]``, or None and the reason in a few words that name no path.

        They must be the images that were certified, whose SHA-256 is in the file beside the rows.
        """
        config = read_config(run)
        key = config.data.model_dump_json()
        if key not in self._loaded:
            self._loaded[key] = _load(config, self._given)
        found = self._loaded[key]
        if isinstance(found, str):
            return None, found
        images, digest = found
        certified = _certified_images(run / certificates)
        if certified is None:
            return None, "the file beside the certificates does not tell which images were certified"
        return (images, "") if certified == digest else (None, "the data set on this machine is not the one that was certified")


def _certified_images(rows: Path) -> str | None:
    """The SHA-256 in the file beside the rows; None where it is missing, damaged or from before it was recorded."""
    try:
        stated = read_facts(rows.with_suffix(".json")).get("images_sha256")
    except DpcertError:
        return None
    return stated if isinstance(stated, str) else None


def _load(config: Config, given: Dataset | Path | str | None) -> tuple[np.ndarray, str] | str:
    if given is None and config.data.path and not Path(config.data.path).exists():
        return "the file of the data set is not where config.toml says"
    if given is None and not config.data.path and config.data.name not in SOURCES:
        return "the data set was given in Python"
    if given is None and not config.data.path and missing_files(SOURCES[config.data.name]):
        return "the data set is not on this machine (dpcert data fetch brings it)"
    try:
        data = data_for(config, given)
    except DpcertError:
        return "the data set on this machine cannot be read"
    return data.x_test.numpy(), images_sha256(data.x_test, data.y_test)
