"""Presets `<dataset>/<method>`: the file of the data set, with the overrides of the method applied."""

import tomllib
from importlib import resources
from typing import Any

from ..._validate import meant, shown
from ...errors import ConfigError
from ...methods import METHODS, PRIOR
from ..config import override

DATASETS = ("mnist", "fashion-mnist")  # trained from scratch
FINE_TUNED = ("cifar10", "cifar10-efficientnet", "cifar10-crossvit")  # from public weights
FAMILIES = (*DATASETS, *FINE_TUNED)
WITH_PRIOR = ("mnist", "cifar10")  # families with the systems that the paper quotes
DEFAULT = "mnist/dp-gaussian"


def names() -> list[str]:
    """All presets."""
    every = {dataset: [*METHODS, *(PRIOR if dataset in WITH_PRIOR else ())] for dataset in FAMILIES}
    return [f"{dataset}/{method}" for dataset in FAMILIES for method in every[dataset]]


def tables(name: str, sigma: float | None = None) -> dict[str, Any]:
    """The tables of a preset: only what differs from the defaults. Some settings depend on `sigma` (default 0.5)."""
    if name not in names():
        hint = f"did you mean {name}/dp-gaussian? " if name in FAMILIES else meant(name, names())
        raise ConfigError(
            f"preset {shown(name)} is unknown; {hint}list them with dpcert presets (a config file must end in .toml)"
        )
    dataset, method = name.split("/")
    content = tomllib.loads(resources.files(__package__).joinpath(f"{dataset}.toml").read_text(encoding="utf-8"))
    overrides = content.pop("methods", {}).get(method, {})
    at_sigma = overrides.pop("at-sigma", {}).get(f"{0.5 if sigma is None else sigma:g}", {})
    assignments = {
        f"{section}.{key}": value
        for part in (overrides, at_sigma)
        for section, keys in part.items()
        for key, value in keys.items()
    }
    return override(content, {"method.name": method, **assignments})
