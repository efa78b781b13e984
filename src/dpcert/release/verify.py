"""Verify a run as an outsider: do its files agree with each other, and does its epsilon follow from its ledger?

Needs no secret and no data. Guarantee: if nothing failed, the ledger is a complete chain that belongs to these weights and
this config, the stated epsilon is the cost of its steps (also at each point of the training curve), and every figure of the
certificates follows from the votes in the rows. What this cannot show (that the ledger describes what actually ran) is
listed as not checked.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import PurePath
from typing import Any

from ..errors import DpcertError, RunError, VerifyError
from ..methods import ALL_METHODS
from ..privacy.ledger import Ledger
from ..privacy.selection import merged
from ..privacy.statement import Statement, recorded_versions, state, why_too_costly
from ..privacy.unbounded import UNBOUNDED
from ..runs.config import Config, parse_text
from ..store.durable import sha256_hex
from ..store.metrics import parse_unread_metrics
from ..store.opened import open_rows
from ..store.public import ROWS, PublicFiles
from ..store.records import CurveRow
from ..store.runs import ATTACKS, CONFIG, CURVE, LEDGER, METRICS, MODEL, PRIVATE, REPORT, SAMPLES
from ..training.curve import epsilon_after, spent
from ..training.phases import phases_of
from ..training.state import parse_model
from ..views import ADVERSARIAL
from . import certificates
from .certificates import NotCheckedError
from .files import MANIFEST, STATEMENT
from .laws import law_follows

OK, FAILED, NOT_CHECKED = "ok", "FAILED", "not checked"
_MOST_POINTS = 100  # of a training curve: epsilon is recomputed for each
_EPOCH_UNIT, _EPSILON_UNIT = 1e-4, 1e-6  # its rows are rounded to these units
_CLOSE = 1e-6  # relative: epsilon recomputed by another build of the same accountant


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class Evidence:
    """The files and what is parsed from them; each property raises if its file is missing or damaged."""

    files: PublicFiles

    def bytes_of(self, name: str) -> bytes:
        """The content of a required file."""
        return self.files.bytes_of(name)

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        return name in self.files.content

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger, its chain checked."""
        return Ledger.parse(self.bytes_of(LEDGER), LEDGER)

    @cached_property
    def config(self) -> Config:
        """The config."""
        return parse_text(self.bytes_of(CONFIG), CONFIG)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json."""
        return parse_unread_metrics(self.bytes_of(METRICS), METRICS)

    @cached_property
    def header(self) -> dict[str, str]:
        """The facts in the header of the model file, after its content hash was verified."""
        return parse_model(self.bytes_of(MODEL), MODEL)[1]

    @cached_property
    def statement(self) -> Statement:
        """What the ledger proves. Versions are not in it; they come from the model header or, without one, metrics.json."""
        too_costly = why_too_costly(self.ledger.releases())
        _expect(too_costly is None, str(too_costly))
        if self.has(MODEL):
            return state(self.ledger, recorded_versions(self.header))
        stated = self.metrics["privacy"].get("versions")
        return state(self.ledger, stated if isinstance(stated, dict) else None)


def verify(files: PublicFiles) -> list[Check]:
    """Run all checks. Never raises because of the content of the files: a problem there is a failed check."""
    evidence = Evidence(files)
    wanted = {**(_OF_A_BUNDLE if files.is_bundle else {}), **_CHECKS}
    checks = [_run(name, partial(check, evidence)) for name, check in wanted.items()]
    return [*checks, *_certificates(evidence), *_not_evidence(files), *_out_of_reach()]


def require_verified(files: PublicFiles, checks: list[Check]) -> None:
    """Raise an error that names the failed checks, if any."""
    failed = [check for check in checks if check.outcome == FAILED]
    if failed:
        names = ", ".join(check.name for check in failed)
        raise VerifyError(f"{files.origin} does not verify: {names} ({failed[0].detail}); get an intact copy from its author")


def _run(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, OK, check())
    except NotCheckedError as reason:
        return Check(name, NOT_CHECKED, str(reason))
    except DpcertError as error:
        return Check(name, FAILED, str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError, MemoryError) as error:
        # The files are untrusted and may contain anything.
        return Check(name, FAILED, f"unexpected format ({type(error).__name__}: {str(error)[:100]})")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyError(message)


def _manifest(evidence: Evidence) -> str:
    stated = certificates.json_object(evidence.bytes_of(MANIFEST), MANIFEST)["sha256"]
    actual = {name: sha256_hex(data) for name, data in evidence.files.content.items() if name != MANIFEST}
    _expect(set(stated) == set(actual), f"{MANIFEST} lists other files: {sorted(set(stated) ^ set(actual))[:3]}")
    for name, digest in actual.items():
        _expect(stated[name] == digest, f"{name} does not have the SHA-256 in {MANIFEST}")
    return f"{len(actual)} files have the SHA-256 in {MANIFEST}"


def _chain(evidence: Evidence) -> str:
    return f"{len(evidence.ledger.events)} lines, each follows from the previous one"


def _finished(evidence: Evidence) -> str:
    ledger = evidence.ledger
    _expect(ledger.is_closed, "the ledger is not closed: the run is not finished")
    planned = ledger.opening["steps"]
    _expect(ledger.steps_authorised == planned, f"{ledger.steps_authorised} steps are charged, {planned} were planned")
    _expect(not evidence.files.key_is_here, "private/key still exists: anyone who has it can recompute the noise")
    return f"closed after the {planned} planned steps"


def _plan(evidence: Evidence) -> str:
    """Check that every charged step has the noise and sampling of its phase, which is what the statement prints."""
    plan = evidence.ledger.opening
    rate = plan["batch_size"] / plan["dataset_size"]
    _expect(plan["sampling_probability"] == rate, f"q is {plan['sampling_probability']}, batch size / N is {rate}")
    _expect(plan["divisor"] == plan["batch_size"], "the divisor is not the expected batch size")
    phases = plan.get("phases", [plan])
    ends, done = list(accumulate(phase["steps"] for phase in phases)), 0
    for release in evidence.ledger.own_releases():
        index = next((index for index, end in enumerate(ends) if done < end), None)
        _expect(index is not None and done + release.steps <= ends[index], "a block of steps goes beyond its phase")
        phase = phases[index or 0]
        wanted = (phase["noise_multiplier"], phase["batch_size"] / plan["dataset_size"])
        stated = (release.noise_multiplier, release.sampling_probability)
        _expect(stated == wanted, f"some steps have noise multiplier and q {stated}, the plan {wanted}")
        done += release.steps
    selection = evidence.ledger.selection
    if selection is not None:
        own = merged(astuple(release) for release in evidence.ledger.own_releases())
        _expect(own in selection.curves, "the search does not list a trial with these steps")
    last = phases[-1]
    same = all(last[name] == plan[name] for name in ("batch_size", "clip_norm", "noise_multiplier"))
    _expect(same, "the plan does not have the settings of its last phase")
    return "; ".join(
        f"{phase['steps']} steps with noise multiplier {phase['noise_multiplier']:g} and q = "
        f"{phase['batch_size'] / plan['dataset_size']:.6g}"
        for phase in phases
    )


def _config_and_plan(evidence: Evidence) -> str:
    config, plan = evidence.config, evidence.ledger.opening
    row = ALL_METHODS.get(config.method.name)
    bounded = plan["clip_rule"] not in UNBOUNDED
    seeded = config.privacy.noise_seed is not None
    views = config.method.views or (row.views if row is not None else None)
    settings = config.settings()
    phases = phases_of(
        settings,
        plan["dataset_size"],
        config.model.train,
        adversarial=views in ADVERSARIAL,
        noise_weights=config.model.noise_weights,
    )
    wanted: dict[str, Any] = {
        "batch_size": phases[-1].batch_size,
        "steps": sum(phase.steps for phase in phases),
        "held_out": config.data.validation,
        "delta": config.privacy.delta,
        "clip_norm": phases[-1].clip_norm if bounded else None,
        "target_epsilon": config.privacy.epsilon if bounded else None,
        "noise_source": "seeded" if seeded else "secret",
    }
    if config.data.size is not None:  # the public N, which q and epsilon depend on
        wanted |= {"dataset_size": config.data.size - config.data.validation, "size_given": True}
    for stated, phase in zip(plan.get("phases", ()), phases, strict=False):
        clip_norm = phase.clip_norm if bounded else None
        given = (stated["trains"], stated["batch_size"], stated["steps"], stated["clip_norm"])
        asked = (phase.trains, phase.batch_size, phase.steps, clip_norm)
        _expect(given == asked, f"the ledger states a phase {given}, {CONFIG} states {asked}")
    _expect(
        len(plan.get("phases", [plan])) == len(phases), f"{CONFIG} asks for {len(phases)} phases, the ledger has another number"
    )
    selection = settings.search.selection
    if selection is not None or "repeat_and_select" in plan:
        _expect(selection == evidence.ledger.selection, f"the ledger states another search than {CONFIG}")
    clip = config.method.clip or (row.clip if row is not None else None)
    wanted |= {} if clip is None else {"clip_rule": clip}
    wanted |= {} if config.data.input_shape is None else {"input_shape": config.data.input_shape}
    for name, value in wanted.items():
        _expect(plan[name] == value, f"the ledger states {name} = {plan[name]}, {CONFIG} states {value}")
    return f"{', '.join(wanted)} agree"


def _epsilon(evidence: Evidence) -> str:
    """Recompute the statement from the ledger and compare it with metrics.json, key by key."""
    stated, proved = evidence.metrics["privacy"], evidence.statement.as_metrics()
    _same_statement(stated, proved, METRICS, ("private", "reason", "epsilon", "delta", "relation", "accountant", "steps"))
    target = evidence.ledger.opening.get("target_epsilon")
    if (
        evidence.statement.private and target is not None and not evidence.ledger.earlier
    ):  # otherwise earlier steps add to the total
        _expect(evidence.statement.epsilon <= target * (1 + _CLOSE), f"epsilon is above the budget of {target}")
    return evidence.statement.short


def _same_statement(stated: Any, proved: dict[str, Any], where: str, required: tuple[str, ...]) -> None:
    for name, value in proved.items():
        if name not in stated:
            _expect(name not in required, f"{where} states no {name}")
            continue  # older runs do not record it
        claim = (
            f"a different {name} than" if isinstance(value, (list, dict)) else f"{name} = {stated[name]!s:.60}, not {value} as"
        )
        _expect(_equal(stated[name], value), f"{where} states {claim} the ledger proves")


def _equal(stated: Any, value: Any) -> bool:
    if isinstance(value, float) and not isinstance(stated, bool) and isinstance(stated, (int, float)):
        return math.isclose(stated, value, rel_tol=_CLOSE)
    return type(stated) is type(value) and bool(stated == value)


def _model(evidence: Evidence) -> str:
    _require_model(evidence)
    return f"{len(evidence.header)} facts and all weights match the SHA-256 in the header"


def _require_model(evidence: Evidence) -> None:
    if not evidence.has(MODEL):
        if evidence.files.is_bundle:
            raise RunError(f"{MODEL} is not in the bundle")
        raise NotCheckedError(f"{MODEL} is missing")


def _model_and_config(evidence: Evidence) -> str:
    _require_model(evidence)
    digest = sha256_hex(evidence.bytes_of(CONFIG))
    _expect(evidence.header.get("config_sha256") == digest, f"{CONFIG} is not the config these weights were trained with")
    config = evidence.config
    wanted = {
        "method": config.method.name,
        "dataset": evidence.metrics["dataset"],
        "averaging": config.train.averaging_in_words,
    }
    for name, value in wanted.items():
        stated = evidence.header.get(name)
        _expect(stated == value, f"the header of the model states {name} {stated}, the run {value}")
    _expect(evidence.metrics["method"] == config.method.name, f"{METRICS} names a different method than {CONFIG}")
    return "the header names the SHA-256 of the config, the method and the data set"


def _model_and_ledger(evidence: Evidence) -> str:
    _require_model(evidence)
    header, plan = evidence.header, evidence.ledger.opening
    _expect(header.get("ledger_head") == evidence.ledger.head, "these weights were trained with a different ledger")
    for name in sorted({"classes", "input_shape"} & header.keys()):  # headers of older versions have neither
        _expect(json.loads(header[name]) == plan[name], f"the header states {name} {header[name]}, the ledger {plan[name]}")
    if evidence.files.is_bundle or "ledger_sha256" not in header:  # a bundle omits the HMACs, which the digest covers
        return "the header names the head of this ledger"
    same = header["ledger_sha256"] == evidence.ledger.sha256
    _expect(same, f"{LEDGER} is not byte for byte the ledger these weights were trained with")
    return "the header names the SHA-256 of this ledger"


def _model_and_epsilon(evidence: Evidence) -> str:
    _require_model(evidence)
    header, statement = evidence.header, evidence.statement
    _expect(math.isclose(float(header["epsilon"]), statement.epsilon, rel_tol=_CLOSE), "the header states a different epsilon")
    _expect(float(header["delta"]) == statement.delta, "the header states a different delta")
    _expect(header["privacy"] == statement.short, f"the header states {header['privacy']!r}, the ledger {statement.short!r}")
    if "statement" not in header:
        return "epsilon and delta agree (the header is from an older version and has no full statement)"
    _same_statement(json.loads(header["statement"]), statement.as_metrics(), "the header", ("epsilon", "delta"))
    return "the statement in the header matches the ledger"


def _curve(evidence: Evidence) -> str:
    """Check that steps, epochs and epsilons of training.tsv follow from the ledger; its other columns cannot be checked."""
    if not evidence.has(CURVE):
        raise NotCheckedError(f"{CURVE} is missing: the training curve was not recorded")
    rows, statement = open_rows(CurveRow, evidence.files, CURVE), evidence.statement
    _expect(0 < len(rows) <= _MOST_POINTS, f"{CURVE} has {len(rows)} rows, must have 1 to {_MOST_POINTS}")
    steps = [row.step for row in rows]
    _expect(steps == sorted(steps) and steps[0] >= 1, f"{CURVE} is not sorted by step")
    _expect(steps[-1] == statement.steps, f"{CURVE} ends after {steps[-1]} steps, the ledger after {statement.steps}")
    for row in rows:
        epoch = statement.epochs_after(row.step)
        _expect(abs(row.epoch - epoch) <= _EPOCH_UNIT, f"step {row.step} is at epoch {epoch:.4f}, {CURVE} states {row.epoch}")
        _expect(
            _covers(row, statement),
            f"{CURVE} states epsilon {row.epsilon} after step {row.step}, which does not match the ledger",
        )
    return f"steps, epochs and epsilons of {len(rows)} points follow from the ledger"


def _covers(row: CurveRow, statement: Statement) -> bool:
    """Whether the epsilon of a row is at least the cost of its steps, and at most 1 % more."""
    if not statement.private:
        return math.isinf(row.epsilon)
    bound = spent(row.step, statement)  # a fast upper bound; a smaller epsilon is compared with the exact value
    least = bound if row.epsilon >= bound * (1 - _CLOSE) else epsilon_after(row.step, statement)
    return least * (1 - _CLOSE) <= row.epsilon <= 1.01 * least + _EPSILON_UNIT


def _statement_text(evidence: Evidence) -> str:
    text, statement = evidence.bytes_of(STATEMENT).decode(), evidence.statement
    _expect(text in (f"{statement}\n", f"{statement.without_membership}\n"), f"{STATEMENT} differs from what the ledger proves")
    return "matches the ledger word for word"


_OF_A_BUNDLE: dict[str, Callable[[Evidence], str]] = {"bundle's list of files": _manifest, STATEMENT: _statement_text}
_CHECKS: dict[str, Callable[[Evidence], str]] = {
    "ledger chain": _chain,
    "ledger closed": _finished,
    "ledger against its plan": _plan,
    "ledger against config": _config_and_plan,
    "epsilon recomputed": _epsilon,
    "model content": _model,
    "model against config": _model_and_config,
    "model against ledger": _model_and_ledger,
    "model against epsilon": _model_and_epsilon,
    "training curve": _curve,
}


def _certificates(evidence: Evidence) -> Iterator[Check]:
    """Check each certification in metrics.json (its model, its rows, its figures), then row files that are not listed there."""
    files = evidence.files
    entries: list[dict[str, Any]] = []
    yield _run("certificates", partial(_list_certifications, evidence, entries))
    for entry in entries:
        name = entry["file"]
        yield _run(f"{name} belongs to the model", partial(certificates.belongs, files, entry))
        if "smoothing" in entry:
            yield _run(f"{name} smoothing law", partial(_law, evidence, entry))
        yield _run(f"{name} rows", partial(certificates.radii_follow, files, entry))
        yield _run(f"{name} figures", partial(certificates.figures_follow, files, entry))
    for name, check in _SIDE_ROWS.items():
        if name in files.content:
            yield _run(name, partial(check, files))
    named = {CURVE, *_SIDE_ROWS, *(entry["file"] for entry in entries)}
    rows = {PurePath(name).with_suffix(".tsv").name for name in files.content if ROWS.fullmatch(name)}
    for name in sorted(rows - named):
        yield _run(f"{name} belongs to the model", partial(certificates.side_file, files, name))


def _law(evidence: Evidence, entry: dict[str, Any]) -> str:
    return law_follows(evidence.files, entry, evidence.config, evidence.ledger)


_SIDE_ROWS = {SAMPLES: certificates.samples_follow, ATTACKS: certificates.attacks_follow}


def _not_evidence(files: PublicFiles) -> list[Check]:
    """Files in a run directory that prove nothing: listed, so that nobody assumes they were checked."""
    names = [*([REPORT] if REPORT in files.content and not files.is_bundle else []), *files.others]
    names = [name for name in names if not name.startswith((".", PRIVATE))]
    reason = "reports, figures and other files are not compared with the rows; regenerate a report with dpcert report"
    return [Check(", ".join(names), NOT_CHECKED, reason)] if names else []


def _list_certifications(evidence: Evidence, entries: list[dict[str, Any]]) -> str:
    """Add the certifications to `entries`, if each of them names a separate file."""
    certifications = evidence.metrics["certification"]
    files = [str(entry["file"])[:120] for entry in certifications]
    _expect(files == [entry["file"] for entry in certifications], f"{METRICS} contains an invalid file name")
    _expect(len(set(files)) == len(files), f"{METRICS} lists a certificates file twice")
    entries.extend(certifications)
    return f"{METRICS} lists {len(files)}" if files else "none: the run is not certified"


def _out_of_reach() -> list[Check]:
    """What cannot be checked from files: always listed, so that nobody reads more into "ok" than it means."""
    reasons = {
        "the HMACs of the ledger": "checking them needs the run key, which was destroyed at the end of training",
        "that the noise was secret": "no file can show that nobody copied the key during training",
        "that these steps were what ran": "the trainer wrote the ledger; the code that writes it can be read and tested",
        "that the data were what they are said to be": "the training data is not included",
        "tuning": "other runs leave no trace in this one; the statement says which search is charged, if any",
        "accuracies and gradient norms of the training curve": "checking them needs the test images and the training gradients",
        "the votes and the clean accuracy": "checking them needs the images; repeat dpcert certify on a copy of the run",
    }
    return [Check(name, NOT_CHECKED, reason) for name, reason in reasons.items()]
