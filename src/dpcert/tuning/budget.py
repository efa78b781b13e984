"""The noise of the trials of a charged search: as little as the budget of the whole search allows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from ..data.dataset import Dataset
from ..errors import BudgetError, ConfigError
from ..privacy.selection import Curve, Selection, merged
from ..privacy.unbounded import UNBOUNDED
from ..runs.config import Config
from ..training.loop import plan_for
from ..training.settings import SearchConfig
from .space import Space

# Keys that change q, T or the noise of a trial. Should one be missing: `as_trial` refuses a trial whose cost is not listed.
COST_KEYS = (
    *("train.batch_size", "train.epochs", "head.steps", "head.batch_size", "head.budget", "model.train"),
    *("method.name", "method.views", "model.noise_weights", "privacy.noise_weights_budget"),
)
_LEAST, _AIM, _MOST_ROUNDS = 0.99, 0.997, 30  # shares of the budget that a calibrated search spends


@dataclass(frozen=True)
class Charge:
    """How a search is charged: the law of the number of trials, and its mean."""

    law: str
    mean: float


def charged(base: Config, space: Space, data: Dataset, charge: Charge) -> SearchConfig:
    """Return the section [search] of all trials: the budget of one trial, and what a trial can cost.

    Guarantee: the whole search spends at most (privacy.epsilon, privacy.delta) and at least 99 % of that epsilon.
    """
    configs = list(_of_each_cost(base, space))
    target, delta = base.privacy.epsilon, base.privacy.delta
    trial_epsilon = target / 2
    for _ in range(_MOST_ROUNDS):
        curves = _curves(configs, data, trial_epsilon)
        spent = Selection(charge.law, charge.mean, curves).epsilon(curves[0], delta)
        if _LEAST * target <= spent <= target:
            return SearchConfig(
                law=charge.law,
                mean=float(charge.mean),
                trial_epsilon=trial_epsilon,
                curves=[[list(map(float, block)) for block in curve] for curve in curves],
            )
        trial_epsilon = float(f"{trial_epsilon * _correction(_AIM * target / spent):.5g}")
    raise BudgetError(
        f"epsilon {target:g} at delta {delta:g} is too small for a search with a mean of {charge.mean:g} trials; "
        "raise --epsilon or lower --trials"
    )


def _correction(ratio: float) -> float:
    """Epsilon of the search grows about in proportion to that of a trial; a step far away is taken with care."""
    return math.sqrt(ratio) if not 0.5 < ratio < 2.0 else ratio


def _of_each_cost(base: Config, space: Space) -> Iterator[Config]:
    for setting in space.corners(COST_KEYS):
        config = space.apply(base, setting)
        if config.build_method().clip_rule.name in UNBOUNDED:
            raise ConfigError(f"{space.origin}: method {config.method.name} is not private; with --charge leave it out")
        yield config


def _curves(configs: Sequence[Config], data: Dataset, trial_epsilon: float) -> tuple[Curve, ...]:
    """What a trial with each of the configs releases, without repetition."""
    return tuple(dict.fromkeys(releases_of(config, data, trial_epsilon) for config in configs))


def releases_of(config: Config, data: Dataset, epsilon: float | None = None) -> Curve:
    """What a training with this config releases; `epsilon` replaces its budget."""
    settings = config.settings()
    if epsilon is not None:
        settings = settings.model_copy(update={"privacy": settings.privacy.model_copy(update={"epsilon": epsilon})})
    plan = plan_for(data, config.build_method(), settings, config.model.train, config.model.noise_weights)
    return merged(astuple(event) for event in plan.releases(plan.steps))
