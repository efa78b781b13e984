"""A finished run in memory."""

from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path

from torch import nn

from ..certification.laws import Smoothing, smoothing_of
from ..certification.sweep import SmoothedClassifier
from ..data.dataset import Dataset
from ..errors import DataError, RunError
from ..models.factory import Shape
from ..models.noisy import NoisyModel
from ..privacy.statement import Statement, installed_versions
from ..progress import Progress, silent
from ..scale.world import World
from ..shapes import mismatch
from ..store.runs import RunDirectory
from .config import Config
from .identity import require_same_test_images
from .sources import data_for


class LoadedRun:
    """A finished run: its model, its privacy statement, its data. The operations on it are in other modules of this package."""

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        model: nn.Module,
        statement: Statement,
        model_sha256: str,
        input_shape: Shape,
        classes: int,
        facts: Mapping[str, str],
        data: Dataset | Path | str | None = None,
        data_progress: Progress = silent,
    ) -> None:
        self.directory, self.config, self.model, self.statement = directory, config, model, statement
        self.model_sha256, self.input_shape, self.classes = model_sha256, input_shape, classes
        self._facts, self._given_data, self._data_progress = facts, data, data_progress

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.path)!r}, {self.statement.short})"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def epsilon(self) -> float:
        """Epsilon from the ledger; infinite if the run is not private."""
        return self.statement.epsilon

    @property
    def has_given_data(self) -> bool:
        """Whether the data was passed when the run was opened, instead of found by its config."""
        return self._given_data is not None

    @cached_property
    def data(self) -> Dataset:
        """The data set of the run, read on first use; shape, classes and test images must match what the run recorded."""
        data = data_for(self.config, self._given_data, self._data_progress)
        why = mismatch(data.input_shape, self.input_shape)
        if why is not None:
            raise DataError(f"the images of {data.name} do not fit {self.path}: the data {why}")
        if (data.classes or 0) > self.classes:
            raise DataError(
                f"the data has {data.classes} classes, {self.path} was trained for {self.classes}; pass the data of that run"
            )
        require_same_test_images(data, self._facts, str(self.path))
        return data

    def read_data(self, world: World) -> Dataset:
        """The data set of the run; the first rank of each machine may have to download it for all."""
        with world.one_at_a_time_per_machine():
            return self.data

    def agree(self, world: World, images_sha256: str, request: object) -> None:
        """Raise on every rank unless all have the same packages, model, images and request."""
        versions = installed_versions() | {name: _version(name) for name in ("numpy", "scipy", "onnxruntime")}
        world.agree("package versions", "\n".join(f"{name} {version}" for name, version in versions.items()))
        world.agree(f"model of {self.path}", f"{type(self.model).__qualname__} {self.model_sha256}")
        world.agree(f"images of {self.path}", images_sha256)
        world.agree(f"request for {self.path}", repr(request))

    def smoothing(self, sigma: float | None = None) -> Smoothing:
        """The noise inside the model or, if it has none, noise on the image; `sigma` defaults to that of the run."""
        if not isinstance(self.model, NoisyModel):
            return Smoothing(self.config.certification_sigma if sigma is None else sigma)
        law = smoothing_of(self.model)
        if sigma is not None:
            raise RunError(
                f"--sigma is {sigma:g}, but {self.path} has noise inside its model, worth {law.sigma:.4g}; omit --sigma"
            )
        return law

    def smoothed(self, sigma: float | None = None, *, fresh_noise: bool = False) -> SmoothedClassifier:
        """The smoothed classifier of the model, with the law of `smoothing`."""
        return SmoothedClassifier(self.model, smoothing=self.smoothing(sigma), fresh_noise=fresh_noise)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
