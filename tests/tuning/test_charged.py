"""A charged search: the winner's epsilon covers the whole search, and nothing else leaves private/ (D20)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpcert.errors import BudgetError, ConfigError, RunError
from dpcert.privacy.accounting import compose
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.statement import state
from dpcert.release.export import export
from dpcert.release.files import read_public_files
from dpcert.release.verify import FAILED, verify
from dpcert.runs.resolve import resolve
from dpcert.runs.sources import load_data
from dpcert.runs.training import train
from dpcert.scale.tasks import Resources
from dpcert.store.durable import read_checked_json, write_checked_json
from dpcert.store.public import read_directory
from dpcert.store.runs import RunDirectory
from dpcert.tuning import charged as module
from dpcert.tuning.budget import Charge, charged
from dpcert.tuning.charged import ChargedSearch
from dpcert.tuning.request import SearchRequest, with_validation
from dpcert.tuning.runner import TrialRunner
from dpcert.tuning.space import read_space, uniform_of
from dpcert.tuning.uncharged import UnchargedSearch
from tests.tuning.inside import InProcess, assignments, words, write_data, write_space

KEY_OF_THREE = next(bytes([k]) * 32 for k in range(256) if 1 - 0.75**2 <= uniform_of(bytes([k]) * 32) < 1 - 0.75**3)
KEY_OF_NONE = next(
    key for k in range(10**6) if uniform_of(key := k.to_bytes(32, "big")) < 0.01
)  # a Poisson law with mean 4 draws nothing


def request(folder, law="geometric", trials=4, space=None, **changes):
    data = write_data(folder)
    config = resolve("mnist/dp-gaussian", assignments(data, **changes))
    base = with_validation(config, load_data(config))
    path = write_space(folder) if space is None else write_space(folder, space)
    return SearchRequest(base, read_space(path, base), trials, law=law)


def run_search(out, wanted, executor, key=KEY_OF_THREE, monkeypatch=None):
    search = ChargedSearch(out, wanted)
    if monkeypatch is not None:
        monkeypatch.setattr(module, "secret_key", lambda: key)
    search.directory.create()
    trials = search.begin(load_data(wanted.base))
    runner = TrialRunner(search.trials_folder, executor, Resources(), search.note)
    runner._poll_seconds = 0.0
    return search, trials, search.run(trials, runner.run)


def public_files(out):
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and "private" not in path.parts)


RELEASED = [f"winner/{name}" for name in ("config.toml", "ledger.jsonl", "metrics.json", "model.safetensors", "training.tsv")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A search of three trials, interrupted after the first."""
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        wanted, out = request(folder), folder / "out"
        with pytest.raises(KeyboardInterrupt):
            run_search(out, wanted, interrupted := InProcess(stop_after=1), monkeypatch=patch)
        assert interrupted.stopped and interrupted.ran == ["trial-000"] and public_files(out) == []
        patch.setattr(module, "secret_key", lambda: pytest.fail("the number of trials is drawn once"))
        search, trials, released = run_search(out, wanted, resumed := InProcess())
    assert released and resumed.ran == ["trial-001", "trial-002"], "finished trials are kept"
    return search, trials, wanted


def scores(search, trials):
    metrics = [json.loads((search.trials_folder / trial.name / "metrics.json").read_text()) for trial in trials]
    return [metric["certification"][0]["acr"] for metric in metrics]


def test_the_winner_is_the_best_trial_itself_and_not_a_retrained_one(finished):
    search, trials, _ = finished
    acrs = scores(search, trials)
    best = search.trials_folder / trials[acrs.index(max(acrs))].name
    for name in ("model.safetensors", "ledger.jsonl", "config.toml", "training.tsv"):
        assert (search.winner / name).read_bytes() == (best / name).read_bytes()
    with pytest.raises(RunError, match="trained again is not that trial"):
        train(resolve(str(search.winner / "config.toml"), {}), search.directory.path / "again")


