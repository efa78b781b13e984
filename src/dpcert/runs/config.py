"""The typed config, in TOML. An unknown key or a value of the wrong type is an error that names the key.

Keys that affect the privacy guarantee are in `[data]`, `[model]`, `[method]`, `[train]` and `[privacy]`. Keys that affect only
speed (`SPEED_KEYS`) or later measurements (`[certify]`) may change when a run is resumed.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .._validate import one_of
from ..data.dataset import LARGEST_IMAGE
from ..errors import ConfigError, DataError
from ..methods import ALL_METHODS, REGULARISERS, VIEWS, Method, combine
from ..models.spec import ModelSpec
from ..privacy.clipping import CLIP_RULES
from ..sections import LARGEST, OPTIONAL, SPEED_ONLY, Section, validated
from ..training.settings import GradientsConfig, HeadConfig, PrivacyConfig, SearchConfig, Settings, TrainConfig


class DataConfig(Section):
    """The data set. `size` is the public N, `classes` the public number of classes, `validation` the count of held-out records.

    `input_shape` (channels, height, width) is filled in from the data; if it is given, the data must match it.
    """

    name: str = "mnist"
    path: str | None = None
    size: int | None = Field(None, ge=1, le=LARGEST)
    classes: int | None = Field(None, ge=2, le=10**6)
    validation: int = Field(0, ge=0, le=LARGEST)
    input_shape: list[Annotated[int, Field(ge=1, le=LARGEST_IMAGE)]] | None = Field(None, min_length=3, max_length=3)


class ModelConfig(Section):
    """The model, the public weights it starts from, and the parameters that train.

    `weights` is the name of a packaged file or the path of a .safetensors file. `train` is all, head, last:N, norms, biases, or
    a pattern of parameter names. `input_size` is the size that some models resize images to.

    `system` puts noise inside the model, or a denoiser in front of it (see `models.systems`). `noise` is the standard deviation
    of that noise in units of the input, method.sigma by default. `noise_weights` are the relative variances of the channels
    (numbers with commas), or where they come from: uniform, initialization, or charged (from the records, in the ledger).

    The other keys are settings of some models: `width` multiplies the channels, `pool` is max or average, `norm` is none, group
    or plain, `blur` is a fixed low-pass filter (standard deviation in pixels), `input_scale` a constant factor, `stages` those
    whose features a head sees.
    """

    name: str = "cnn"
    weights: str | None = None
    train: Annotated[str, OPTIONAL] = "all"
    input_size: int | None = Field(None, ge=1, le=4096)
    system: str | None = None
    noise: float | None = Field(None, gt=0, le=100)
    noise_weights: str | None = None
    width: int | None = Field(None, ge=1, le=16)
    pool: str | None = None
    norm: str | None = None
    blur: float | None = Field(None, gt=0, le=8)
    input_scale: float | None = Field(None, gt=0, le=1000)
    stages: str | None = None


class MethodConfig(Section):
    """A named method, or (name = "custom") any combination of views, regulariser and clip.

    `sigma` is the noise of the smoothed classifier. The noisy views have `sigma_scale` times as much.
    Each key after `keep_original` belongs to the part named by its prefix; None means the default of that part.
    """

    name: str = "dp-gaussian"
    views: str | None = None
    regulariser: str | None = None
    clip: str | None = None
    sigma: float = Field(0.5, gt=0, le=100)
    sigma_scale: Annotated[float, Field(gt=0, le=10), OPTIONAL] = 1.0
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
    stobatch_size: float | None = None
    stobatch_steps: int | None = Field(None, le=1000)
    reconstruction_weight: float | None = None
    batchmean_noise: float | None = None

    @property
    def settings_of_parts(self) -> dict[str, float]:
        """The keys of the parts that have a value."""
        shared = {"name", "views", "regulariser", "clip", "sigma", "sigma_scale", "copies", "keep_original"}
        return self.model_dump(exclude=shared, exclude_none=True)


class CertifyConfig(Section):
    """How the result is certified. Defaults: `sigma` is that of the method, `examples` is 500 (or all if there are fewer)."""

    sigma: float | None = Field(None, gt=0, le=100)
    n0: int = Field(100, ge=1, le=10**9)
    n: int = Field(10_000, ge=1, le=10**9)
    alpha: float = Field(0.001, gt=0, lt=0.5)
    examples: int | Literal["all"] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    fresh_noise: bool = False
    skip_misclassified: bool = False


class Config(Section):
    """The config of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    train: TrainConfig = TrainConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    gradients: GradientsConfig = GradientsConfig()
    head: HeadConfig = HeadConfig()
    search: SearchConfig = SearchConfig()
    certify: CertifyConfig = CertifyConfig()

    @property
    def certification_sigma(self) -> float:
        """The noise of the smoothed classifier."""
        return self.certify.sigma if self.certify.sigma is not None else self.method.sigma

    def build_method(self) -> Method:
        """Build the method: the named method, with the parts that the config overrides."""
        chosen = self.method
        row = ALL_METHODS.get(one_of("method.name", chosen.name, (*ALL_METHODS, "custom")))
        known = {"views": tuple(VIEWS), "regulariser": tuple(REGULARISERS), "clip": tuple(CLIP_RULES)}
        parts: dict[str, str] = {}
        for part, words in known.items():
            word = getattr(chosen, part) or (getattr(row, part) if row else None)
            if word not in words:
                raise ConfigError(f"method.{part} is {word!r}, must be one of: {', '.join(words)}")
            parts[part] = word
        return combine(
            **parts,
            sigma=chosen.sigma * chosen.sigma_scale,
            copies=chosen.copies,
            keep_original=chosen.keep_original,
            name=chosen.name,
            settings=chosen.settings_of_parts,
        )

    def for_images(self, shape: Sequence[int]) -> "Config":
        """The same config with `data.input_shape` set to the shape of the images."""
        stated = self.data.input_shape
        if stated is not None and stated != list(shape):
            raise DataError(f"the images have shape {list(shape)}, data.input_shape is {stated}; correct one of them")
        return self.model_copy(update={"data": self.data.model_copy(update={"input_shape": list(shape)})})

    def settings(self) -> Settings:
        """The sections that the training loop needs."""
        return Settings(train=self.train, privacy=self.privacy, gradients=self.gradients, head=self.head, search=self.search)

    def model_spec(self) -> ModelSpec:
        """The model, its public weights and the parameters that train."""
        values = self.model.model_dump()
        if self.model.system is not None and self.model.noise is None:
            values["noise"] = self.method.sigma
        return ModelSpec(**values)

    def to_toml(self) -> str:
        """The resolved config as TOML; keys without a value, and `OPTIONAL` keys at their default, are omitted."""
        lines = []
        for section, keys in self:
            if stated := keys.stated():
                lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in stated.items()), ""]
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
    """Parse nested tables; an error names the first invalid key."""
    return validated(Config, tables, origin)


