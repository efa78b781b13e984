"""The privacy statement: epsilon with every condition it depends on, computed from the ledger only."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from importlib import metadata
from typing import Any

from .._validate import finite_in, integer_in
from ..errors import LedgerError
from ..rounding import ceil_text
from . import accounting
from .ledger import ASSUMED_INDEPENDENT, NOISE_WEIGHTS, NOT_PRIVATE, Ledger
from .selection import ACCOUNTANT as SELECTION_ACCOUNTANT
from .selection import Selection, merged
from .tradeoff import TradeOff, membership_sentence
from .unbounded import UNBOUNDED

TUNING = "not charged"  # choosing the best of several runs spends privacy that the ledger of one run cannot record
CHARGED_TUNING = "charged"  # unless the run is the best trial of a charged search
SEEN_WITHOUT_PRIVACY = "the initial weights were trained on these records without privacy"
_LARGEST_MU, _MOST_SETTINGS = 30.0, 8  # limits for a ledger that is accounted for
_PACKAGES = ("torch", "dp-accounting")  # they compute the weights and epsilon
_NEIGHBORS = {accounting.RELATION: "data sets that differ by adding or removing one record"}
_NOISE = {"secret": "The noise came from a secret key, destroyed with the last step.", "seeded": "The noise seed is known."}


@dataclass(frozen=True)
class Statement:
    """The guarantee for each record in the training set. `epsilon` is infinite when there is none.

    `train` prints this object. It is also stored in metrics.json, in the model's header and in exported bundles, so that
    no number appears without its conditions. `versions` are those of the training software (None: not recorded).
    """

    private: bool
    reason: str | None
    epsilon: float
    delta: float
    noise_multiplier: float
    sampling_probability: float
    steps: int
    clip_norm: float | None
    releases: tuple[accounting.GaussianSteps, ...] = field(repr=False)  # everything that is charged, including `earlier`
    conditions: tuple[str, ...] = field(default=())
    relation: str = accounting.RELATION
    accountant: str = accounting.ACCOUNTANT
    sampling: str = "poisson"
    noise_source: str = "secret"
    tuning: str = TUNING
    versions: Mapping[str, str] | None = None
    earlier: tuple[accounting.GaussianSteps, ...] = ()  # steps of the initial weights on these records
    phases: tuple[Mapping[str, Any], ...] = ()  # of the plan, if there are several
    public_inputs: tuple[Mapping[str, Any], ...] = ()  # weights and data that epsilon does not cover
    selection: Selection | None = None  # the charged search that this run is the best trial of

    @property
    def short(self) -> str:
        """One line: never a finite number without its delta, never a number for a run that is not private."""
        if not self.private:
            return f"epsilon = inf (not private: {self.reason})"
        return f"epsilon = {ceil_text(self.epsilon, 4)} at delta = {self.delta:g}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The conditions behind `short`, one per sentence: the same text on the terminal, in the report and in a bundle."""
        mechanism: list[str] = []
        if self.private:
            mechanism = [
                f"Neighbours: {_NEIGHBORS[self.relation]}. Accountant: {self.accountant.upper()}.",
                *self._steps_in_words(),
                _NOISE[self.noise_source],
            ]
        software = (
            []
            if self.versions is None
            else [f"Made with {', '.join(f'{name} {self.versions[name]}' for name in sorted(self.versions))}."]
        )
        return (*mechanism, *self.conditions, *software)

    def _steps_in_words(self) -> list[str]:
        """The sampling, clip norm and noise of the steps, one sentence for each phase."""
        own: dict[str, Any] = {"steps": self.steps, "sampling_probability": self.sampling_probability}
        own |= {"clip_norm": self.clip_norm, "noise_multiplier": self.noise_multiplier}
        sentences = []
        for number, phase in enumerate(self.phases or (own,), start=1):
            verb = "releases the" if phase.get("trains") == NOISE_WEIGHTS else "trains"
            which = f"Phase {number} {verb} {phase['trains']}: " if self.phases else ""
            sentences.append(
                f"{which}{phase['steps']} steps of {self.sampling.capitalize()} sampling (q = "
                f"{phase['sampling_probability']:.6g}), clip norm {phase['clip_norm']:g}, noise multiplier "
                f"{phase['noise_multiplier']:g}."
            )
        return sentences

    def releases_after(self, steps: int) -> list[accounting.GaussianSteps]:
        """Return what was released about the records after the first `steps` charged steps, earlier training included."""
        events = list(self.earlier)
        for release in self.releases[len(self.earlier) :]:
            taken = min(steps, release.steps)
            steps -= taken
            events.append(accounting.GaussianSteps(release.noise_multiplier, release.sampling_probability, taken))
        return events

    def epochs_after(self, steps: int) -> float:
        """Return how often a record was sampled in the first `steps` steps, on average."""
        return sum(event.steps * event.sampling_probability for event in self.releases_after(steps)[len(self.earlier) :])

    @property
    def trade_off(self) -> TradeOff | None:
        """Bound on the best possible membership attack; None if the run is not private. Computed on access, cached."""
        if not self.private:
            return None
        if self.selection is None:
            return TradeOff(*accounting.privacy_profile(self.releases))
        return TradeOff(*self.selection.profile(_curve(self.releases[len(self.earlier) :]), _curve(self.earlier)))

    @property
    def membership(self) -> str:
        """What epsilon means for one record, in one sentence. Not stored in `sentences`: it follows from the ledger."""
        return membership_sentence(self.trade_off)

    @property
    def without_membership(self) -> str:
        """The statement as older versions printed it, without the sentence on membership attacks."""
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
            **({"phases": [dict(phase) for phase in self.phases]} if self.phases else {}),
            **({"public_inputs": [dict(known) for known in self.public_inputs]} if self.public_inputs else {}),
            **({} if self.selection is None else {"repeat_and_select": self.selection.facts}),
        }


