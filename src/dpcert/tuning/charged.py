"""A charged search: a random number of trials, of which only the best is released.

    private/   key of the search, its request, all trials with their logs and scores (0700): nothing of it is released
    winner/    the run directory of the best trial, written when the search is finished

Guarantee: outside of private/ there is nothing but the winner, and nothing in it depends on another trial, except that it is
the best. The number of trials follows from the key; a search that is killed and started again has the same trials.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..data.dataset import Dataset
from ..errors import DpcertError, RunError
from ..privacy.selection import trials_drawn
from ..rng import secret_key
from ..sections import validated
from ..store.durable import destroy, read_file, write_atomically, write_checked_json
from ..store.metrics import read_metrics
from ..store.runs import CONFIG, CURVE, LEDGER, METRICS, MODEL, RunDirectory
from ..training.settings import SearchConfig
from .budget import Charge, charged
from .request import CHARGED_REQUEST, REQUEST, SearchRequest, refuse_run, store, stored
from .space import uniform_of
from .trials import Result, Trial, best_of, check_trials

WINNER, _TRIALS, _LOG = "winner", "trials", "search.log"
_RELEASED = (CONFIG, LEDGER, MODEL, CURVE)  # and metrics.json, without the score


class ChargedSearch:
    """A charged search in a directory. Nothing is created until `begin`."""

    def __init__(self, out: Path, request: SearchRequest) -> None:
        assert request.law is not None
        self.directory, self._request, self._law = RunDirectory(out), request, request.law
        self.winner = out / WINNER
        self.trials_folder = self.directory.private / _TRIALS
        self.log = self.directory.private / _LOG

    @property
    def is_finished(self) -> bool:
        """Whether the winner is released."""
        return self.winner.exists()

    def resumed(self) -> bool:
        """Whether the directory has a search of the same request already; raises if it has another one, or a run."""
        refuse_run(self.directory)
        if (self.directory.path / REQUEST).exists():
            raise RunError(f"{self.directory.path} contains a search that is not charged; use another --out")
        facts = stored(self.directory.private / CHARGED_REQUEST, self._request)
        if facts is not None and not self.is_finished and self.directory.load_key() is None:
            raise RunError(f"{self.directory.key} is missing; the search cannot be resumed without it: use another --out")
        return facts is not None

    def begin(self, data: Dataset) -> list[Trial]:
        """Calibrate the trials and draw their number and settings, once; a resumed search has the same ones."""
        if not self.resumed():
            search = charged(self._request.base, self._request.space, data, Charge(self._law, float(self._request.trials)))
            self.directory.store_key(secret_key())
            store(self.directory.private / CHARGED_REQUEST, self._request, trial=search.model_dump())
        key, facts = self.directory.load_key(), stored(self.directory.private / CHARGED_REQUEST, self._request)
        assert key is not None and facts is not None
        trials = self._drawn(key, facts["trial"])
        check_trials([trial.config for trial in trials], len(data.x_train))
        return trials

    def _drawn(self, key: bytes, section: dict[str, Any]) -> list[Trial]:
        search = validated(SearchConfig, section, CHARGED_REQUEST)
        count = trials_drawn(self._law, float(self._request.trials), uniform_of(key))
        return [self._trial(number, key, search) for number in range(count)]

    def _trial(self, number: int, key: bytes, search: SearchConfig) -> Trial:
        space, seed = self._request.space, self._request.seed
        setting = space.draw(key, number)
        config = space.apply(self._request.base, setting).model_copy(update={"search": search})
        train, certify = (section.model_copy(update={"seed": seed}) for section in (config.train, config.certify))
        return Trial(number, setting, config.model_copy(update={"train": train, "certify": certify}))

    def run(self, trials: Sequence[Trial], run: Callable[[Sequence[Trial]], list[Result]]) -> bool:
        """Run all trials, release the best, destroy the key. Returns False if the law drew no trial: nothing is released."""
        failed = RunError(f"a trial failed, so nothing is released; see {self.log}, then rerun the same command to resume")
        try:
            results = run(trials)
        except DpcertError as error:
            self.note(f"FAILED: {error}")
            raise failed from None  # the message may name a trial, and with it how many there are
        if any(result.score is None for result in results):
            raise failed
        best = best_of(results)
        if best is not None:
            self._release(RunDirectory(self.trials_folder / best.trial.name))
        self.forget_key()
        return best is not None

    def forget_key(self) -> None:
        """Destroy the key once the winner is released; harmless if it is gone. An empty search keeps it and stays empty."""
        if self.is_finished:
            destroy(self.directory.key)

    def _release(self, trial: RunDirectory) -> None:
        """Copy the trial without its score, its times and its validation rows, and rename the copy when it is complete."""
        copy = self.directory.path / f".{WINNER}.tmp"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name in _RELEASED:
            write_atomically(copy / name, read_file(trial.path / name))
        metrics = {key: value for key, value in read_metrics(trial.metrics).items() if key != "validation_accuracy"}
        write_checked_json(copy / METRICS, {**metrics, "certification": [], "timing": {}})
        copy.rename(self.winner)
        folder = os.open(self.directory.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def note(self, text: str, *, passing: bool = False) -> None:
        """Append an event to the private log: an `EventHandler` that shows nothing."""
        if not passing:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")
