"""The settings that a search may choose, from a TOML file: lists of values, and ranges of numbers.

    [train]
    batch_size = [1024, 2048, 4096]
    learning_rate = { low = 0.5, high = 8.0, log = true }

Every key is independent of the others and of the records. A draw is a function of (key of the search, number of the trial).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._validate import shown
from ..errors import ConfigError
from ..methods import METHODS, REGULARISERS, VIEWS, settings_of
from ..privacy.clipping import CLIP_RULES
from ..rng import Purpose, uniform_words
from ..runs.config import SPEED_KEYS, Config, override, parse, read_toml

Setting = dict[str, Any]  # {"train.batch_size": 2048, ...}
_HOW = "a list of values, or a range such as { low = 0.5, high = 8.0, log = true }"
_FIXED_SECTIONS = ("data", "certify", "search")
_FIXED = ("privacy.epsilon", "privacy.delta", "privacy.noise_seed", "train.seed")
_PARTS = ("method.name", "method.views", "method.regulariser", "method.clip")
_USED_BY = {"ema_decay": ("averaging", "ema"), "tail": ("averaging", "tail"), "weight_decay": ("optimizer", "adamw")}
_COUNTS, _DRAWS = 0, 1  # parts of the stream of a search


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; with `log`, uniform on a logarithmic scale. Whole numbers if both ends are."""

    low: float
    high: float
    log: bool = False

    def at(self, uniform: float) -> float:
        """The number at a place in [0, 1)."""
        if self.log:
            value = math.exp(math.log(self.low) + uniform * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + uniform * (self.high - self.low)
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return round(value) if whole else min(max(float(f"{value:.4g}"), float(self.low)), float(self.high))


@dataclass(frozen=True)
class Space:
    """What may vary, by config key. `origin` names the file in error messages."""

    dimensions: Mapping[str, list[Any] | Range]
    origin: str

    def draw(self, key: bytes, trial: int) -> Setting:
        """The setting of a trial, drawn independently of all other trials."""
        words = uniform_words(key, Purpose.SEARCH, len(self.dimensions), trial, _DRAWS)
        places = (int(word) / 2.0**64 for word in words)
        return {name: _pick(dimension, place) for (name, dimension), place in zip(self.dimensions.items(), places, strict=True)}

    def distinct_draws(self, key: bytes, trials: int) -> list[Setting]:
        """The first `trials` different settings, fewer if the space has fewer."""
        found: list[Setting] = []
        for trial in range(1000 + 100 * trials):
            if len(found) >= min(trials, self.size):
                break
            setting = self.draw(key, trial)
            found += [] if setting in found else [setting]
        return found

    @property
    def size(self) -> float:
        """The number of settings; infinite with a range."""
        finite = all(isinstance(dimension, list) for dimension in self.dimensions.values())
        return math.prod(map(len, _lists(self.dimensions))) if finite else math.inf

    def apply(self, base: Config, setting: Mapping[str, Any]) -> Config:
        """The config of a trial. A key that the drawn method, average or optimizer does not have is left out."""
        tables = override(base.model_dump(exclude_none=True), setting)
        if any(name in self.dimensions for name in _PARTS):
            for name in _settings_of_all_parts() - _used(tables["method"]):
                tables["method"].pop(name, None)
        for section, (key, (choice, user)) in itertools.product(("train", "head"), _USED_BY.items()):
            if f"{section}.{choice}" in self.dimensions and tables[section].get(choice) != user:
                tables[section].pop(key, None)
        return parse(tables, self.origin)

    def corners(self, names: Sequence[str]) -> Iterator[Setting]:
        """Every combination of the values of some keys, which must be lists."""
        kept = [name for name in names if name in self.dimensions]
        values = [self.dimensions[name] for name in kept]
        for name, dimension in zip(kept, values, strict=True):
            if isinstance(dimension, Range):
                raise ConfigError(
                    f"{self.origin}: {name} is a range, but it changes what a trial costs; with --charge give a list of values"
                )
        for combination in itertools.product(*_lists(dict(zip(kept, values, strict=True)))):
            yield dict(zip(kept, combination, strict=True))


def read_space(path: Path, base: Config) -> Space:
    """Read and check a space: every key exists and can have each of its values."""
    space = Space(dict(_dimensions(read_toml(path), path.name)), path.name)
    if not space.dimensions:
        raise ConfigError(f"{path} is an empty space; give at least one key {_HOW}")
    for name, dimension in space.dimensions.items():
        for value in dimension if isinstance(dimension, list) else [dimension.low, dimension.high]:
            space.apply(base, {name: value}).build_method()
    return space


def uniform_of(key: bytes) -> float:
    """The number in [0, 1) that decides how many trials a charged search has."""
    return int(uniform_words(key, Purpose.SEARCH, 1, 0, _COUNTS)[0] >> 11) / 2.0**53


def _dimensions(tables: Mapping[str, Any], origin: str) -> Iterator[tuple[str, list[Any] | Range]]:
    for section, keys in tables.items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{origin}: {section} is not in a section; write it as [train] {section} = ...")
        for key, value in keys.items():
            name = f"{section}.{key}"
            if section in _FIXED_SECTIONS or name in _FIXED or name in SPEED_KEYS:
                raise ConfigError(f"{origin}: {name} must be the same in all trials; set it with --set {name}=...")
            yield name, _dimension(name, value, origin)


def _dimension(name: str, value: Any, origin: str) -> list[Any] | Range:
    if isinstance(value, list) and value:
        repeated = [entry for place, entry in enumerate(value) if entry in value[:place]]
        if repeated:
            raise ConfigError(f"{origin}: {name} lists {shown(repeated[0])} twice; list each value once")
        return value
    if isinstance(value, dict) and {"low", "high"} <= value.keys() <= {"low", "high", "log"}:
        low, high, log = value["low"], value["high"], value.get("log", False)
        numbers = all(isinstance(end, (int, float)) and not isinstance(end, bool) and math.isfinite(end) for end in (low, high))
        if numbers and isinstance(log, bool) and low < high and (low > 0 or not log):
            return Range(low, high, log)
    raise ConfigError(f"{origin}: {name} is {shown(value)}, must be {_HOW}")


def _pick(dimension: list[Any] | Range, uniform: float) -> Any:
    return dimension.at(uniform) if isinstance(dimension, Range) else dimension[int(uniform * len(dimension))]


def _lists(dimensions: Mapping[str, list[Any] | Range]) -> list[list[Any]]:
    return [dimension for dimension in dimensions.values() if isinstance(dimension, list)]


def _settings_of_all_parts() -> set[str]:
    parts = [*VIEWS.values(), *(part for part in REGULARISERS.values() if part), *map(type, CLIP_RULES.values())]
    return {name for part in parts for name in settings_of(part)}


def _used(method: Mapping[str, Any]) -> set[str]:
    """The keys that the parts of a method have."""
    row = METHODS.get(method["name"])
    names = {part: method.get(part) or (getattr(row, part) if row else None) for part in ("views", "regulariser", "clip")}
    parts = [VIEWS.get(str(names["views"])), REGULARISERS.get(str(names["regulariser"]))]
    rule = CLIP_RULES.get(str(names["clip"]))
    return {name for part in [*parts, None if rule is None else type(rule)] if part is not None for name in settings_of(part)}
