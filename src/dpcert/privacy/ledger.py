"""The privacy ledger: a hash chain of releases, each recorded before it happens.

A line is one event. ``open`` states the plan, ``authorise`` charges a block of steps *before* they run, ``close`` says
that the run is finished. Each line contains the hash of the line before it, so edited, missing or reordered lines are
detected. Each line also contains an HMAC under the run key, so nobody without the key can extend the chain.

Guarantee: at any time the steps charged here are at least the steps whose results exist, and at most one block more;
a finished run is charged exactly its steps. Epsilon is computed from these lines and from nothing else.
The file contains no time, host, path or resume event: two runs with the same seeds write the same bytes.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._validate import shown
from ..errors import LedgerError
from ..store.chain import GENESIS, REMEDY, digest_of, entry_of, lines_of
from ..store.durable import canonical_json, read_file, write_atomically
from .accounting import GaussianSteps
from .selection import Selection

# Formats: the first line of format 2 lists the `phases` of the plan, that of format 3 has a `repeat_and_select` event (and may
# list phases).
ONE_PHASE, SEVERAL_PHASES, SELECTED = 1, 2, 3
NEWEST_FORMAT = SELECTED
# Values of `initial_weights` in the first line (absent in older ledgers): not known to depend on the records, trained on them
# with the `earlier` steps, or trained on them without privacy.
ASSUMED_INDEPENDENT, TRAINED_BEFORE, NOT_PRIVATE = "assumed independent of the records", "trained before", "not private"
NOISE_WEIGHTS = "noise weights"  # `trains` of a phase that releases noise scales; no parameter pattern has a space
Event = dict[str, Any]


class Ledger:
    """A hash-chained list of events, kept in a file (or in memory when `path` is None)."""

    def __init__(self, path: Path | None = None, mac_key: bytes | None = None) -> None:
        self.path = path
        self._mac_key = mac_key
        self._lines: list[str] = []
        self._events: list[Event] = []
        self._steps = 0  # updated with each event: a long ledger is read in one pass
        self.head = GENESIS

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, oldest first."""
        return tuple(self._events)

    @property
    def opening(self) -> Mapping[str, Any]:
        """The ``open`` event: the plan, the clip rule and the noise source."""
        if not self._events:
            raise LedgerError("the ledger is empty; no step was authorised")
        return self._events[0]

    @property
    def is_closed(self) -> bool:
        """Whether the run is finished."""
        return bool(self._events) and self._events[-1]["event"] == "close"

    @property
    def steps_authorised(self) -> int:
        """How many steps are charged."""
        return self._steps

    @property
    def sha256(self) -> str:
        """SHA-256 of the file. Unlike the chain it covers the HMACs, which nobody can check once the key is destroyed."""
        return hashlib.sha256(self.as_bytes()).hexdigest()

    def as_bytes(self) -> bytes:
        """Return the content of the file."""
        return self._bytes(self._lines)

    @staticmethod
    def _bytes(lines: list[str]) -> bytes:
        return ("\n".join(lines) + "\n").encode()

    def releases(self) -> Iterator[GaussianSteps]:
        """Yield everything released about these records: earlier training of the initial weights, then the charged steps."""
        yield from self.earlier
        yield from self.own_releases()

    @property
    def earlier(self) -> tuple[GaussianSteps, ...]:
        """Steps that the initial weights had already been trained for on these records, from the first line."""
        return tuple(GaussianSteps(**block) for block in self.opening.get("earlier", ()))

    @staticmethod
    def earlier_facts(releases: Iterable[GaussianSteps]) -> list[dict[str, Any]]:
        """Return the `earlier` entry of the first line; equal settings are merged."""
        merged: dict[tuple[float, float], int] = {}
        for release in releases:
            setting = (release.noise_multiplier, release.sampling_probability)
            merged[setting] = merged.get(setting, 0) + release.steps
        names = ("noise_multiplier", "sampling_probability", "steps")
        return [dict(zip(names, (*setting, steps), strict=True)) for setting, steps in merged.items()]

    def own_releases(self) -> Iterator[GaussianSteps]:
        """Yield the steps charged in this ledger, as accountant events."""
        for event in self._events:
            if event["event"] == "authorise":
                yield GaussianSteps(event["noise_multiplier"], event["sampling_probability"], event["steps"])

    @property
    def selection(self) -> Selection | None:
        """The charged search that this run is the best trial of, from the first line; None if there is none."""
        facts = self.opening
        return Selection.from_facts(facts["repeat_and_select"]) if "repeat_and_select" in facts else None

    def contains(self, head: str) -> bool:
        """Return whether a line of this ledger has the hash `head`."""
        return any(json.loads(line)["hash"] == head for line in self._lines)

    def open(self, facts: Mapping[str, Any]) -> None:
        """Write the first line; `facts` state the plan."""
        if self._events:
            raise LedgerError("the ledger is already open")
        self._append({"event": "open", "format": _format_of(facts), **facts})

    def authorise(self, first_step: int, steps: int, noise_multiplier: float, sampling_probability: float) -> None:
        """Charge the steps first_step .. first_step + steps - 1, durably, before any of them runs."""
        if self.is_closed:
            raise LedgerError("the ledger is closed; a finished run takes no more steps")
        if first_step != self.steps_authorised or steps < 1:
            raise LedgerError(f"steps must be authorised in order: {self.steps_authorised} are, requested from {first_step}")
        block = {"first_step": first_step, "steps": steps}
        setting = {"noise_multiplier": noise_multiplier, "sampling_probability": sampling_probability}
        self._append({"event": "authorise", **block, **setting})

    def close(self) -> None:
        """Write the last line: exactly the authorised steps were run."""
        self._append({"event": "close", "steps": self.steps_authorised})

    def _append(self, event: Event) -> None:
        digest = digest_of(self.head, event)
        line: dict[str, Any] = {"data": event, "previous": self.head, "hash": digest}
        if self._mac_key is not None:
            line["mac"] = hmac.new(self._mac_key, digest.encode(), hashlib.sha256).hexdigest()
        lines = [*self._lines, canonical_json(line)]
        if self.path is not None:
            # Rewrite the whole file (a few kilobytes), so that readers never see a partial line.
            write_atomically(self.path, self._bytes(lines))
        self._lines, self.head = lines, digest
        self._take(event)

    @classmethod
    def load(cls, path: Path, mac_key: bytes | None = None) -> "Ledger":
        """Read and check a ledger; raise `LedgerError` if anything is wrong.

        The chain, the order of the events and the counts are always checked, the HMACs only with the run key.
        """
        try:
            data = read_file(path)
        except FileNotFoundError as error:
            raise LedgerError(f"ledger {path} is missing; without it no epsilon can be stated") from error
        except OSError as error:
            raise LedgerError(f"ledger {path} cannot be read: {error}") from error
        ledger = cls(path, mac_key)
        ledger._accept_all(data, f"ledger {path}")
        return ledger

    @classmethod
    def parse(cls, data: bytes, origin: str, mac_key: bytes | None = None) -> "Ledger":
        """Like `load`, for bytes from another source (such as a bundle or rank 0): kept in memory."""
        ledger = cls(None, mac_key)
        ledger._accept_all(data, origin)
        return ledger

    def without_macs(self) -> bytes:
        """Return the file without HMACs, for readers without the run key. The chain does not cover them: same head."""
        entries = [{k: v for k, v in json.loads(line).items() if k != "mac"} for line in self._lines]
        return "".join(f"{canonical_json(entry)}\n" for entry in entries).encode()

    def _accept_all(self, data: bytes, origin: str) -> None:
        for number, line in enumerate(lines_of(data, origin), start=1):
            self._accept(line, f"{origin} line {number}")

    def _accept(self, line: str, where: str) -> None:
        entry = entry_of(line, self.head, where)
        event, digest = entry["data"], entry["hash"]
        if self._mac_key is not None:
            mac = hmac.new(self._mac_key, digest.encode(), hashlib.sha256).hexdigest()
            if not hmac.compare_digest(mac, str(entry.get("mac", ""))):
                raise LedgerError(f"{where} was not written by this run (its HMAC is wrong); {REMEDY}")
        self._check_order(event, where)
        self._lines.append(line)
        self._take(event)
        self.head = digest

    def _take(self, event: Event) -> None:
        self._events.append(event)
        self._steps += event["steps"] if event["event"] == "authorise" else 0

    def _check_order(self, event: Event, where: str) -> None:
        kind = event.get("event")
        first = not self._events
        if first and kind == "open" and isinstance(event.get("format"), int) and event["format"] > NEWEST_FORMAT:
            version = shown(event["format"])
            raise LedgerError(
                f"{where} has format {version}, this version reads up to {NEWEST_FORMAT}: made by a newer version; upgrade"
            )
        try:
            if first:
                in_order = kind == "open" and event["format"] == _format_of(event)
                _check_phases(event)
                if "repeat_and_select" in event:
                    Selection.from_facts(event["repeat_and_select"])
                for block in event.get("earlier", ()):
                    GaussianSteps(**block)
            elif kind == "authorise":
                GaussianSteps(event["noise_multiplier"], event["sampling_probability"], event["steps"])
                in_order = not self.is_closed and event["first_step"] == self.steps_authorised
            else:
                in_order = kind == "close" and not self.is_closed and event["steps"] == self.steps_authorised
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(f"{where} is not a valid event: {error}; {REMEDY}") from error
        if not in_order:
            raise LedgerError(f"{where} has an event out of order; {REMEDY}")


def _format_of(opening: Mapping[str, Any]) -> int:
    """Return the format of a ledger: the oldest that has all facts of its first line, so that older runs keep their bytes."""
    if "repeat_and_select" in opening:
        return SELECTED
    return SEVERAL_PHASES if "phases" in opening else ONE_PHASE


def _check_phases(opening: Event) -> None:
    """Raise unless the phases of a plan are well formed and their steps add up to those of the plan."""
    if "phases" not in opening:
        return
    for phase in opening["phases"]:
        GaussianSteps(phase["noise_multiplier"], phase["batch_size"] / opening["dataset_size"], phase["steps"])
        if not isinstance(phase["trains"], str) or not isinstance(phase["clip_norm"], (int, float, type(None))):
            raise ValueError("a phase has no valid 'trains' or 'clip_norm'")
    if not opening["phases"] or sum(phase["steps"] for phase in opening["phases"]) != opening["steps"]:
        raise ValueError("the steps of the phases do not add up")
