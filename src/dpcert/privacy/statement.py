"""The privacy statement: epsilon with every condition it stands on, made from the ledger only."""

import math
from dataclasses import dataclass, field
from typing import Any

from .._validate import finite_in, integer_in
from ..errors import LedgerError
from ..rounding import ceil_text
from . import accounting
from .ledger import Ledger


@dataclass(frozen=True)
class Statement:
    """What is promised to whoever is in the training set. `epsilon` is infinite when nothing is promised."""

    private: bool
    reason: str | None
    epsilon: float
    delta: float
    noise_multiplier: float
    sampling_probability: float
    steps: int
    clip_norm: float | None
    conditions: tuple[str, ...] = field(default=())

    @property
    def short(self) -> str:
        """One line: never a finite number without its delta, never a number for a run that is not private."""
        if not self.private:
            return f"epsilon = inf (not private: {self.reason})"
        return f"epsilon = {ceil_text(self.epsilon, 4)} at delta = {self.delta:g}"

    def __str__(self) -> str:
        lines = [self.short]
        if self.private:
            lines.append("Neighbours: data sets that differ by adding or removing one record. Accountant: PLD.")
            lines.append(
                f"{self.steps} steps of Poisson sampling (q = {self.sampling_probability:.6g}), clip norm "
                f"{self.clip_norm:g}, noise multiplier {self.noise_multiplier:g}."
            )
        return "\n".join([*lines, *self.conditions])

    def as_metrics(self) -> dict[str, Any]:
        """The `privacy` part of metrics.json."""
        return {
            "private": self.private,
            "reason": self.reason,
            "epsilon": self.epsilon if self.private else None,
            "delta": self.delta,
            "relation": accounting.RELATION,
            "accountant": accounting.ACCOUNTANT,
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": self.sampling_probability,
            "steps": self.steps,
            "clip_norm": self.clip_norm,
            "conditions": list(self.conditions),
        }


def state(ledger: Ledger) -> Statement:
    """The statement that follows from a ledger.

    Guarantee: epsilon is finite only if gradients were clipped, noise was added, batches were Poisson, the noise was
    secret and every step is in the ledger; otherwise the first missing condition is named.
    """
    facts = _checked(ledger.opening)
    releases = list(ledger.releases())
    missing = {
        "gradients are not clipped": facts["clip_rule"] != "none",
        "no noise is added": all(release.noise_multiplier > 0 for release in releases) and facts["noise_multiplier"] > 0,
        f"batches are {facts['sampling']}, not Poisson": facts["sampling"] == "poisson",
        "the noise seed is known": facts["noise_source"] == "secret",
        "the noise is far too small for so many steps": not accounting.is_beyond_reach(releases),
    }
    reason = next((name for name, holds in missing.items() if not holds), None)
    delta = facts["delta"]
    epsilon = math.inf if reason else accounting.compose(releases, delta)
    if reason is None and math.isinf(epsilon):
        reason = f"the noise multiplier is below {accounting.SMALLEST_NOISE_MULTIPLIER:g}"
    return Statement(
        private=reason is None,
        reason=reason,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=facts["noise_multiplier"],
        sampling_probability=facts["sampling_probability"],
        steps=ledger.steps_authorised,
        clip_norm=facts["clip_norm"],
        conditions=tuple(_conditions(facts, ledger.is_closed)),
    )


def _checked(facts: Any) -> Any:
    """The opening line, if all that a statement stands on is there and of its kind; a chain can be whole and still nonsense."""
    number, whole = (int, float), int
    kinds: dict[str, Any] = {"clip_rule": str, "sampling": str, "noise_source": str, "size_given": bool, "classes_given": bool}
    kinds |= {"noise_multiplier": number, "sampling_probability": number, "delta": number}
    kinds |= {"dataset_size": whole, "classes": whole, "held_out": whole}
    wrong = [key for key, kind in kinds.items() if not isinstance(facts.get(key), kind)]
    wrong += [key for key, kind in kinds.items() if kind is not bool and isinstance(facts.get(key), bool)]
    unbounded = facts.get("clip_rule") == "none" and facts.get("clip_norm") is None
    wrong += [] if unbounded or isinstance(facts.get("clip_norm"), number) else ["clip_norm"]
    if wrong:
        raise LedgerError(f"the ledger's first line states no usable {wrong[0]!r}; restore the ledger from a copy")
    finite_in("the ledger's delta", facts["delta"], 0.0, 1.0, open_low=True, open_high=True, error=LedgerError)
    integer_in("the ledger's dataset_size", facts["dataset_size"], 1, 2**53, error=LedgerError)
    return facts


def _conditions(facts: Any, closed: bool) -> list[str]:
    size = facts["dataset_size"]
    conditions = []
    if not facts["size_given"]:
        conditions.append(f"The size of the training set, N = {size}, is treated as public.")
    if not facts["classes_given"]:
        conditions.append(f"The number of classes, {facts['classes']}, is treated as public.")
    if facts["held_out"]:
        conditions.append(f"The {facts['held_out']} held-out validation records are not covered by epsilon.")
    if facts["delta"] * size >= 1:
        conditions.append(f"delta is not below 1/N = {1 / size:.2g}: such a promise is weak.")
    conditions.append("Choosing settings by looking at several runs is not charged.")
    if not closed:
        conditions.append("The run is not finished; steps are charged a block at a time, before they run.")
    return conditions
