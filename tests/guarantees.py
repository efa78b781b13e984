"""Builds docs/guarantees.md from what the last ``make test-all`` wrote down (build/evidence.jsonl).

    python -m tests.guarantees

A promise without new evidence keeps the row it has on the page; one that never had any is marked as not shown. Nothing is typed
in by hand but the promises themselves.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.conftest import EVIDENCE

PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"
PROMISES = {
    "D1": "isolation: changing one record changes no other per-example gradient, by a bit, for every method",
    "D2": "sensitivity: one record moves the clipped sum by at most C",
    "D3": "noise: right scale, Gaussian, uncorrelated, no block repeated",
    "D4": "tail: no cap below 8.5 standard deviations",
    "D5": "sampling is Poisson",
    "D6": "public constants: N -> N±1 records leaves the plan byte-identical when the public size is given",
    "D7": "degenerate input: refused by loaders; later an empty batch is charged, a bad gradient counts as 0",
    "D8": "accounting: never below the optimistic bound; closed form; calibration uses its budget and never passes it",
    "D9": "the ledger is ahead of the step; after a kill reported >= true, at most one block more",
    "D10": "one-step white-box audit of every method: below the exact epsilon, at least 0.6 of it",
    "D11": "end-to-end audits: lower bound below the reported epsilon",
    "D12": "honest printing: a finite epsilon only if clip, noise, Poisson, ledger and secret noise",
    "D13": "no side outputs: swapping one record changes only what depends on the released weights",
    "D14": "tuning is charged, or the statement says it was not",
    "D15": "mutants over all of the sources are killed by named tests",
    "D16": "public inputs: weights and their data are named; weights trained on the private images are refused",
    "D17": "phases: one ledger composes all phases to the stated epsilon",
    "D18": "ranks: any number of them gives the same ledger and weights; a killed rank loses and double-charges nothing",
    "D19": "engines on pretrained models: isolation, sensitivity and equality with the reference",
    "D20": "charged tuning: the winner's epsilon covers the whole search, and nothing else of the search is released",
    "D21": "mixing models: refused, and past the check one record still moves the sum by at most C",
    "D22": "warm starts: weights that have seen the records never get a finite epsilon that ignores it",
    "C1": "coverage of certificates at alpha = 0.001",
    "C2": "closed form: radii of a linear classifier against the true distance",
    "C3": "no attack inside a certified radius changes the class",
    "C5": "the confidence sequence keeps alpha under an adversarial stopping rule",
    "C6": "batch size, threads, order and fast path change no vote",
    "C7": "a certificate names its alpha, n0, n, sigma, dtype, model; NaN and ties are wrong votes",
    "C8": "noise inside a model: the radius of the whitened norm, never beyond the true distance of a linear classifier",
    "C9": "several heads in one pass cast the votes of each head alone, bit for bit",
    "R1": "kill -9 anywhere: resume gives 0 differing bytes",
    "R2": "a failing write leaves the previous state; resume works",
    "R3": "bit flips and truncations of state files are detected",
    "R4": "a physical batch that does not fit is halved; charged once; results agree",
    "R5": "a second process is refused; SIGTERM leaves durable state",
    "S1": "no pickle on any load path",
    "S3": "archives are read member by member with caps; hostile members are refused",
    "S4": "an unknown or ill-typed config key is an error that names it",
    "S6": "released files hold no byte of a key; key files are 0600",
    "S7": "service: hostile requests get documented answers, 0 restarts, memory flat; fresh noise per request",
    "S8": "a link in a run directory is never followed; what it leads to is untouched",
    "fuzz": "readers: only the documented error, bounded memory and time",
}

# The chance that a sound program fails the test; promises that are not here are compared byte for byte or proved: none.
FALSE_ALARMS = {
    "D3": "2e-6",
    "D4": "1e-6",
    "D5": "1e-4",
    "D10": "1e-3 an audit",
    "D11": "1 %",
    "C1": "1e-6 a cell",
    "C2": "5e-5",
    "C3": "5e-4",
    "C5": "1e-6 a threshold",
    "C8": "5e-5",
    "S7": "2e-6",
}

AUDITS = 154  # of D10: ten private methods and five twins, ten seeds each; four prior systems


def told_once(figures: list[str]) -> list[str]:
    """Figures that differ in a name before the colon or in their numbers only: the first, and how many are like it."""
    alike: dict[str, list[str]] = {}
    for figure in figures:
        _, _, after_name = figure.rpartition(": ") if figure.count(": ") == 1 else ("", "", figure)
        alike.setdefault(_kind(after_name), []).append(figure)
    return [same[0] + (f" (and {len(same) - 1} more alike)" if same[1:] else "") for same in alike.values()]


def _kind(figure: str) -> str:
    """A figure without its numbers."""
    return re.sub(r"[\d.,]+", "#", figure)


def rows(evidence: list[dict[str, object]], kept: Mapping[str, list[str]] = MappingProxyType({})) -> list[list[str]]:
    """A row for each promise; the entries of one id are joined, those of a test that ran twice replaced.

    A promise without evidence keeps its row of the page so far (`kept`).
    """
    table = []
    for identity, promise in PROMISES.items():
        latest = {(str(e["test"]), _kind(str(e["figure"]))): e for e in evidence if e["id"] == identity}
        if not latest:
            table.append(kept.get(identity, [identity, promise, "**not shown by the last run**", "", "", "", ""]))
            continue
        entries = sorted(latest.values(), key=lambda e: -int(str(e["trials"])))  # the largest speaks for those like it
        figures, twins = (told_once(list(dict.fromkeys(str(e[key]) for e in entries if e[key]))) for key in ("figure", "twin"))
        if identity == "D10" and len(entries) < AUDITS:
            figures.append(f"**{len(entries)} of {AUDITS} audits were run, the others not yet**")
        trials = sum(int(str(e["trials"])) for e in entries)
        seconds = sum(float(str(e["seconds"])) for e in entries)
        alarm = FALSE_ALARMS.get(identity, "none")
        table.append([identity, promise, "; ".join(figures), f"{trials:,}", alarm, f"{seconds:,.0f} s", "; ".join(twins)])
    return table


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of a page, by the id of the promise."""
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row for row in cells if row[0] in PROMISES}


def page(evidence: list[dict[str, object]], before: str = "") -> str:
    """The whole page; `before` is the page so far."""
    lines = [
        "# What is guaranteed, and what showed it",
        "",
        "Built by `make guarantees` from the evidence that the tests of `make test-all` wrote down; not edited by hand. A row",
        "without new evidence is kept from the last run that had some.",
        "A twin is a deliberately broken mechanism that the same test must reject. What each way of losing a guarantee looks like",
        "is told in [pitfalls.md](pitfalls.md), to whom what is promised in [threat_model.md](threat_model.md).",
        "",
        "| id | promise | figure reached | trials | false alarm | time | twins |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows(evidence, rows_of(before))),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    evidence = [json.loads(line) for line in EVIDENCE.read_text().splitlines()] if EVIDENCE.exists() else []
    PAGE.write_text(page(evidence, PAGE.read_text()))
    print(
        f"{PAGE.relative_to(Path.cwd())}: {len({entry['id'] for entry in evidence} & set(PROMISES))} of {len(PROMISES)} shown"
    )


if __name__ == "__main__":
    main()
