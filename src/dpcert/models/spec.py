"""ModelSpec: which model, which public weights it starts from, and which of its parameters train."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._validate import one_of
from ..errors import ModelError
from .architectures import MODELS
from .factory import Factory, Shape, build_custom
from .parts import ALL, freeze_others
from .resnet import stages_of
from .systems import CHARGED, DENOISER, UNIFORM, as_system
from .weights import PublicWeights, load_public, read_weights, with_statistics_of

_SETTINGS = ("input_size", "width", "pool", "norm", "blur", "input_scale", "stages")
_SPEC, _PUBLIC = "dpcert_spec", "dpcert_public"


@dataclass(frozen=True)
class ModelSpec:
    """A packaged model by name, or the name of a custom factory, and how training starts.

    `system` makes it the model of another system (`systems`), with noise of standard deviation `noise` in units of the input.
    With `noise_weights` charged, its noise scales are uniform until training has released others (`training.noise_weights`).
    """

    name: str = "cnn"
    weights: str | None = None
    train: str = ALL
    input_size: int | None = None
    system: str | None = None
    noise: float | None = None
    noise_weights: str | Sequence[float] | None = None
    width: int | None = None
    pool: str | None = None
    norm: str | None = None
    blur: float | None = None
    input_scale: float | None = None
    stages: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the architecture that have a value."""
        return {name: value for name in _SETTINGS if (value := getattr(self, name)) is not None}

    @property
    def noise_inside(self) -> float:
        """The standard deviation of the noise of a system: 0.5 unless it is set."""
        return 0.5 if self.noise is None else self.noise

    def build(self, input_shape: Shape, classes: int, *, seed: int | None = None, factory: Factory | None = None) -> nn.Module:
        """Build the model ready for private training: public weights loaded, other parameters frozen, statistics fixed."""
        public = None if self.weights is None else read_weights(self.weights)
        if public is not None:
            _refuse_other_input_size(public, self)
            public = public if self.stages is None else with_statistics_of(public, stages_of(self.stages))
        model = self._network(input_shape, classes, seed=seed, factory=factory)
        if public is not None:
            load_public(model, public)
            model.eval()  # BatchNorm uses its public statistics
        elif self.system == DENOISER:
            raise ModelError(f"model.system is {DENOISER}, whose classifier must have public weights; set model.weights")
        model = self._of_system(model, input_shape, seed)
        if public is not None:
            setattr(model, _PUBLIC, public)
        if self.train != ALL:
            freeze_others(model, self.train)
        setattr(model, _SPEC, self)
        return model

    def bare(self, input_shape: Shape, classes: int, *, seed: int | None = None, factory: Factory | None = None) -> nn.Module:
        """Build the architecture with fresh weights; `seed` fixes them without changing the global generator."""
        return self._of_system(self._network(input_shape, classes, seed=seed, factory=factory), input_shape, seed)

    def _of_system(self, network: nn.Module, input_shape: Shape, seed: int | None) -> nn.Module:
        if self.system is None:
            if self.noise is not None or self.noise_weights is not None:
                raise ModelError("model.noise and model.noise_weights belong to a model.system; set it, or remove them")
            return network
        weights = UNIFORM if self.noise_weights == CHARGED else self.noise_weights  # until training releases others
        with _seeded(seed):
            return as_system(self.system, network, input_shape, self.noise_inside, weights)

    def _network(self, input_shape: Shape, classes: int, *, seed: int | None, factory: Factory | None) -> nn.Module:
        if factory is not None:
            return build_custom(factory, input_shape, classes, seed)
        build = MODELS[one_of("model.name", self.name, MODELS, error=ModelError)]
        settings = self.settings
        unknown = [name for name in settings if name not in _settings_of(build)]
        if unknown:
            raise ModelError(f"model.{unknown[0]} is set, but model {self.name} has no such setting; remove it")
        with _seeded(seed):
            return build(input_shape, classes, **settings)


def _settings_of(build: Callable[..., nn.Module]) -> set[str]:
    """The names of the settings that an architecture takes."""
    return set(inspect.signature(build).parameters) & set(_SETTINGS)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def _refuse_other_input_size(public: PublicWeights, spec: ModelSpec) -> None:
    """Raise if the feature statistics of the weights are for images of another size."""
    settings = public.card.get("settings")
    computed = settings.get("input_size") if isinstance(settings, dict) else None
    if computed is not None and spec.input_size not in (None, computed):
        raise ModelError(
            f"model.input_size is {spec.input_size}, the feature statistics of {public.name} are for {computed}; "
            "convert the weights for that size"
        )


def spec_of(model: nn.Module) -> ModelSpec:
    """Return the spec that `model` was built from; for a custom module, its class as the name."""
    known = getattr(model, _SPEC, None)
    return known if isinstance(known, ModelSpec) else ModelSpec(type(model).__name__)


def public_weights_of(model: nn.Module) -> PublicWeights | None:
    """Return the public weights that `model` was built with, if any."""
    public = getattr(model, _PUBLIC, None)
    return public if isinstance(public, PublicWeights) else None
