"""The order of the trials of a search that is not charged: all settings, or successive halving; then the best with more seeds.

Every training calibrates its noise to its own length, so a short training of successive halving is a private training too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..runs.config import Config
from .request import HALVING, SearchRequest
from .trials import Result, Trial, best_of

KEPT = 3  # successive halving keeps a third of the settings and gives each three times the training
RunTrials = Callable[[Sequence[Trial]], list[Result]]


def run_rounds(request: SearchRequest, key: bytes, run: RunTrials) -> list[Result]:
    """Run all rounds; return the results of the last round first, the best setting's other seeds after it."""
    trials = settings_of(request, key)
    earlier: list[Result] = []
    if request.strategy == HALVING:
        trials, earlier = _halved(trials, run)
    results = run(trials)
    best = best_of(results)
    more = [] if best is None else [_seeded(best.trial, seed) for seed in seeds_of(request)[1:]]
    return [*results, *(run(more) if more else []), *earlier]


def settings_of(request: SearchRequest, key: bytes) -> list[Trial]:
    """The trials of the drawn settings, each once, with the first seed."""
    settings, first = request.space.distinct_draws(key, request.trials), seeds_of(request)[0]
    configs = [request.space.apply(request.base, setting) for setting in settings]
    pairs = enumerate(zip(settings, configs, strict=True))
    return [_seeded(Trial(number, setting, config), first) for number, (setting, config) in pairs]


def seeds_of(request: SearchRequest) -> list[int]:
    """The seeds of initial weights and certification noise: the same for all settings, so that they can be compared."""
    return [(request.seed or 0) + place for place in range(request.seeds)]


def _seeded(trial: Trial, seed: int) -> Trial:
    config = trial.config
    train, certify = (section.model_copy(update={"seed": seed}) for section in (config.train, config.certify))
    return replace(trial, seed=seed, config=config.model_copy(update={"train": train, "certify": certify}))


def _halved(trials: list[Trial], run: RunTrials) -> tuple[list[Trial], list[Result]]:
    """Run short trainings until a third of a third ... of the settings is left for the full length."""
    rungs, results = int(math.log(len(trials), KEPT) + 1e-9), []
    for rung in range(rungs):
        short = [replace(trial, rung=rung, config=_shorter(trial.config, KEPT ** (rungs - rung))) for trial in trials]
        found = run(short)
        results += found
        ranked = sorted((result for result in found if result.score), key=lambda r: -(r.score.acr if r.score else 0.0))
        kept = {result.trial.number for result in ranked[: math.ceil(len(trials) / KEPT)]}
        trials = [trial for trial in trials if trial.number in kept]
    return [replace(trial, rung=rungs) for trial in trials], results


def _shorter(config: Config, times: int) -> Config:
    """The same config with a fraction of the training."""
    train = config.train.model_copy(update={"epochs": config.train.epochs / times})
    head = config.head.model_copy(update={"steps": math.ceil(config.head.steps / times)})
    return config.model_copy(update={"train": train, "head": head})
