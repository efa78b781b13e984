"""The typed config, in TOML. An unknown or ill-typed key is an error that names it.

What affects the promise stands in `[data]`, `[model]`, `[method]`, `[train]`, `[privacy]`; what affects only how fast it is
kept (`SPEED_KEYS`) and what is measured afterwards (`[certify]`) may change between two starts of the same run.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .._validate import one_of
from ..data.dataset import LARGEST_IMAGE
from ..errors import ConfigError, DataError
from ..methods import METHODS, REGULARISERS, VIEWS, Method, combine
from ..privacy.clipping import CLIP_RULES
from ..sections import LARGEST, SPEED_ONLY, Section, validated
from ..training.settings import GradientsConfig, PrivacyConfig, Settings, TrainConfig


class DataConfig(Section):
    """Which data. `size` is the public N, `classes` the public number of classes, `validation` records are held out.

    `input_shape` (channels, height, width) is filled in from the data; where it is given the data must have it.
    """

    name: str = "mnist"
    path: str | None = None
    size: int | None = Field(None, ge=1, le=LARGEST)
    classes: int | None = Field(None, ge=2, le=10**6)
    validation: int = Field(0, ge=0, le=LARGEST)
    input_shape: list[Annotated[int, Field(ge=1, le=LARGEST_IMAGE)]] | None = Field(None, min_length=3, max_length=3)


class ModelConfig(Section):
    """Which model."""

    name: str = "cnn"


class MethodConfig(Section):
    """A named method, or (name = "custom") any combination of views, regulariser and clip.

    The keys after `keep_original` belong to one part each (its word stands first); without a value the part has its own.
    """

    name: str = "dp-gaussian"
    views: str | None = None
    regulariser: str | None = None
    clip: str | None = None
    sigma: float = Field(0.5, gt=0, le=100)
    copies: int = Field(2, ge=0, le=1024)
    keep_original: bool = True
    smoothadv_radius: float | None = None
    smoothadv_steps: int | None = Field(None, le=1000)
    smoothadv_warmup: float | None = None
    stability_gamma: float | None = None
    consistency_lambda: float | None = None
    consistency_eta: float | None = None
    macer_lambda: float | None = None
    macer_gamma: float | None = None
    macer_beta: float | None = None
    psac_r: float | None = None
    automatic_gamma: float | None = None

    @property
    def settings_of_parts(self) -> dict[str, float]:
        """The given ones of those keys."""
        shared = {"name", "views", "regulariser", "clip", "sigma", "copies", "keep_original"}
        return self.model_dump(exclude=shared, exclude_none=True)


class CertifyConfig(Section):
    """How the result is certified; `sigma` is the method's unless given, `examples` 500 (or all, if there are fewer)."""

    sigma: float | None = Field(None, gt=0, le=100)
    n0: int = Field(100, ge=1, le=10**9)
    n: int = Field(10_000, ge=1, le=10**9)
    alpha: float = Field(0.001, gt=0, lt=0.5)
    examples: int | Literal["all"] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    fresh_noise: bool = False
    skip_misclassified: bool = False


