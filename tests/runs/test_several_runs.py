"""``dpcert certify RUN RUN ...``: each run gets the files that it gets alone, however the runs are grouped."""

import json
import shutil

import pytest

from dpcert.certification import heads
from dpcert.cli import main
from dpcert.errors import RunError
from dpcert.runs import certify as certifying
from dpcert.runs.certify import CertifyRequest, certify_runs
from dpcert.runs.open import open_run
from dpcert.runs.training import train
from dpcert.store.runs import IN_USE
from tests.faults import scene
from tests.runs import own_models

VOTES = ("--n0", 10, "--n", 100)
SEED = ("--seed", 4)
ROWS = scene.ROWS
FACTORY = "tests.runs.own_models:frozen"
MODEL = ("--model", FACTORY)
HEADS = ("a", "b", "c")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three heads on one frozen trunk, one head on another trunk, and a run with a sigma of its own."""
    folder = tmp_path_factory.mktemp("several")
    data = scene.write_data(folder)

    def one(name, factory=own_models.frozen, **changes):
        learning = {"model__name": FACTORY, "privacy__epsilon": 100, "train__epochs": 10, "train__learning_rate": 2.0}
        train(scene.config(data, **learning, **changes), folder / name, factory=factory)

    for place, name in enumerate(HEADS):
        one(name, privacy__noise_seed=place)
    one("other", own_models.frozen_otherwise)
    one("quiet", privacy__noise_seed=9, certify__sigma=0.25)
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    for folder in (*HEADS, "other", "quiet"):
        shutil.copytree(trained / folder, tmp_path / folder)
        shutil.copytree(trained / folder, tmp_path / "alone" / folder)
    return tmp_path


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def passes(monkeypatch):
    """The number of files of every pass from now on."""
    seen = []
    real = certifying.certify_to_files

    def watched(model, x, y, files, *args, **kwargs):
        seen.append(len(files))
        return real(model, x, y, files, *args, **kwargs)

    monkeypatch.setattr(certifying, "certify_to_files", watched)
    return seen


def certify_alone(runs, *names, more=(), votes=VOTES):
    for name in names:
        assert call("certify", runs / "alone" / name, *votes, *SEED, *MODEL, *more) == 0


def same_as_alone(runs, *names):
    return [scene.results(runs / name) == scene.results(runs / "alone" / name) for name in names]


@pytest.mark.parametrize("more", [(), ("--fresh-noise",), ("--skip-misclassified",), ("--simultaneous",)], ids=str)
def test_one_pass_writes_what_each_run_writes_alone(runs, monkeypatch, capsys, more):
    seen = passes(monkeypatch)
    assert call("certify", *(runs / name for name in HEADS), *VOTES, *SEED, *MODEL, *more) == 0
    assert seen == [3]
    out = capsys.readouterr().out
    assert "3 runs share a trunk, sigma and noise: one pass\n" in out and all(f"{runs / name}: sigma" in out for name in HEADS)
    certify_alone(runs, *HEADS, more=more)
    assert all(same_as_alone(runs, *HEADS))
    texts = {(runs / name).glob("certificates*.tsv").__next__().read_bytes() for name in HEADS}
    assert len(texts) == 3


def test_twin_swapped_heads_are_noticed(runs, monkeypatch):
    real = heads.share
    monkeypatch.setattr(certifying, "share", lambda parts, x, sigma: real(list(parts)[::-1], x, sigma))
    assert call("certify", *(runs / name for name in HEADS), *VOTES, *SEED, *MODEL) == 0
    certify_alone(runs, *HEADS)
    assert same_as_alone(runs, *HEADS) == [False, True, False]


class StopError(Exception):
    pass


def interrupted(runs, names, after):
    """Certify until `after` images are done."""

    def progress(done, total, **facts):
        if done == after:
            raise StopError

    how = certifying.request_of(open_run(runs / names[0], own_models.frozen).config)
    with pytest.raises(StopError):
        certify_runs([(open_run(runs / name, own_models.frozen), how) for name in names], progress)


@pytest.mark.parametrize("after", [1, 5, 11])
def test_an_interrupted_pass_resumes(runs, monkeypatch, after):
    interrupted(runs, HEADS, after)
    assert all(0 < len((runs / name / ROWS).read_text().splitlines()) - 1 <= after for name in HEADS)
    seen = passes(monkeypatch)
    assert call("certify", *(runs / name for name in HEADS), *VOTES, *MODEL) == 0 and seen == [3]
    certify_alone(runs, *HEADS)
    assert all(same_as_alone(runs, *HEADS))


def test_runs_with_different_numbers_of_rows_lack_only_the_rest(runs, monkeypatch):
    assert call("certify", runs / "a", *VOTES, *SEED, *MODEL, "--examples", 12) == 0
    assert call("certify", runs / "b", *VOTES, *SEED, *MODEL, "--examples", 3) == 0
    before = (runs / "a" / ROWS).read_bytes()
    cast = []
    real = certifying.certify_to_files
    monkeypatch.setattr(
        certifying,
        "certify_to_files",
        lambda model, x, y, files, *a, **k: (
            cast.append([len(set(indices)) for _, indices in files]) or real(model, x, y, files, *a, **k)
        ),
    )
    assert call("certify", *(runs / name for name in HEADS), *VOTES, *SEED, *MODEL, "--examples", 6) == 0
    assert cast == [[12, 6, 6]] and (runs / "a" / ROWS).read_bytes() == before
    for name, counts in (("a", (12, 6)), ("b", (3, 6)), ("c", (6,))):
        for count in counts:
            certify_alone(runs, name, more=("--examples", count))
    assert all(same_as_alone(runs, *HEADS))


def test_a_run_with_another_trunk_is_certified_afterwards(runs, monkeypatch, capsys):
    seen = passes(monkeypatch)
    assert call("certify", runs / "a", runs / "other", runs / "b", *VOTES, *SEED, *MODEL) == 0
    assert sorted(seen) == [1, 2]
    assert "2 runs share a trunk, sigma and noise: one pass; 1 run shares none: a pass of its own" in capsys.readouterr().out
    certify_alone(runs, "a", "b", "other")
    assert all(same_as_alone(runs, "a", "b", "other"))


def test_runs_of_different_sigmas_are_not_mixed(runs, monkeypatch, capsys):
    seen = passes(monkeypatch)
    assert call("certify", runs / "a", runs / "quiet", *VOTES, *SEED, *MODEL) == 0
    assert seen == [1, 1] and "2 runs share none: one after another" in capsys.readouterr().out
    assert (runs / "quiet" / "certificates-sigma0.25.tsv").exists() and (runs / "a" / ROWS).exists()
    certify_alone(runs, "a", "quiet")
    assert all(same_as_alone(runs, "a", "quiet"))
    assert call("certify", runs / "b", runs / "quiet", *VOTES, *SEED, *MODEL, "--sigma", 0.5) == 0  # one sigma for all
    assert seen[-1] == 2


def key_of(run):
    facts = json.loads((run / ROWS).with_suffix(".json").read_text())
    return facts["noise_key"], facts["seed"]


def test_without_a_seed_the_runs_of_a_pass_share_one_secret_key(runs, monkeypatch):
    seen = passes(monkeypatch)
    assert call("certify", runs / "c", *VOTES, *MODEL) == 0
    assert call("certify", runs / "a", runs / "b", runs / "c", runs / "other", *VOTES, *MODEL) == 0
    keys = {name: key_of(runs / name) for name in ("a", "b", "c", "other")}
    assert keys["a"] == keys["b"] and len(set(keys.values())) == 3 and all(seed is None for _, seed in keys.values())
    assert sorted(seen) == [1, 1, 1, 2]  # "c" has its own noise already
    assert call("certify", runs / "alone" / "a", runs / "alone" / "b", *VOTES, *MODEL) == 0
    assert key_of(runs / "alone" / "a")[0] not in {key for key, _ in keys.values()}


def test_skip_misclassified_comes_from_the_run_unless_it_is_given(runs):
    config = runs / "a" / "config.toml"
    assert "skip_misclassified = false" in config.read_text()
    opened = open_run(runs / "a", own_models.frozen)
    skipping = opened.config.model_copy(
        update={"certify": opened.config.certify.model_copy(update={"skip_misclassified": True})}
    )
    opened.config = skipping
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpcert.runs.open.open_run", lambda *args, **kwargs: opened)
        assert call("certify", runs / "a", *VOTES, *SEED, *MODEL) == 0
        assert call("certify", runs / "a", *VOTES, *SEED, *MODEL, "--no-skip-misclassified") == 0
    assert {file.name for file in (runs / "a").glob("certificates*.tsv")} == {"certificates-sigma0.50-skipped.tsv", ROWS}


def test_bad_requests_are_one_line_and_write_nothing(runs, capsys):
    before = {name: scene.results(runs / name) for name in HEADS}
    bad = {
        "same run twice": ((runs / "a", runs / "b", runs / "a" / ".." / "a", *MODEL), "2 times; give each run once"),
        "missing run": ((runs / "a", runs / "nowhere", *MODEL), "nowhere"),
        "custom model": ((runs / "a", runs / "b"), "custom model (tests.runs.own_models:frozen); pass it again: --model"),
        "unfinished": ((runs / "a", runs, *MODEL), "config.toml"),
        "seed": ((runs / "a", runs / "b", "--seed", -1, *MODEL), "seed"),
    }
    for why, (arguments, words) in bad.items():
        assert call("certify", *arguments, *VOTES) == 2, why
        error = capsys.readouterr().err
        assert words in error and error.startswith("error: ") and error.count("\n") == 1, error
    assert before == {name: scene.results(runs / name) for name in HEADS}


def test_a_run_in_use_stops_the_call_before_any_vote(runs, capsys):
    with open_run(runs / "b", own_models.frozen).directory.locked():
        assert call("certify", runs / "a", runs / "b", *VOTES, *MODEL) == 2
    assert IN_USE in capsys.readouterr().err
    assert not (runs / "a" / ROWS).exists()


def test_a_refused_run_stops_the_call_before_any_file_is_written(runs, capsys):
    assert call("certify", runs / "b", *VOTES, *SEED, *MODEL) == 0
    before = scene.results(runs / "a")
    assert call("certify", runs / "a", runs / "b", *VOTES, "--seed", 5, *MODEL) == 2
    assert "records seed 4, the request has --seed 5" in capsys.readouterr().err
    assert scene.results(runs / "a") == before


def test_one_run_without_metrics_stops_the_call_before_any_vote(runs):
    (runs / "b" / "metrics.json").unlink()
    with pytest.raises(RunError, match="metrics.json"):
        certify_runs(
            [(open_run(runs / n, own_models.frozen), CertifyRequest(certifying.Request(0.5, 10, 100))) for n in ("a", "b")]
        )
    assert not (runs / "a" / ROWS).exists()


def test_a_radius_is_decided_for_each_run(runs):
    assert call("certify", runs / "a", runs / "b", *VOTES, *MODEL, "--radius", 0.1) == 0
    assert all(list((runs / name).glob("robust*.tsv")) for name in ("a", "b"))


def test_the_bar_counts_the_images_of_all_passes(runs):
    shown = []
    asked = [
        (open_run(runs / name, own_models.frozen), CertifyRequest(certifying.Request(sigma, 10, 100), 6, 4))
        for name, sigma in (("a", 0.5), ("b", 0.5), ("c", 0.25))
    ]
    found = certify_runs(asked, lambda done, total, **facts: shown.append((done, total, facts["acr"].count("/"))))
    assert [done for done, _, _ in shown] == list(range(1, 13)) and {total for _, total, _ in shown} == {12}
    assert [heads for *_, heads in shown] == [1] * 6 + [0] * 6
    assert [entry["sigma"] for entry in found] == [0.5, 0.5, 0.25]
