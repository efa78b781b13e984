"""Find the pieces of a grid that are not done yet, from its run directories; changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attacks.kinds import STRENGTHS
from ..certification.metrics import is_about
from ..errors import ConfigError, LedgerError, RunError
from ..privacy.ledger import Ledger
from ..runs.config import differences
from ..runs.resolve import read_config
from ..store.metrics import PAPERS_ALPHA, PAPERS_N, PAPERS_N0, is_worth, read_metrics
from ..store.records import AttackRow, SampleRow, read_rows
from ..store.runs import CERTIFICATES, SKIPPED, RunDirectory, rows_stem
from .grid import TEST_IMAGES, Cell, Need
from .targets import RESULTS

CERTIFICATION_SEED = 0


@dataclass(frozen=True)
class Piece:
    """One child process: train, certify at a sigma, analyze or attack one run."""

    kind: str
    cell: Cell
    examples: int
    sigma: float | None = None
    attack: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.cell.name}" + ("" if self.sigma is None else f" at sigma {self.sigma:g}")

    def command(self, results: Path, device: str | None = None) -> list[str]:
        """The arguments of ``dpcert``. Certificates keep the noise they started with; attacks on fewer images are replaced."""
        return [*self._words(results), *([] if device is None else ["--device", device])]

    def _words(self, results: Path) -> list[str]:
        run = str(results / self.cell.name)
        if self.kind == "train":
            return ["train", *self.cell.options(), "--out", run]
        if self.kind == "certify":
            seed = [] if self.has_begun(results) else ["--seed", str(CERTIFICATION_SEED)]
            votes = ["--n0", str(PAPERS_N0), "--n", str(PAPERS_N), "--alpha", str(PAPERS_ALPHA)]
            sigma = [] if self.cell.noise_inside else ["--sigma", f"{self.sigma:g}"]
            return ["certify", run, *sigma, *votes, "--examples", str(self.examples), *seed]
        if self.kind == "analyze":
            return ["analyze", run, "--examples", str(self.examples)]
        return ["attack", run, "--attack", str(self.attack), "--examples", str(self.examples), "--again"]

    def has_begun(self, results: Path) -> bool:
        """Whether an earlier session did a part of it, so that this one resumes."""
        directory = RunDirectory(results / self.cell.name)
        if self.sigma is not None and self.cell.noise_inside:  # the name of the file has the law in it
            return any(directory.path.glob(f"{CERTIFICATES}*.json"))
        if self.sigma is not None:
            stem = rows_stem(CERTIFICATES, self.sigma) + (SKIPPED if self.cell.skips_misclassified else "")
            return (directory.path / f"{stem}.json").exists()
        files = {"train": directory.ledger, "analyze": directory.samples}  # an attack is repeated as a whole
        return self.kind in files and files[self.kind].exists()


def check_examples(examples: int | None) -> int | None:
    """Return the number of test images to certify; raise if the test sets have fewer. None: the default of each cell."""
    if examples is not None and not 1 <= examples <= TEST_IMAGES:
        raise ConfigError(f"--examples is {examples}, must be a whole number in [1, {TEST_IMAGES}]: the test sets have no more")
    return examples


def check_results(results: Path) -> Path:
    """The folder of run directories; only the default one may be missing, so that a typo does not create a folder."""
    if not results.exists() and results != RESULTS:
        raise RunError(f"--results {results} does not exist; pass the folder of the runs, or create it first with mkdir")
    if results.exists() and not results.is_dir():
        raise RunError(f"--results {results} is a file, must be a folder of run directories; choose another")
    return results


def missing(needs: Sequence[Need], results: Path, examples: int | None = None) -> list[list[Piece]]:
    """The missing pieces of each incomplete cell, in the order in which they must run."""
    chains = [missing_of(need, results, examples) for need in needs]
    return [pieces for pieces in chains if pieces]


def missing_of(need: Need, results: Path, examples: int | None = None) -> list[Piece]:
    """The missing pieces of one cell, for so many test images. Raises if the settings of the directory do not match its name.

    A run stored without weights is complete if it has all rows; if rows are missing, everything needs a new training.
    """
    directory, cell = RunDirectory(results / need.cell.name), need.cell
    check_request(directory, cell)
    has_rows = directory.metrics.exists()
    pieces = _unmeasured(need, directory, examples) if has_rows else []
    if has_rows and (directory.model.exists() or not pieces):
        return pieces
    return [Piece("train", cell, examples or cell.examples("train")), *_unmeasured(need, None, examples)]


def _unmeasured(need: Need, directory: RunDirectory | None, asked: int | None) -> list[Piece]:
    """The missing pieces after training; all of them if there is no directory."""
    cell, skips = need.cell, need.cell.skips_misclassified
    entries = [] if directory is None else read_metrics(directory.metrics)["certification"]
    pieces = []
    examples = asked or cell.examples("certify")
    for sigma in need.sigmas:
        if not any(is_worth(entry, sigma, may_skip=skips) and entry["examples"] >= examples for entry in entries):
            pieces.append(Piece("certify", cell, examples, sigma))
    # `dpcert analyze` joins its rows with these
    certified = [entry for entry in entries if is_worth(entry, cell.sigma, may_skip=skips)]
    examples = asked or cell.examples("analyze")
    if need.samples and _count_samples(directory, certified) < examples:
        pieces.append(Piece("analyze", cell, examples))
    examples = asked or cell.examples("attack")
    for attack in need.attacks:
        rows = _attack_rows(directory, attack)
        if not {row.strength for row in rows if row.examples >= examples} >= set(STRENGTHS[attack]):
            most = max((row.examples for row in rows), default=0)  # all rows of one attack use the same images
            pieces.append(Piece("attack", cell, max(examples, most), attack=attack))
    return pieces


def check_request(directory: RunDirectory, cell: Cell) -> None:
    """Raise unless the directory is missing, empty, or contains a run of this cell's request."""
    if directory.path.exists() and not directory.path.is_dir():
        raise RunError(f"{directory.path} is a file, must be the run directory of {cell.preset}; move it away")
    if not directory.config.exists():
        return
    try:
        stored = read_config(directory.path)
    except ConfigError as error:
        raise RunError(f"{error}; it is damaged or from a newer version: update dpcert or choose another --results") from error
    expected = cell.config()
    if stored.train.seed is None and cell.seed == 0:  # an unseeded run can take the place of seed 0
        stored = stored.model_copy(update={"train": stored.train.model_copy(update={"seed": 0})})
    other = differences(stored, expected)
    if stored.build_method() == expected.build_method():  # a default and the same value set explicitly are equal
        other = [difference for difference in other if not difference.startswith("method.")]
    if other:
        raise RunError(
            f"{directory.path} contains a run with other settings than its name says ({'; '.join(other)}); "
            "move it away or choose another --results"
        )


def holds_rows_only(directory: RunDirectory) -> bool:
    """Whether this is a finished run stored without weights: its rows can be shown, but nothing more can be measured."""
    if directory.model.exists() or not directory.ledger.exists() or directory.key.exists():
        return False
    try:
        return Ledger.load(directory.ledger).is_closed
    except LedgerError:
        return False


def _count_samples(directory: RunDirectory | None, certified: list[dict[str, Any]]) -> int:
    """The number of rows of samples.tsv whose image has a certificate; others belong to images certified earlier."""
    path = None if directory is None else directory.samples
    if path is None or not path.exists():
        return 0
    measured = {row.idx for row in read_rows(SampleRow, path, allow_torn_end=True)}
    return max((sum(is_about(entry, index) for index in measured) for entry in certified), default=0)


def _attack_rows(directory: RunDirectory | None, attack: str) -> list[AttackRow]:
    path = None if directory is None else directory.attacks
    rows = [] if path is None or not path.exists() else read_rows(AttackRow, path, allow_torn_end=True)
    return [row for row in rows if (row.attack, row.target) == (attack, "base")]
