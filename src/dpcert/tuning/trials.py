"""Trials: their configs and directories, what a trial does in its own process, and its score."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RunError
from ..models.factory import Factory
from ..progress import Progress, silent
from ..runs.certify import certify, request_of
from ..runs.config import Config, differences
from ..runs.open import open_run
from ..runs.resolve import read_config
from ..runs.training import train
from ..store.durable import write_atomically
from ..store.metrics import read_metrics
from ..store.runs import RunDirectory
from ..training.phases import phases_of
from .space import Setting

VALIDATION = "validation"


@dataclass(frozen=True)
class Trial:
    """One training with its score. `number` counts settings, `rung` the rounds of successive halving."""

    number: int
    setting: Setting
    config: Config
    seed: int | None = None
    rung: int = 0

    @property
    def name(self) -> str:
        """The name of its run directory."""
        rung = f"-rung{self.rung}" if self.rung else ""
        return f"trial-{self.number:03d}{rung}{'' if self.seed is None else f'-seed{self.seed}'}"

    @property
    def words(self) -> str:
        """The drawn settings."""
        return ", ".join(f"{name}={value}" for name, value in self.setting.items())


@dataclass(frozen=True)
class Score:
    """What the validation records say about a trial."""

    acr: float
    low: float
    high: float | None
    clean_accuracy: float
    certified_accuracy: dict[str, float]
    seconds: float

    @property
    def at_quarter(self) -> float | None:
        """Certified accuracy at radius 0.25, which a larger ACR must not be bought with."""
        return self.certified_accuracy.get("0.25")


def run_trial(
    config: Config, out: Path, training: Progress = silent, certifying: Progress = silent, factory: Factory | None = None
) -> None:
    """Train, then certify validation records: all that a trial does. Resumes; a finished trial changes nothing."""
    train(config, out, training, factory=factory, is_trial=True)
    request = request_of(config)
    run = open_run(out, factory, device=config.train.device)
    certify(run, type(request)(request.how, request.examples, request.seed, VALIDATION), certifying)


def score_of(directory: RunDirectory, config: Config) -> Score | None:
    """The score of a trial; None if it is not finished. Raises if the directory has another run."""
    if not directory.config.exists():
        return None
    changed = differences(read_config(directory.path), config)
    if changed:
        raise RunError(f"{directory.path} contains another run ({changed[0]}); use another --out")
    if not directory.metrics.exists():
        return None
    metrics, how = read_metrics(directory.metrics), request_of(config).how
    for entry in metrics["certification"]:
        same = all(entry.get(name) == value for name, value in how.facts.items())
        if entry["split"] == VALIDATION and same and entry["examples"] >= (config.certify.examples or 1):
            return _score(metrics, entry)
    return None


def _score(metrics: dict[str, Any], entry: dict[str, Any]) -> Score:
    low, high = entry["acr_interval"]
    seconds = sum(value for value in metrics["timing"].values() if isinstance(value, (int, float)))
    return Score(entry["acr"], low, high, metrics.get("validation_accuracy", 0.0), entry["certified_accuracy"], seconds)


def command(trial: Trial, folder: Path, model: str | None) -> list[str]:
    """Write the config of a trial and return the arguments of ``dpcert`` that run it."""
    file = folder / f"{trial.name}.toml"
    write_atomically(file, trial.config.to_toml().encode())
    return ["trial", str(file), "--out", str(folder / trial.name), *([] if model is None else ["--model", model])]


def check_trials(configs: Sequence[Config], records: int) -> None:
    """Raise for the first config that cannot be trained on `records` records, before any trial is started."""
    for config in configs:
        method = config.build_method()
        adversarial = "smoothadv" in (config.method.views or method.views.name)
        for phase in phases_of(config.settings(), records, config.model.train, adversarial=adversarial):
            if phase.batch_size > records or phase.steps < 1:
                raise ConfigError(
                    f"data.validation is {config.data.validation}, which leaves {records} records to train on, too few for "
                    f"batches of {phase.batch_size} and {config.train.epochs:g} epochs; lower data.validation or "
                    "train.batch_size"
                )


@dataclass(frozen=True)
class Result:
    """A trial with its score, or why it has none."""

    trial: Trial
    score: Score | None = None
    failure: str | None = None


def best_of(results: Sequence[Result]) -> Result | None:
    """The result with the largest ACR; of equal ones the first. None if no trial has a score."""
    scored = [result for result in results if result.score is not None]
    return max(scored, key=lambda result: result.score.acr if result.score else 0.0, default=None)
