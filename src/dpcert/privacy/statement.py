"""The privacy statement: epsilon with every condition it stands on, made from the ledger only."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from .._validate import finite_in, integer_in
from ..errors import LedgerError
from ..rounding import ceil_text
from . import accounting
from .ledger import ASSUMED_INDEPENDENT, NOT_PRIVATE, Ledger
from .tradeoff import TradeOff, membership_sentence

TUNING = "not charged"  # best-of-k: choosing among several runs spends privacy that no ledger of one run can see
SEEN_WITHOUT_PRIVACY = "the initial weights were trained on these records without privacy"
_LARGEST_MU, _MOST_SETTINGS = 30.0, 8  # of a ledger that is accounted for
_PACKAGES = ("torch", "dp-accounting")  # what computed the weights, and what computed epsilon
_NEIGHBOURS = {accounting.RELATION: "data sets that differ by adding or removing one record"}
_NOISE = {"secret": "The noise came from a secret key, destroyed with the last step.", "seeded": "The noise seed is known."}


@dataclass(frozen=True)
class Statement:
    """What is promised to whoever is in the training set. `epsilon` is infinite when nothing is promised.

    The same object is printed by `train` and stored in metrics.json, in the model's header and in what is exported, so
    that no number is ever met without its conditions. `versions` are of the software that trained (None: not recorded).
    """

    private: bool
    reason: str | None
    epsilon: float
    delta: float
    noise_multiplier: float
    sampling_probability: float
    steps: int
    clip_norm: float | None
    releases: tuple[accounting.GaussianSteps, ...] = field(repr=False)  # all that is charged, `earlier` included
    conditions: tuple[str, ...] = field(default=())
    relation: str = accounting.RELATION
    accountant: str = accounting.ACCOUNTANT
    sampling: str = "poisson"
    noise_source: str = "secret"
    tuning: str = TUNING
    versions: Mapping[str, str] | None = None
    earlier: tuple[accounting.GaussianSteps, ...] = ()  # steps that the initial weights had taken on these records

    @property
    def short(self) -> str:
        """One line: never a finite number without its delta, never a number for a run that is not private."""
        if not self.private:
            return f"epsilon = inf (not private: {self.reason})"
        return f"epsilon = {ceil_text(self.epsilon, 4)} at delta = {self.delta:g}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What `short` stands on, a sentence each: the same words on the terminal, in the report and in a bundle."""
        how: list[str] = []
        if self.private:
            how = [
                f"Neighbours: {_NEIGHBOURS[self.relation]}. Accountant: {self.accountant.upper()}.",
                f"{self.steps} steps of {self.sampling.capitalize()} sampling (q = {self.sampling_probability:.6g}), clip norm "
                f"{self.clip_norm:g}, noise multiplier {self.noise_multiplier:g}.",
                _NOISE[self.noise_source],
            ]
        made = (
            []
            if self.versions is None
            else [f"Made with {', '.join(f'{name} {self.versions[name]}' for name in sorted(self.versions))}."]
        )
        return (*how, *self.conditions, *made)

    @property
    def trade_off(self) -> TradeOff | None:
        """What the best possible membership attack can do; None where nothing is promised. Computed when asked for, once."""
        return TradeOff(*accounting.privacy_profile(self.releases)) if self.private else None

    @property
    def membership(self) -> str:
        """What epsilon means for one record, in a sentence. Not among the stored `sentences`: it follows from the ledger."""
        return membership_sentence(self.trade_off)

    @property
    def without_membership(self) -> str:
        """The statement as versions before the sentence on membership attacks printed it."""
        return "\n".join([self.short, *self.sentences])

    def __str__(self) -> str:
        return "\n".join([self.short, self.membership, *self.sentences])

    def as_metrics(self) -> dict[str, Any]:
        """The `privacy` part of metrics.json, and (as canonical JSON) the `statement` of the model's header."""
        return {
            "private": self.private,
            "reason": self.reason,
            "epsilon": self.epsilon if self.private else None,
            "delta": self.delta,
            "relation": self.relation,
            "accountant": self.accountant,
            "noise_multiplier": self.noise_multiplier,
            "sampling_probability": self.sampling_probability,
            "steps": self.steps,
            "clip_norm": self.clip_norm,
            "conditions": list(self.conditions),
            "sampling": self.sampling,
            "noise_source": self.noise_source,
            "tuning": self.tuning,
            "versions": None if self.versions is None else dict(sorted(self.versions.items())),
            "sentences": list(self.sentences),
        }


