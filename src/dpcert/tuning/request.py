"""What a search was asked for, stored before its first trial: the same request resumes it, another one is refused."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._validate import integer_in, one_of
from ..data.dataset import Dataset
from ..errors import ConfigError, RunError
from ..privacy.selection import LAWS
from ..rng import KEY_BYTES
from ..runs.config import SPEED_KEYS, Config
from ..store.durable import read_checked_json, write_checked_json
from ..store.runs import RunDirectory
from .space import Range, Space

RANDOM, HALVING = "random", "halving"
REQUEST, CHARGED_REQUEST = "search.json", "request.json"  # the second is in private/
_MOST_TRIALS, _MOST_SEEDS = 10_000, 100
_LARGEST_VALIDATION, _SHARE = 10_000, 6  # by default a sixth of the records is held out, at most 10,000


@dataclass(frozen=True)
class SearchRequest:
    """The settings that all trials share, the space, and how to search it. `law` is set if the search is charged."""

    base: Config
    space: Space
    trials: int
    strategy: str = RANDOM
    seeds: int = 1
    law: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        integer_in("--trials", self.trials, 1, _MOST_TRIALS, remedy="a search has at least one trial")
        integer_in("--seeds", self.seeds, 1, _MOST_SEEDS)
        one_of("--search", self.strategy, (RANDOM, HALVING))
        if self.law is not None:
            self._check_charged()

    def _check_charged(self) -> None:
        one_of("--law", str(self.law), LAWS)
        if self.strategy != RANDOM:
            raise ConfigError(f"--search is {self.strategy}, but only a random search can be charged; leave --search out")
        if self.seeds != 1:
            raise ConfigError(f"--seeds is {self.seeds}, but a charged search releases one model only; leave --seeds out")
        if self.base.privacy.noise_seed is not None:
            raise ConfigError("privacy.noise_seed is set: a search with known noise is not private; remove it or --charge")

    @property
    def facts(self) -> dict[str, Any]:
        """The request as JSON values."""
        return {
            "base": _that_matters(self.base),
            "space": {name: _plain(dimension) for name, dimension in self.space.dimensions.items()},
            "trials": self.trials,
            "search": self.strategy,
            "seeds": self.seeds,
            "law": self.law,
            "seed": self.seed,
        }


def _that_matters(base: Config) -> dict[str, Any]:
    """The config without the keys that affect only speed, which may change when a search is resumed."""
    sections = tomllib.loads(base.to_toml()).items()
    return {
        f"{section}.{key}": value
        for section, keys in sections
        for key, value in keys.items()
        if f"{section}.{key}" not in SPEED_KEYS
    }


def _plain(dimension: list[Any] | Range) -> Any:
    return dimension if isinstance(dimension, list) else {"low": dimension.low, "high": dimension.high, "log": dimension.log}


def refuse_run(directory: RunDirectory) -> None:
    """Raise if a folder is that of a run: its private/ has the key of the run."""
    if any(file.exists() for file in (directory.config, directory.ledger, directory.model)):
        raise RunError(f"{directory.path} contains a run; use another --out")


def store(path: Path, request: SearchRequest, **more: Any) -> None:
    """Write the request; `more` are facts that a resumed search needs."""
    write_checked_json(path, {"request": request.facts, **more})


def stored(path: Path, request: SearchRequest) -> dict[str, Any] | None:
    """Return the facts that were stored with this request, or None if there is no search yet; raise if it is another request.

    A random search that is not charged may be extended: more trials keep those that exist.
    """
    if not path.exists():
        return None
    facts = read_checked_json(path, what="search", remedy="restore it from a copy, or use another --out")
    before, now = facts.get("request"), request.facts
    if not isinstance(before, dict) or not isinstance(before.get("trials"), int):
        raise RunError(f"search {path} is from another version; use another --out")
    if request.law is None and request.strategy == RANDOM and before.get("search") == RANDOM:
        before = {**before, "trials": max(before["trials"], request.trials), "seeds": request.seeds}
        now = {**now, "trials": before["trials"]} if request.trials <= before["trials"] else now
    before, now = _flat(before), _flat(now)
    differing = [name for name in {**now, **before} if now.get(name) != before.get(name)]
    if differing:
        name = differing[0]
        raise RunError(
            f"{path.parent} contains another search ({name} is {_short(before.get(name))}, the request has "
            f"{_short(now.get(name))}); use another --out"
        )
    return facts


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with the keys of the config and of the space in one table, so that a difference has a name."""
    tables = {prefix: facts.get(name) for name, prefix in (("base", ""), ("space", "space "))}
    return {
        **{
            f"{prefix}{key}": value
            for prefix, table in tables.items()
            if isinstance(table, dict)
            for key, value in table.items()
        },
        **{name: value for name, value in facts.items() if name not in ("base", "space")},
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else "different"


def key_of(facts: dict[str, Any]) -> bytes:
    """The key that an uncharged search draws its settings from."""
    try:
        key = bytes.fromhex(facts["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError("the search has no valid key; use another --out") from error
    if len(key) != KEY_BYTES:
        raise RunError("the search has no valid key; use another --out")
    return key


def with_validation(base: Config, data: Dataset) -> Config:
    """The config with held-out records for the score, and the noise and number of images of the score fixed."""
    records = len(data.x_train)
    held_out = base.data.validation or max(1, min(_LARGEST_VALIDATION, records // _SHARE))
    examples = min(held_out, base.certify.examples) if isinstance(base.certify.examples, int) else held_out
    certify = base.certify.model_copy(update={"sigma": base.certification_sigma, "examples": min(examples, held_out)})
    return base.model_copy(update={"data": base.data.model_copy(update={"validation": held_out}), "certify": certify})
