"""Build a config from user input: presets, files, single keys."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..data.dataset import exists, name_of, records_and_shape
from ..models.weights import PACKAGED
from ..privacy.unbounded import UNBOUNDED
from ..store.durable import refuse_link
from ..store.runs import RunDirectory
from . import defaults, presets
from .config import Config, override, parse, read_toml


def resolve(source: str | None, assignments: Mapping[str, Any], tell: Callable[[str], object] = lambda line: None) -> Config:
    """A config from a preset's name or a TOML file, with single keys overridden.

    For custom data, batch size, learning rate and epochs are chosen unless the user sets them; `tell` receives a line about it.
    """
    explicit = set(assignments)
    if source is not None and source.endswith(".toml"):
        tables, origin = read_toml(Path(source)), source
        explicit |= {f"train.{key}" for key in tables["train"]} if isinstance(tables.get("train"), dict) else set()
    else:
        origin = presets.DEFAULT if source is None else source
        sigma = assignments.get("method.sigma")
        tables = presets.tables(origin, sigma if isinstance(sigma, (int, float)) else None)
    return with_defaults_for_custom_data(parse(override(tables, assignments), origin), explicit, tell)


def with_defaults_for_custom_data(config: Config, explicit: Collection[str], tell: Callable[[str], object]) -> Config:
    """For custom data, choose the `[train]` keys that depend on N and are not in `explicit`; otherwise return `config`."""
    keys = [key for key in defaults.KEYS if f"train.{key}" not in explicit]
    if config.data.path is None or not keys or not exists(Path(config.data.path)):  # missing data is an error when it is read
        return config
    counted, shape = records_and_shape(Path(config.data.path))
    records = max(1, (config.data.size or counted) - config.data.validation)
    clips = config.build_method().clip_rule.name not in UNBOUNDED
    train = config.train
    chosen = defaults.training_defaults(
        records, shape, optimizer=train.optimizer, clip_norm=config.privacy.clip_norm, clips=clips
    )
    tell(defaults.in_words(chosen, keys, records, config.data.size is not None, shape))
    return config.model_copy(update={"train": train.model_copy(update={key: getattr(chosen, key) for key in keys})})


def default_out(config: Config, source: str | None = None) -> Path:
    """``runs/<dataset>-<method>``; a model with other than packaged weights is named too. `source` is the preset, if any."""
    given = config.model.weights is not None and config.model.weights not in PACKAGED
    model = f"-{config.model.name.split('-')[0]}" if given else ""
    recipe = presets.BEST if source is not None and source.endswith(f"/{presets.BEST}") else config.method.name
    return Path("runs") / f"{dataset_name(config)}{model}-{recipe}"


def dataset_name(config: Config) -> str:
    """The name of the data set; for custom data, the name of its file."""
    return name_of(Path(config.data.path)) if config.data.path else config.data.name


def read_config(path: Path) -> Config:
    """The config of a run directory."""
    directory = RunDirectory(path)
    directory.require(directory.config)
    return stored_config(directory)


def stored_config(directory: RunDirectory) -> Config:
    """The config of a run directory that may have no other files."""
    refuse_link(directory.config)
    return parse(read_toml(directory.config), str(directory.config))


def seed_everything_visible(seed: int | None) -> dict[str, Any]:
    """The assignments that ``--seed`` stands for: initialization and certification noise, never the DP noise."""
    return {} if seed is None else {"train.seed": seed, "certify.seed": seed}