def state(ledger: Ledger, versions: Mapping[str, str] | None = None) -> Statement:
    """The statement that follows from a ledger; `versions` is of the software that made the run.

    Guarantee: epsilon is finite only if gradients were clipped, noise was added, batches were Poisson, the noise was
    secret and every step is in the ledger; otherwise the first missing condition is named.
    """
    facts = _checked(ledger.opening)
    releases = list(ledger.releases())
    relation = facts.get("relation", accounting.RELATION)
    reason = why_not_private(ledger)
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
        releases=tuple(releases),
        conditions=tuple(_conditions(facts, ledger)),
        relation=relation,
        sampling=facts["sampling"],
        noise_source=facts["noise_source"],
        versions=versions,
        earlier=ledger.earlier,
    )


def state_of_file(data: bytes, origin: str) -> Statement:
    """The statement that follows from the bytes of a ledger that somebody else may have written."""
    ledger = Ledger.parse(data, origin)
    reason = why_too_costly(ledger.releases())
    if reason is not None:
        raise LedgerError(f"{origin} cannot be accounted for: {reason}")
    return state(ledger)


def why_too_costly(releases: Iterable[accounting.GaussianSteps]) -> str | None:
    """Why a ledger was made to keep the accountant busy for hours; None for an honest one, which is never near these bounds.

    The central limit of Gaussian DP, mu^2 = sum of T q^2 (exp(1/rho^2) - 1), tells cheaply how much the steps spend; at
    mu = 30 epsilon is in the hundreds, where a calibrated run never is.
    """
    charged = Counter[tuple[float, float]]()
    for release in releases:
        if release.noise_multiplier == 0.0:
            return None  # not private: nothing is composed
        charged[release.noise_multiplier, release.sampling_probability] += release.steps
    if len(charged) > _MOST_SETTINGS:
        return f"the ledger holds {len(charged)} settings of the noise; a run has one"
    spent = 0.0
    for (rho, q), steps in charged.items():
        per_step = 1.0 / max(rho, 1e-3) ** 2
        one = per_step if q == 1.0 else q * q * math.expm1(min(per_step, 600.0))
        spent += min(steps, 2**62) * one
    return None if spent <= _LARGEST_MU**2 else "its steps spend hundreds of epsilon: such a ledger promises nothing"


def why_not_private(ledger: Ledger) -> str | None:
    """The first condition of a finite epsilon that the ledger does not meet; None where it meets all."""
    facts, releases = _checked(ledger.opening), list(ledger.releases())
    relation = facts.get("relation", accounting.RELATION)
    conditions = {
        "gradients are not clipped": facts["clip_rule"] != "none",
        "no noise is added": all(release.noise_multiplier > 0 for release in releases) and facts["noise_multiplier"] > 0,
        f"batches are {facts['sampling']}, not Poisson": facts["sampling"] == "poisson",
        "the noise seed is known": facts["noise_source"] == "secret",
        SEEN_WITHOUT_PRIVACY: facts.get("initial_weights") != NOT_PRIVATE,
        f"neighbours are {relation}, which the accountant does not know": relation == accounting.RELATION,
        "the noise is far too small for so many steps": not accounting.is_beyond_reach(releases),
    }
    return next((name for name, holds in conditions.items() if not holds), None)


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
    finite_in("the ledger's delta", facts["delta"], 0.0, accounting.LARGEST_DELTA, open_low=True, error=LedgerError)
    integer_in("the ledger's dataset_size", facts["dataset_size"], 1, 2**53, error=LedgerError)
    return facts


def _conditions(facts: Any, ledger: Ledger) -> list[str]:
    size = facts["dataset_size"]
    conditions = []
    if ledger.earlier:
        steps = sum(release.steps for release in ledger.earlier)
        conditions.append(
            f"The initial weights had already been trained on these records; epsilon covers those {steps} steps too."
        )
    elif facts.get("initial_weights") == ASSUMED_INDEPENDENT:
        conditions.append("The initial weights must not depend on the training records.")
    if not facts["size_given"]:
        conditions.append(f"The size of the training set, N = {size}, is treated as public.")
    if not facts["classes_given"]:
        conditions.append(f"The number of classes, {facts['classes']}, is treated as public.")
    if facts["held_out"]:
        conditions.append(f"The {facts['held_out']} held-out validation records are not covered by epsilon.")
    if facts["delta"] * size >= 1:
        conditions.append(f"delta is not below 1/N = {1 / size:.2g}: such a promise is weak.")
    conditions.append("Choosing settings by looking at several runs is not charged.")
    if not ledger.is_closed:
        conditions.append("The run is not finished; steps are charged a block at a time, before they run.")
    return conditions


def installed_versions() -> dict[str, str]:
    """The versions a statement names: ours, of what trains, of what accounts. Read without importing any of them."""
    from .. import __version__

    return {"dpcert": __version__, **{package: metadata.version(package) for package in _PACKAGES}}


def recorded_versions(header: Mapping[str, str]) -> dict[str, str] | None:
    """The versions that the header of a model file states; None where it was made before they were recorded."""
    try:
        versions = json.loads(header["statement"])["versions"]
        return {str(name): str(version) for name, version in versions.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None
