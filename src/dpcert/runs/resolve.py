"""From what a user typed to a config: presets, files, single keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..store.durable import refuse_link
from ..store.runs import RunDirectory
from . import presets
from .config import Config, override, parse, read_toml


def resolve(source: str | None, assignments: Mapping[str, Any]) -> Config:
    """A config from a preset's name or a TOML file, with single keys overridden."""
    if source is not None and source.endswith(".toml"):
        tables, origin = read_toml(Path(source)), source
    else:
        origin = presets.DEFAULT if source is None else source
        sigma = assignments.get("method.sigma")
        tables = presets.tables(origin, sigma if isinstance(sigma, (int, float)) else None)
    return parse(override(tables, assignments), origin)


def default_out(config: Config) -> Path:
    """``runs/<dataset>-<method>``."""
    return Path("runs") / f"{dataset_name(config)}-{config.method.name}"


def dataset_name(config: Config) -> str:
    """The data set's name: that of its file for a data set of one's own."""
    return Path(config.data.path).stem if config.data.path else config.data.name


def read_config(path: Path) -> Config:
    """The config of a run directory."""
    directory = RunDirectory(path)
    directory.require(directory.config)
    return stored_config(directory)


def stored_config(directory: RunDirectory) -> Config:
    """The config of a run directory that may hold no more than that."""
    refuse_link(directory.config)
    return parse(read_toml(directory.config), str(directory.config))


def seed_everything_visible(seed: int | None) -> dict[str, Any]:
    """The assignments behind ``--seed``: initialisation and certification noise, never the DP noise."""
    return {} if seed is None else {"train.seed": seed, "certify.seed": seed}
