"""What ``dpcert tune`` does and prints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..data.dataset import Dataset
from ..errors import ConfigError, RunError
from ..models.factory import is_factory_name
from ..paper.estimate import as_words
from ..privacy.ledger import Ledger
from ..privacy.statement import recorded_versions, state
from ..rounding import ceil_text
from ..runs.config import Config
from ..runs.resolve import dataset_name, resolve
from ..runs.sources import load_data
from ..scale.placement import PROCESSES, Placement
from ..store.runs import RunDirectory
from ..training.state import read_model
from ..tuning.charged import ChargedSearch
from ..tuning.request import SearchRequest, with_validation
from ..tuning.runner import TrialRunner
from ..tuning.space import read_space
from ..tuning.uncharged import BEST, TABLE, Summary, UnchargedSearch
from ._show import event_printer, print_table, progress_bar

_LAW, _SEEDS, _EXAMPLES = "geometric", 3, 500


@dataclass(frozen=True)
class Options:
    """The options of the search itself."""

    space: Path
    trials: int
    charge: bool
    law: str | None
    search: str
    seeds: int | None
    seed: int | None


def tune(
    source: str | None, chosen: Mapping[str, Any], options: Options, out: Path | None, place: Placement, model: str | None
) -> None:
    """Run or resume a search, and print what it found."""
    config = resolve(source, {"certify.examples": _EXAMPLES, **chosen}, typer.echo)
    if config.search.law is not None:
        raise ConfigError("the config is that of a trial of a charged search; remove its section [search]")
    with progress_bar("data", "bytes") as fetching:
        data = load_data(_without_validation(config), fetching)
    base = _with_absolute_paths(with_validation(config, data), place)
    data = data.holding_out(base.data.validation)
    request = _request(base, options)
    folder = out or Path("runs") / f"{dataset_name(base)}-tune{'-charged' if options.charge else ''}"
    custom = model if model is not None and is_factory_name(model) else None
    (_charged if options.charge else _uncharged)(folder, request, data, place, custom)


def _without_validation(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"validation": 0})})


def _with_absolute_paths(config: Config, place: Placement) -> Config:
    """On a cluster, a task may start in another folder."""
    if place.engine == PROCESSES or config.data.path is None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"path": str(Path(config.data.path).absolute())})})


def _request(base: Config, options: Options) -> SearchRequest:
    if options.law is not None and not options.charge:
        raise ConfigError(f"--law is {options.law}, but only a charged search has one; add --charge or leave --law out")
    seeds = options.seeds if options.seeds is not None else 1 if options.charge else _SEEDS
    law = (options.law or _LAW) if options.charge else None
    return SearchRequest(base, read_space(options.space, base), options.trials, options.search, seeds, law, options.seed)


def _uncharged(folder: Path, request: SearchRequest, data: Dataset, place: Placement, model: str | None) -> None:
    search = UnchargedSearch(folder, request)
    search.check()
    folder.mkdir(parents=True, exist_ok=True)
    with search.directory.locked():
        key = search.begin(data)
        logs = search.trials_folder / "logs"
        with event_printer() as print_event, place.open(logs, print_event) as executor:
            runner = TrialRunner(search.trials_folder, executor, place.resources, print_event, model)
            summary = search.run(key, runner.run)
    _print_summary(search, summary, request)


def _print_summary(search: UnchargedSearch, summary: Summary, request: SearchRequest) -> None:
    rows = []
    for result in sorted(summary.results, key=lambda r: -(r.score.acr if r.score else -1.0)):
        score, trial = result.score, result.trial
        figures = ("failed", "", "", "")
        if score is not None:
            interval = f"{score.low:.3f}" + ("" if score.high is None else f" to {score.high:.3f}")
            quarter = "" if score.at_quarter is None else f"{100 * score.at_quarter:.1f} %"
            figures = (f"{score.acr:.3f}", interval, quarter, as_words(score.seconds))
        rows.append((trial.name, *figures, trial.words))
    print_table(("trial", "ACR", "95 % interval", "certified at 0.25", "time", "settings"), rows)
    best, acrs = summary.best, summary.by_seed
    spread = f"{sum(acrs) / len(acrs):.3f} on average over {len(acrs)} seeds ({min(acrs):.3f} to {max(acrs):.3f})"
    typer.echo(f"best: {best.trial.name} ({best.trial.words}): ACR {spread}")
    typer.echo(f"its settings: {search.directory.path / BEST}  all scores: {search.directory.path / TABLE}")
    _print_cost(search, summary, request)
    failed = [result for result in summary.results if result.failure is not None]
    if failed:
        raise RunError(
            f"{len(failed)} trials failed; the first: {failed[0].trial.name}: {failed[0].failure}; logs are in "
            f"{search.trials_folder / 'logs'}; rerun the same command to try them again"
        )


def _print_cost(search: UnchargedSearch, summary: Summary, request: SearchRequest) -> None:
    seconds = sum(result.score.seconds for result in summary.results if result.score)
    delta = request.base.privacy.delta
    total = search.epsilon_of_all(summary.results, delta)
    spent = "epsilon = inf" if total == float("inf") else f"epsilon = {ceil_text(total, 2)} at delta = {delta:g} (RDP)"
    typer.echo(
        f"cost: {as_words(seconds)} of computing; the search is not charged. Its {len(summary.results)} trainings together "
        f"spend {spent}, which no statement of a single run covers"
    )


def _charged(folder: Path, request: SearchRequest, data: Dataset, place: Placement, model: str | None) -> None:
    search = ChargedSearch(folder, request)
    if search.resumed() and search.is_finished:
        search.forget_key()
        _print_winner(search, "already finished, nothing to do")
        return
    search.directory.create()
    with search.directory.locked():
        trials = search.begin(data)
        typer.echo(
            "searching: only the best model is released, so the number of trials and their scores are not shown "
            f"(they are in {search.directory.private}, keep it)",
            err=True,
        )
        with place.open(search.trials_folder / "logs", search.note) as executor:
            runner = TrialRunner(search.trials_folder, executor, place.resources, search.note, model)
            released = search.run(trials, runner.run)
    if not released:
        typer.echo(f"the {request.law} law drew no trial: nothing is released. Another search is another release")
        return
    _print_winner(search, "released")


def _print_winner(search: ChargedSearch, words: str) -> None:
    winner = RunDirectory(search.winner)
    _, header = read_model(winner.model)
    typer.echo(state(Ledger.load(winner.ledger), recorded_versions(header)))
    typer.echo(f"{words}: {winner.path}")
    typer.echo(f"next: dpcert verify {winner.path} and dpcert certify {winner.path}")
