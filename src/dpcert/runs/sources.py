"""The data set of a config."""

from pathlib import Path

from ..data.dataset import Dataset, read_custom
from ..data.registry import SOURCES, load_dataset
from ..errors import DataError
from ..progress import Progress, silent
from .config import Config


def load_data(config: Config, progress: Progress = silent) -> Dataset:
    """The data set of a config, with the validation records held out."""
    size, classes = config.data.size, config.data.classes
    if config.data.path:
        data = read_custom(Path(config.data.path), size=size, classes=classes, progress=progress)
    else:
        data = load_dataset(config.data.name, size=size, classes=classes, progress=progress)
    return data.holding_out(config.data.validation)


def data_for(config: Config, given: Dataset | Path | str | None, progress: Progress = silent) -> Dataset:
    """The data set of a run: `given`, or otherwise the one its config names."""
    if isinstance(given, Dataset):
        return given if given.held_out else given.holding_out(config.data.validation)
    if given is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": str(given)})})
    elif not config.data.path and config.data.name not in SOURCES:
        raise DataError(
            f"the run was trained on data passed in Python ({config.data.name!r}); pass it again: "
            "--data FILE.npz, or open_run(..., data=...)"
        )
    return load_data(config, progress)