def test_the_winner_verifies_and_its_epsilon_covers_the_search(finished, evidence):
    search, trials, _wanted = finished
    checks = verify(read_public_files(search.winner))
    assert not [check for check in checks if check.outcome == FAILED]
    statement = state(Ledger.load(search.winner / "ledger.jsonl"))
    alone = compose(statement.releases, statement.delta)
    assert 0.99 * 3.0 <= statement.epsilon <= 3.0 and statement.accountant == "rdp"
    assert statement.epsilon > 1.2 * alone
    assert len({tuple(map(tuple, curve)) for curve in trials[0].config.search.curves or []}) == 2, "both batch sizes are listed"
    evidence(
        "D20",
        figure=f"epsilon {statement.epsilon:.3f} of 3 for the search, {alone:.3f} for its trial alone; verified",
        trials=len(trials),
        twin="a statement that charges one trial only fails dpcert verify",
    )


def charging_one_trial_only(run):
    """The twin: metrics.json and the statement say what the trial alone costs, by PLD."""
    path = run / "metrics.json"
    metrics = read_checked_json(path, what="", remedy="")
    ledger = Ledger.load(run / "ledger.jsonl")
    metrics["privacy"] |= {"epsilon": compose(ledger.releases(), ledger.opening["delta"]), "accountant": "pld"}
    write_checked_json(path, metrics)


def without_the_event(run):
    """The twin: the ledger, chained again, does not mention the search."""
    old, new = Ledger.load(run / "ledger.jsonl"), Ledger()
    for event in old.events:
        facts = {key: value for key, value in event.items() if key != "repeat_and_select"}
        new._append({**facts, "format": 1} if facts["event"] == "open" else facts)
    (run / "ledger.jsonl").write_bytes(new.as_bytes())


def with_fewer_trials(run):
    """The twin: the ledger says that there was one trial."""
    old, new = Ledger.load(run / "ledger.jsonl"), Ledger()
    for event in old.events:
        selected = event.get("repeat_and_select")
        new._append({**event, **({} if selected is None else {"repeat_and_select": {**selected, "mean": 1.0}})})
    (run / "ledger.jsonl").write_bytes(new.as_bytes())


@pytest.mark.parametrize("twin", [charging_one_trial_only, without_the_event, with_fewer_trials])
def test_a_twin_that_charges_less_does_not_verify(finished, tmp_path, twin):
    search, _, _ = finished
    copy = tmp_path / "winner"
    copy.mkdir()
    for file in search.winner.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert not [check for check in verify(read_public_files(copy)) if check.outcome == FAILED]
    twin(copy)
    failed = {check.name for check in verify(read_public_files(copy)) if check.outcome == FAILED}
    assert failed & {"epsilon recomputed", "ledger against config"}


def test_nothing_but_the_winner_leaves_the_private_folder(finished):
    search, trials, _ = finished
    out = search.directory.path
    assert public_files(out) == RELEASED
    assert out.joinpath("private").stat().st_mode & 0o777 == 0o700
    assert not search.directory.key.exists(), "the key, from which the number of trials follows, is destroyed"
    text = "".join((out / name).read_bytes().decode("latin-1") for name in RELEASED)
    metrics = json.loads((search.winner / "metrics.json").read_text())
    assert metrics["timing"] == {} and metrics["certification"] == [] and "validation_accuracy" not in metrics
    for secret in ("trial-0", *(repr(acr) for acr in scores(search, trials) if acr)):
        assert secret not in text
    newest = max(path.stat().st_mtime_ns for path in search.trials_folder.rglob("*.tsv"))
    assert all((out / name).stat().st_mtime_ns >= newest for name in RELEASED), "times of files tell nothing about the search"


