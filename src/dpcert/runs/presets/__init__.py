"""Presets `<dataset>/<method>`: the file of the data set, with the overrides of the method applied.

`<dataset>/best` is a method of the paper (`like`) with more overrides.
"""

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
BEST = "best"  # the recipe with the best certificates that we know, instead of a method of the paper
WITH_BEST = ("mnist", "fashion-mnist", "cifar10")
DEFAULT = "mnist/dp-gaussian"


def names() -> list[str]:
    """All presets."""
    return [*method_names(), *(f"{dataset}/{BEST}" for dataset in WITH_BEST)]


def method_names() -> list[str]:
    """The presets `<dataset>/<method>`."""
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
    of_methods = content.pop("methods", {})
    based_on = of_methods.get(method, {}).pop("like", method)
    assignments = {"method.name": based_on}
    for name in dict.fromkeys((based_on, method)):
        overrides = of_methods.get(name, {})
        at_sigma = overrides.pop("at-sigma", {}).get(f"{0.5 if sigma is None else sigma:g}", {})
        for part in (overrides, at_sigma):
            assignments |= {f"{section}.{key}": value for section, keys in part.items() for key, value in keys.items()}
    return override(content, assignments)