def state(ledger: Ledger, versions: Mapping[str, str] | None = None) -> Statement:
    """Return the statement that follows from a ledger; `versions` are those of the software that made the run.

    Guarantee: epsilon is finite only if gradients were clipped, noise was added, batches were Poisson, the noise was
    secret and every step is in the ledger; otherwise `reason` names the first missing condition.
    """
    facts = _checked(ledger.opening)
    releases = list(ledger.releases())
    relation = facts.get("relation", accounting.RELATION)
    reason = why_not_private(ledger)
    delta, phases = facts["delta"], facts.get("phases", ())
    selection = ledger.selection
    epsilon = math.inf if reason else _spent(ledger, delta)
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
        phases=tuple({**phase, "sampling_probability": phase["batch_size"] / facts["dataset_size"]} for phase in phases),
        public_inputs=tuple(_public_inputs(facts)),
        selection=selection,
        accountant=accounting.ACCOUNTANT if selection is None else SELECTION_ACCOUNTANT,
        tuning=TUNING if selection is None else CHARGED_TUNING,
    )


def _spent(ledger: Ledger, delta: float) -> float:
    """Return epsilon of everything that was released: of the whole search, if the run is its best trial."""
    if ledger.selection is None:
        return accounting.compose(ledger.releases(), delta)
    return ledger.selection.epsilon(_curve(ledger.own_releases()), delta, _curve(ledger.earlier))


def _curve(releases: Iterable[accounting.GaussianSteps]) -> tuple[tuple[float, float, int], ...]:
    return merged(astuple(release) for release in releases)


def state_of_file(data: bytes, origin: str) -> Statement:
    """Return the statement that follows from the bytes of an untrusted ledger."""
    ledger = Ledger.parse(data, origin)
    reason = why_too_costly(ledger.releases())
    if reason is not None:
        raise LedgerError(f"{origin} cannot be accounted for: {reason}")
    return state(ledger)


def why_too_costly(releases: Iterable[accounting.GaussianSteps]) -> str | None:
    """Return why the accountant would need hours for these releases; None for an honest ledger, which stays far below.

    The central limit of Gaussian DP, mu^2 = sum of T q^2 (exp(1/rho^2) - 1), is a cheap estimate of what the steps spend.
    At mu = 30, epsilon is in the hundreds, far above any calibrated run.
    """
    charged = Counter[tuple[float, float]]()
    for release in releases:
        if release.noise_multiplier == 0.0:
            return None  # not private: nothing is composed
        charged[release.noise_multiplier, release.sampling_probability] += release.steps
    if len(charged) > _MOST_SETTINGS:
        return f"the ledger has {len(charged)} noise settings; a run has one"
    spent = 0.0
    for (rho, q), steps in charged.items():
        per_step = 1.0 / max(rho, 1e-3) ** 2
        one = per_step if q == 1.0 else q * q * math.expm1(min(per_step, 600.0))
        spent += min(steps, 2**62) * one
    return None if spent <= _LARGEST_MU**2 else "its steps spend hundreds of epsilon: such a ledger promises nothing"