def parse_text(data: bytes, origin: str) -> Config:
    """Parse the bytes of a TOML file."""
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
            raise ConfigError(
                f"config file {path} has more than {_LARGEST_FILE_BYTES} bytes, which is too large for a config; check the path"
            )
        return tomllib.loads(data.decode("utf-8"))
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:  # not TOML, too many digits, nested too deeply
        raise ConfigError(f"config file {path} is not TOML: {error}") from error


def override(tables: dict[str, Any], assignments: Mapping[str, Any]) -> dict[str, Any]:
    """`tables` with ``section.key`` assignments applied."""
    merged = {section: dict(values) if isinstance(values, Mapping) else values for section, values in tables.items()}
    for name, value in assignments.items():
        section, _, key = name.partition(".")
        if not key or not isinstance(merged.setdefault(section, {}), dict):
            raise ConfigError(f"--set {name}: use section.key=value, for example --set train.epochs=1")
        merged[section][key] = value
    return merged


def parse_assignment(text: str) -> tuple[str, Any]:
    """``section.key=value``; the value is parsed as TOML, or taken as text if that fails."""
    name, equals, raw = text.partition("=")
    if not equals or "." not in name:
        raise ConfigError(f"--set {text!r}: use section.key=value, for example --set train.epochs=1")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except (ValueError, RecursionError):
        value = raw.strip()
    return name.strip(), value


def differences(old: Config, new: Config) -> list[str]:
    """How two training requests differ: ``key: old -> new`` for every key that matters."""
    changes = []
    for section, values in new.model_dump().items():
        before = getattr(old, section).model_dump()
        for key, value in values.items():
            name = f"{section}.{key}"
            if name == _FROM_THE_DATA and None in (value, before[key]):
                continue  # optional in a request, and absent in older runs
            if value != before[key] and name not in SPEED_KEYS and not name.startswith(UNRELATED_TO_TRAINING):
                changes.append(f"{name}: {before[key]} -> {value}")
    return changes
