"""A search that is not charged: its trials, scores and their table can be read, and each model's statement says so.

search.json   the request        trials/      a run directory for each training        trials.tsv   their scores
best.toml     the config of the best setting, without held-out records: dpcert run best.toml
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.dataset import Dataset
from ..errors import RunError
from ..privacy.ledger import Ledger
from ..privacy.selection import composed_epsilon, merged
from ..rng import key_from_seed, secret_key
from ..runs.config import Config
from ..store.durable import write_atomically
from ..store.runs import LEDGER, PRIVATE, RunDirectory
from .request import CHARGED_REQUEST, REQUEST, SearchRequest, key_of, refuse_run, store, stored
from .rounds import RunTrials, run_rounds, settings_of
from .trials import Result, best_of, check_trials

TRIALS, TABLE, BEST = "trials", "trials.tsv", "best.toml"
_COLUMNS = ("trial", "rung", "seed", "acr", "acr_low", "acr_high", "certified_at_0.25", "clean_accuracy", "seconds", "settings")


@dataclass(frozen=True)
class Summary:
    """The best setting, its ACR with each seed, and all results."""

    best: Result
    by_seed: list[float]
    results: list[Result]


class UnchargedSearch:
    """A search in a directory. Nothing is created until `begin`."""

    def __init__(self, out: Path, request: SearchRequest) -> None:
        self.directory, self._request = RunDirectory(out), request
        self.trials_folder = out / TRIALS

    def check(self) -> None:
        """Raise if the directory has another search."""
        out = self.directory.path
        if (out / PRIVATE / CHARGED_REQUEST).exists():
            raise RunError(f"{out} contains a charged search; add --charge to resume it, or use another --out")
        refuse_run(self.directory)
        stored(out / REQUEST, self._request)

    def begin(self, data: Dataset) -> bytes:
        """Check the trials, store the request, and return the key that settings are drawn from."""
        path, seed = self.directory.path / REQUEST, self._request.seed
        facts = stored(path, self._request)
        key = key_of(facts) if facts else secret_key() if seed is None else key_from_seed(seed, "search")
        check_trials([trial.config for trial in settings_of(self._request, key)], len(data.x_train))
        if facts is None or facts["request"]["trials"] < self._request.trials:
            store(path, self._request, key=key.hex())
        return key

    def run(self, key: bytes, run: RunTrials) -> Summary:
        """Run all trials; write their table and the config of the best setting."""
        results = run_rounds(self._request, key, run)
        best = best_of([result for result in results if result.trial.rung == max(r.trial.rung for r in results)])
        write_atomically(self.directory.path / TABLE, _table(results).encode())
        if best is None:
            raise RunError(f"no trial has a score; the first failure: {results[0].failure}; logs are in {self.trials_folder}")
        same = [
            result for result in results if (result.trial.number, result.trial.rung) == (best.trial.number, best.trial.rung)
        ]
        first = min(same, key=lambda result: result.trial.seed or 0)
        write_atomically(self.directory.path / BEST, _to_run(first.trial.config).to_toml().encode())
        return Summary(first, [result.score.acr for result in same if result.score], results)

    def epsilon_of_all(self, results: Sequence[Result], delta: float) -> float:
        """Epsilon of all trainings together, by RDP: what the search spent, and no statement says."""
        ledgers = [self.trials_folder / result.trial.name / LEDGER for result in results]
        releases = [list(Ledger.load(path).own_releases()) for path in ledgers if path.exists()]
        blocks = [[(r.noise_multiplier, r.sampling_probability, r.steps) for r in of_one] for of_one in releases]
        return composed_epsilon([merged(of_one) for of_one in blocks], delta)


def _to_run(config: Config) -> Config:
    """The config for a training on all records, whose images and seeds are the user's choice."""
    data = config.data.model_copy(update={"validation": 0})
    certify = config.certify.model_copy(update={"seed": None, "examples": None})
    train = config.train.model_copy(update={"seed": None})
    return config.model_copy(update={"data": data, "certify": certify, "train": train})


def _table(results: Sequence[Result]) -> str:
    lines = ["\t".join(_COLUMNS)]
    for result in results:
        trial, score = result.trial, result.score
        figures = ["failed"] + [""] * 5
        if score is not None:
            numbers = (score.acr, score.low, score.high, score.at_quarter, score.clean_accuracy)
            figures = [*("" if number is None else f"{number:.6f}" for number in numbers), f"{score.seconds:.1f}"]
        lines.append("\t".join([str(trial.number), str(trial.rung), str(trial.seed), *figures, trial.words]))
    return "\n".join(lines) + "\n"