def why_not_private(ledger: Ledger) -> str | None:
    """Return the first condition for a finite epsilon that the ledger does not meet; None if it meets all."""
    facts, releases = _checked(ledger.opening), list(ledger.releases())
    planned = [facts["noise_multiplier"], *(phase["noise_multiplier"] for phase in facts.get("phases", ()))]
    planned += [] if ledger.selection is None else [block[0] for curve in ledger.selection.curves for block in curve]
    relation = facts.get("relation", accounting.RELATION)
    conditions = {
        UNBOUNDED.get(facts["clip_rule"], ""): facts["clip_rule"] not in UNBOUNDED,
        "no noise is added": all(release.noise_multiplier > 0 for release in releases) and min(planned) > 0,
        f"batches are {facts['sampling']}, not Poisson": facts["sampling"] == "poisson",
        "the noise seed is known": facts["noise_source"] == "secret",
        SEEN_WITHOUT_PRIVACY: facts.get("initial_weights") != NOT_PRIVATE,
        f"neighbours are {relation}, which the accountant does not know": relation == accounting.RELATION,
        "the noise is far too small for so many steps": not accounting.is_beyond_reach(releases),
    }
    return next((name for name, holds in conditions.items() if not holds), None)


def _public_inputs(facts: Any) -> list[dict[str, str]]:
    """Return what the first line says about public weights: texts only."""
    stated, keys = facts.get("public_inputs", []), ("name", "sha256", "data")
    if not isinstance(stated, list) or not all(
        isinstance(known, dict) and all(isinstance(known.get(key), str) for key in keys) for known in stated
    ):
        raise LedgerError("the ledger's first line has no valid 'public_inputs'; restore the ledger from a copy")
    return stated


def _checked(facts: Any) -> Any:
    """Return the opening line if it has all facts a statement needs, with the right types (an intact chain may lack them)."""
    number, whole = (int, float), int
    kinds: dict[str, Any] = {"clip_rule": str, "sampling": str, "noise_source": str, "size_given": bool, "classes_given": bool}
    kinds |= {"noise_multiplier": number, "sampling_probability": number, "delta": number}
    kinds |= {"dataset_size": whole, "classes": whole, "held_out": whole}
    wrong = [key for key, kind in kinds.items() if not isinstance(facts.get(key), kind)]
    wrong += [key for key, kind in kinds.items() if kind is not bool and isinstance(facts.get(key), bool)]
    unbounded = facts.get("clip_rule") in UNBOUNDED and facts.get("clip_norm") is None
    wrong += [] if unbounded or isinstance(facts.get("clip_norm"), number) else ["clip_norm"]
    if wrong:
        raise LedgerError(f"the ledger's first line has no valid {wrong[0]!r}; restore the ledger from a copy")
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
    for known in _public_inputs(facts):
        conditions.append(
            f"The initial weights {known['name']} (SHA-256 {known['sha256'][:16]}...) were trained on public data, which "
            f"epsilon does not cover: {known['data']}."
        )
    if not facts["size_given"]:
        conditions.append(f"The size of the training set, N = {size}, is treated as public.")
    if not facts["classes_given"]:
        conditions.append(f"The number of classes, {facts['classes']}, is treated as public.")
    if facts["held_out"]:
        conditions.append(f"The {facts['held_out']} held-out validation records are not covered by epsilon.")
    if facts["delta"] * size >= 1:
        conditions.append(f"delta is not below 1/N = {1 / size:.2g}: such a promise is weak.")
    if ledger.selection is None:
        conditions.append("Choosing settings by looking at several runs is not charged.")
    else:
        conditions += _about(ledger.selection)
    if not ledger.is_closed:
        conditions.append("The run is not finished; steps are charged a block at a time, before they run.")
    return conditions


def _about(selection: Selection) -> list[str]:
    law = f"{selection.law} law, mean {selection.mean:g}"
    return [
        f"The model is the best of a random number of trials ({law}); epsilon covers the whole search.",
        "It holds only if nothing else of the search is released: no other trial, no score, not the number of trials.",
        "Other searches and other runs on these records are not charged.",
    ]


def installed_versions() -> dict[str, str]:
    """Return the versions of dpcert, PyTorch and the accountant. Imports none of them."""
    from .. import __version__

    return {"dpcert": __version__, **{package: metadata.version(package) for package in _PACKAGES}}


def recorded_versions(header: Mapping[str, str]) -> dict[str, str] | None:
    """Return the versions in the header of a model file; None for older files that do not record them."""
    try:
        versions = json.loads(header["statement"])["versions"]
        return {str(name): str(version) for name, version in versions.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None