def test_the_report_and_the_opened_run_say_the_same(finished):
    from dpcert.report.tables import facts_of
    from dpcert.runs.open import open_run

    search, _, _ = finished
    stated = open_run(search.winner).statement
    facts = facts_of(read_directory(search.winner))
    assert facts.metrics["privacy"]["epsilon"] == stated.epsilon and stated.tuning == "charged"
    from dpcert.report.membership import membership_of

    assert membership_of(facts).sentence == stated.membership


def test_the_bundle_of_the_winner_verifies(finished, tmp_path):
    search, _, _ = finished
    bundle = tmp_path / "winner.zip"
    exported = export(search.winner, bundle)
    assert exported.statement.accountant == "rdp" and not {"private/"} & set(exported.members)
    assert not [check for check in verify(read_public_files(bundle)) if check.outcome == FAILED]


def test_a_damaged_trial_is_not_named_on_the_terminal(tmp_path, monkeypatch):
    wanted, out = request(tmp_path), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_search(out, wanted, InProcess(stop_after=2), monkeypatch=monkeypatch)
    metrics = out / "private" / "trials" / "trial-001" / "metrics.json"
    metrics.write_text(metrics.read_text().replace("dp-gaussian", "dp-gaussiam"))
    with pytest.raises(RunError, match="a trial failed") as caught:
        run_search(out, wanted, InProcess())
    assert "trial-0" not in str(caught.value)
    assert "trial-001" in (out / "private" / "search.log").read_text()


def test_training_the_winner_further_is_not_private(finished):
    """No list of steps says what the search cost, so the steps of the winner alone must not be composed."""
    from dpcert.runs.open import open_run
    from dpcert.training.provenance import initial_facts

    search, _, wanted = finished
    facts = initial_facts(open_run(search.winner).model, load_data(wanted.base).x_train)
    assert facts == {"initial_weights": "not private"}


def test_a_finished_search_and_another_request(finished, tmp_path):
    search, _, wanted = finished
    again = ChargedSearch(search.directory.path, wanted)
    assert again.resumed() and again.is_finished
    other = SearchRequest(wanted.base, wanted.space, wanted.trials + 1, law=wanted.law)
    with pytest.raises(RunError, match="trials is 4, the request has 5"):
        ChargedSearch(search.directory.path, other).resumed()


def test_a_law_that_draws_no_trial_releases_nothing_and_keeps_to_it(tmp_path, monkeypatch):
    wanted, out = request(tmp_path, law="poisson"), tmp_path / "out"
    for _ in range(2):
        executor = InProcess()
        _, trials, released = run_search(out, wanted, executor, KEY_OF_NONE, monkeypatch)
        assert (trials, released, executor.ran, public_files(out)) == ([], False, [], [])
        monkeypatch.setattr(module, "secret_key", lambda: pytest.fail("another number must not be drawn"))


def test_a_failed_trial_releases_nothing_and_is_tried_again(tmp_path, monkeypatch):
    wanted, out = request(tmp_path), tmp_path / "out"
    with pytest.raises(RunError, match="a trial failed") as caught:
        run_search(out, wanted, InProcess(fail=lambda task: task.name == "trial-001"), monkeypatch=monkeypatch)
    assert "trial-0" not in str(caught.value) and not re.search(r"\d+ (of|trials)", str(caught.value))
    assert public_files(out) == []
    _, _, released = run_search(out, wanted, again := InProcess(), monkeypatch=monkeypatch)
    assert released and again.ran == ["trial-001"]


