"""Runs trials as tasks of an executor. All state is in their run directories: what is missing is determined from them."""

import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import BusyError, DpcertError
from ..progress import EventHandler
from ..scale.tasks import Executor, Outcome, Pending, Resources, Task
from ..store.runs import RunDirectory
from .trials import Result, Trial, best_of, command, score_of

LOGS = "logs"


class TrialRunner:
    """Runs trials, as many at once as fit. `model` is the custom model to pass on."""

    def __init__(
        self, folder: Path, executor: Executor, resources: Resources, on_event: EventHandler, model: str | None = None
    ) -> None:
        self._folder, self._executor, self._resources = folder.absolute(), executor, resources
        self._on_event, self._model = on_event, model
        self._poll_seconds = 0.2

    def run(self, trials: Sequence[Trial]) -> list[Result]:
        """Run what is missing and return the results in the order of the trials; a failed trial does not stop the others."""
        self._folder.mkdir(parents=True, exist_ok=True)
        results = {trial.name: found for trial in trials if (found := self._finished(trial)) is not None}
        waiting = [trial for trial in trials if trial.name not in results]
        running: list[tuple[Trial, Pending]] = []
        try:
            while waiting or running:
                self._start(waiting, running)
                for trial, outcome in self._ended(running):
                    result = self._result(trial, outcome)
                    if result is None:
                        waiting.append(trial)
                    else:
                        results[trial.name] = result
                        self._on_event(_in_words(result, outcome))
                self._on_event(_status(len(results), len(trials), list(results.values())), passing=True)
                time.sleep(self._poll_seconds)
        except BaseException:
            self._executor.stop()
            raise
        return [results[trial.name] for trial in trials]

    def _start(self, waiting: list[Trial], running: list[tuple[Trial, Pending]]) -> None:
        slots = self._executor.slots(self._resources) if waiting else 0
        for trial in list(waiting):
            if len(running) >= slots:
                return
            if self._directory(trial).is_busy:  # perhaps a child of a killed search
                continue
            waiting.remove(trial)
            words = tuple(command(trial, self._folder, self._model))
            log = self._folder / LOGS / f"{trial.name}.log"
            running.append((trial, self._executor.submit(Task(trial.name, words, log, self._resources))))
            self._on_event(f"started: {trial.name} ({trial.words})")

    def _ended(self, running: list[tuple[Trial, Pending]]) -> list[tuple[Trial, Outcome]]:
        ended = [(entry, outcome) for entry in running if (outcome := entry[1].outcome()) is not None]
        for entry, _ in ended:
            running.remove(entry)
        return [(trial, outcome) for (trial, _), outcome in ended]

    def _result(self, trial: Trial, outcome: Outcome) -> Result | None:
        """The result of a task that ended; None if another process uses the directory, so that it must be tried again."""
        if outcome.error == BusyError.__name__:
            return None
        if outcome.failure is not None:
            return Result(trial, failure=outcome.failure)
        try:
            return self._finished(trial) or Result(trial, failure="it ended without a score")
        except DpcertError as error:
            return Result(trial, failure=str(error))

    def _finished(self, trial: Trial) -> Result | None:
        score = score_of(self._directory(trial), trial.config)
        return None if score is None else Result(trial, score)

    def _directory(self, trial: Trial) -> RunDirectory:
        return RunDirectory(self._folder / trial.name)


def _in_words(result: Result, outcome: Outcome) -> str:
    if result.score is None:
        return f"FAILED: {result.trial.name}: {result.failure}"
    return f"done: {result.trial.name} in {outcome.seconds / 60:.1f} min: ACR {result.score.acr:.3f} ({result.trial.words})"


def _status(done: int, total: int, results: Sequence[Result]) -> str:
    best = best_of(results)
    so_far = "" if best is None or best.score is None else f", best ACR so far {best.score.acr:.3f}"
    return f"{done} of {total} trials done{so_far}"