class Config(Section):
    """A whole run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    gradients: GradientsConfig = GradientsConfig()
    certify: CertifyConfig = CertifyConfig()

    @property
    def certification_sigma(self) -> float:
        """The noise of the smoothed classifier."""
        return self.certify.sigma if self.certify.sigma is not None else self.method.sigma

    def build_method(self) -> Method:
        """The method as an object: the row of its name, with the parts that the config states itself."""
        chosen = self.method
        row = METHODS.get(one_of("method.name", chosen.name, (*METHODS, "custom")))
        known = {"views": tuple(VIEWS), "regulariser": tuple(REGULARISERS), "clip": tuple(CLIP_RULES)}
        parts: dict[str, str] = {}
        for part, words in known.items():
            word = getattr(chosen, part) or (getattr(row, part) if row else None)
            if word not in words:
                raise ConfigError(f"method.{part} is {word!r}, must be one of: {', '.join(words)}")
            parts[part] = word
        return combine(
            **parts,
            sigma=chosen.sigma,
            copies=chosen.copies,
            keep_original=chosen.keep_original,
            name=chosen.name,
            settings=chosen.settings_of_parts,
        )

    def for_images(self, shape: Sequence[int]) -> "Config":
        """The same config, stating the shape of the images it is used with."""
        stated = self.data.input_shape
        if stated is not None and stated != list(shape):
            raise DataError(f"the images have shape {list(shape)}, data.input_shape is {stated}; correct one of them")
        return self.model_copy(update={"data": self.data.model_copy(update={"input_shape": list(shape)})})

    def settings(self) -> Settings:
        """What the training loop needs: these very sections."""
        return Settings(train=self.train, privacy=self.privacy, gradients=self.gradients)

    def to_toml(self) -> str:
        """The resolved config as TOML; keys without a value, and `OPTIONAL` ones at their default, are left out."""
        lines = []
        for section, keys in self:
            lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in keys.stated().items()), ""]
        return "\n".join(lines)


_LARGEST_FILE_BYTES = 1 << 18
SPEED_KEYS = {f"{section}.{key}" for section, keys in Config() for key in keys.keys_marked(SPEED_ONLY)}
UNRELATED_TO_TRAINING = "certify."
_FROM_THE_DATA = "data.input_shape"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04X}" if ord(c) < 32 or c in '"\\\x7f' else c for c in value)
        return f'"{escaped}"'
    return repr(value)


def parse(tables: Mapping[str, Any], origin: str) -> Config:
    """A config from nested tables; the first thing wrong is named with its place."""
    return validated(Config, tables, origin)


def parse_text(data: bytes, origin: str) -> Config:
    """The config of a TOML file that is at hand as bytes."""
    try:
        return parse(tomllib.loads(data.decode("utf-8")), origin)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{origin} is not TOML: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE_BYTES + 1)
        if len(data) > _LARGEST_FILE_BYTES:
            raise ConfigError(f"config file {path} has more than {_LARGEST_FILE_BYTES} bytes; it is not a config")
        return tomllib.loads(data.decode("utf-8"))
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:  # not TOML, too many digits, nested too deeply
        raise ConfigError(f"config file {path} is not TOML: {error}") from error


def override(tables: dict[str, Any], assignments: Mapping[str, Any]) -> dict[str, Any]:
    """`tables` with ``section.key`` assignments put in."""
    merged = {section: dict(values) if isinstance(values, Mapping) else values for section, values in tables.items()}
    for name, value in assignments.items():
        section, _, key = name.partition(".")
        if not key or not isinstance(merged.setdefault(section, {}), dict):
            raise ConfigError(f"--set {name}: write it as section.key=value, e.g. --set train.epochs=1")
        merged[section][key] = value
    return merged


def parse_assignment(text: str) -> tuple[str, Any]:
    """``section.key=value``; the value is read as TOML, or as text where that fails."""
    name, equals, raw = text.partition("=")
    if not equals or "." not in name:
        raise ConfigError(f"--set {text!r}: write it as section.key=value, e.g. --set train.epochs=1")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except (ValueError, RecursionError):
        value = raw.strip()
    return name.strip(), value


def differences(old: Config, new: Config) -> list[str]:
    """How two training requests differ: ``key: old -> new`` for every key that matters."""
    found = []
    for section, values in new.model_dump().items():
        before = getattr(old, section).model_dump()
        for key, value in values.items():
            name = f"{section}.{key}"
            if name == _FROM_THE_DATA and None in (value, before[key]):
                continue  # a request need not state it, and older runs do not
            if value != before[key] and name not in SPEED_KEYS and not name.startswith(UNRELATED_TO_TRAINING):
                found.append(f"{name}: {before[key]} -> {value}")
    return found