def test_a_folder_with_a_run_or_another_kind_of_search_is_refused(tmp_path, monkeypatch):
    wanted, out = request(tmp_path), tmp_path / "out"
    train(wanted.base, out)
    open_key = RunDirectory(out)
    open_key.store_key(bytes(32))  # as in a run that is not finished
    open_search = SearchRequest(wanted.base, wanted.space, 2)
    for search in (ChargedSearch(out, wanted).resumed, UnchargedSearch(out, open_search).check):
        with pytest.raises(RunError, match="contains a run; use another --out"):
            search()
    assert open_key.load_key() == bytes(32)
    other = tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):
        run_search(other, wanted, InProcess(stop_after=0), monkeypatch=monkeypatch)
    with pytest.raises(RunError, match="contains a charged search"):
        UnchargedSearch(other, open_search).check()
    third = tmp_path / "third"
    third.mkdir()
    UnchargedSearch(third, open_search).begin(load_data(wanted.base))
    with pytest.raises(RunError, match="search that is not charged"):
        ChargedSearch(third, wanted).resumed()


def test_a_lost_key_ends_the_search(tmp_path, monkeypatch):
    wanted, out = request(tmp_path), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_search(out, wanted, InProcess(stop_after=0), monkeypatch=monkeypatch)
    RunDirectory(out).key.unlink()
    with pytest.raises(RunError, match="cannot be resumed without it"):
        ChargedSearch(out, wanted).resumed()


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("[train]\nbatch_size = { low = 6, high = 12 }\n", "train.batch_size is a range"),
        ('[method]\nname = ["dp-gaussian", "regular"]\n', "regular is not private"),
    ],
)
def test_a_space_whose_cost_is_not_known_is_refused(tmp_path, space, words):
    wanted = request(tmp_path, space=space)
    with pytest.raises(ConfigError, match=words):
        ChargedSearch(tmp_path / "out", wanted).begin(load_data(wanted.base))


def test_requests_that_cannot_be_charged(tmp_path):
    wanted = request(tmp_path)
    for change, match in (
        ({"strategy": "halving"}, "only a random search can be charged"),
        ({"seeds": 2}, "releases one model only"),
        ({"trials": 0}, "at least one trial"),
    ):
        with pytest.raises(ConfigError, match=match):
            SearchRequest(wanted.base, wanted.space, **{"trials": 4, "law": "geometric", **change})
    with pytest.raises(ConfigError, match="noise_seed"):
        request(tmp_path, privacy__noise_seed=3)
    data = load_data(wanted.base)
    small = wanted.base.model_copy(update={"privacy": wanted.base.privacy.model_copy(update={"epsilon": 0.005})})
    with pytest.raises(BudgetError, match="too small|needs a noise multiplier"):
        charged(small, wanted.space, data, Charge("geometric", 10.0))


@pytest.mark.parametrize("law", ["geometric", "poisson", "logarithmic"])
def test_every_law_is_calibrated_to_its_budget(tmp_path, law):
    wanted = request(tmp_path)
    found = charged(wanted.base, wanted.space, load_data(wanted.base), Charge(law, 10.0))
    spent = found.selection.epsilon(found.selection.curves[0], 1e-5)
    assert 0.99 * 3.0 <= spent <= 3.0 and found.trial_epsilon < 3.0


def dpcert(*arguments, **how):
    command = [sys.executable, "-m", "dpcert", *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)


def test_a_killed_search_is_resumed_and_verified_in_other_processes(tmp_path):
    """With a geometric law of mean 1 there is one trial: the terminal must not say so."""
    data, space, out = write_data(tmp_path), write_space(tmp_path), tmp_path / "out"
    command = words(data, space, out, "--charge", "--trials", "1")
    first = dpcert(*command)
    begun, until = out / "private" / "trials" / "trial-000.toml", time.monotonic() + 120
    while not begun.exists() and first.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert begun.exists() and public_files(out) == []
    again = dpcert(*command)
    printed, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors
    assert "epsilon = " in printed and f"released: {out / 'winner'}" in printed
    assert "trial-0" not in printed + errors and "ACR" not in printed + errors
    checked = dpcert("verify", out / "winner")
    report, _ = checked.communicate(timeout=120)
    assert checked.returncode == 0 and "0 failed" in report and "epsilon recomputed: epsilon = " in report
    assert public_files(out) == RELEASED and Path(out / "private" / "search.log").exists()
