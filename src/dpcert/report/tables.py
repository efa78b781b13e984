"""Run directories as plain values, and the table of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..rounding import ceil_text
from ..store.durable import sha256_hex
from ..store.metrics import read_metrics
from ..store.records import CertificateRow, read_rows
from ..store.runs import RunDirectory
from .paper import TABLE_1


@dataclass(frozen=True)
class Certified:
    """One certification of a run: its figures, and the rows they were made from."""

    figures: dict[str, Any]
    rows: list[CertificateRow]

    @property
    def alpha_is(self) -> str:
        """What alpha bounds: the failure of each certificate, or of any of them."""
        simultaneous = self.figures.get("alpha_is") == "simultaneous"
        return f"for all {self.figures['examples']} images together" if simultaneous else "per image"

    @property
    def mark(self) -> str:
        """Sets simultaneous certificates apart from the usual ones at the same sigma."""
        return ", simultaneous" if self.figures.get("alpha_is") == "simultaneous" else ""


@dataclass(frozen=True)
class RunFacts:
    """What a run directory says about itself."""

    path: Path
    metrics: dict[str, Any]
    config: str
    certified: list[Certified]

    @property
    def title(self) -> str:
        """Method and data set."""
        return f"{self.metrics['method']} on {self.metrics['dataset']}"

    @property
    def privacy(self) -> str:
        """The privacy claim in one line; never a number for a run that is not private."""
        privacy = self.metrics["privacy"]
        if not privacy["private"]:
            return f"epsilon = inf (not private: {privacy['reason']})"
        return f"epsilon = {ceil_text(privacy['epsilon'], 4)} at delta = {privacy['delta']:g}"

    @property
    def sentences(self) -> list[str]:
        """What epsilon stands on, in the statement's own words; put together here for a run made before they were stored."""
        privacy = self.metrics["privacy"]
        if "sentences" in privacy:
            return list(privacy["sentences"])
        how = f"Neighbours: {privacy['relation']}. Accountant: {privacy['accountant'].upper()}. {privacy['steps']} steps of "
        how += f"Poisson sampling (q = {privacy['sampling_probability']:.6g}), clip norm {privacy['clip_norm']}, "
        how += f"noise multiplier {privacy['noise_multiplier']:g}."
        return [*([how] if privacy["private"] else []), *privacy.get("conditions", ())]

    def paper(self, sigma: float) -> tuple[float, float, float] | None:
        """The paper's (clean accuracy, ACR, certified accuracy at 0.25) for the same setting, where it prints one."""
        return TABLE_1.get((self.metrics["dataset"], self.metrics["method"], sigma))


def read_run(path: Path) -> RunFacts:
    """All public facts of a run."""
    directory = RunDirectory(path)
    directory.require(directory.config, directory.metrics)
    metrics = read_metrics(directory.metrics)
    config = directory.config.read_bytes()
    if metrics.get("config_sha256", sha256_hex(config)) != sha256_hex(config):  # older metrics name no config
        raise RunError(f"{directory.config} is not the config of this run (its SHA-256 differs); restore it from a copy")
    certified = [Certified(entry, _rows(path, entry)) for entry in metrics["certification"]]
    return RunFacts(path, metrics, config.decode("utf-8", errors="replace"), certified)


def _rows(path: Path, entry: dict[str, Any]) -> list[CertificateRow]:
    stride, examples = entry["stride"], entry["examples"]
    rows = [row for row in read_rows(CertificateRow, path / entry["file"]) if row.idx in range(0, stride * examples, stride)]
    if len(rows) < examples:
        raise RunError(
            f"{path / entry['file']} holds {len(rows)} rows, metrics.json speaks of {examples}; run dpcert certify again"
        )
    return rows


HEADINGS = ("run", "sigma", "privacy", "clean accuracy", "ACR", "certified at 0.25", "images", "abstained")


def summary(runs: list[RunFacts]) -> list[tuple[str, ...]]:
    """A row for each certification (or for a run without any), the paper's figures in brackets where it has them."""
    table: list[tuple[str, ...]] = []
    for run in runs:
        clean = run.metrics["clean_accuracy"]
        if not run.certified:
            table.append((run.title, "", run.privacy, _percent(clean), "not certified", "", "", ""))
        for certified in run.certified:
            f, paper = certified.figures, run.paper(certified.figures["sigma"])
            low, high = f["acr_interval"]
            interval = "" if high is None else f" ({low:.3f} to {high:.3f})"
            at = f["certified_accuracy"].get("0.25")
            split = "" if f.get("split", "test") == "test" else f" ({f['split']})"
            table.append(
                (
                    run.title + split,
                    f"{f['sigma']:g}{certified.mark}",
                    run.privacy,
                    _percent(clean) + (f" [paper {paper[0]:.2f} %]" if paper else ""),
                    f"{f['acr']:.3f}{interval}" + (f" [paper {paper[1]:.3f}]" if paper else ""),
                    _percent(at) + (f" [paper {paper[2]:.1f} %]" if paper else ""),
                    str(f["examples"]),
                    str(f["abstained"]),
                )
            )
    return table


def as_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table for a page of Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.2f} %"
