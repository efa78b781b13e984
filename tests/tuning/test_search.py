"""A search that is not charged: settings, rounds, resuming, the table, and requests that cannot be met."""

import math
from collections import Counter

import pytest

from dpcert.errors import ConfigError, DataError, RunError
from dpcert.runs.resolve import resolve
from dpcert.runs.sources import load_data
from dpcert.scale.tasks import Resources
from dpcert.tuning.request import SearchRequest, with_validation
from dpcert.tuning.rounds import run_rounds, settings_of
from dpcert.tuning.runner import TrialRunner
from dpcert.tuning.space import Range, Space, read_space
from dpcert.tuning.trials import Result, Score, best_of, check_trials
from dpcert.tuning.uncharged import UnchargedSearch
from tests.tuning.inside import InProcess, assignments, words, write_data, write_space

KEY = bytes(32)


@pytest.fixture
def base(tmp_path):
    config = resolve("mnist/dp-gaussian", assignments(write_data(tmp_path)))
    return with_validation(config, load_data(config))


def space_of(tmp_path, base, text):
    return read_space(write_space(tmp_path, text), base)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "empty space"),
        ("[train]\n", "empty space"),
        ("[train]\nlr = [1.0]\n", "unknown key 'train.lr'"),
        ("[nonsense]\nkey = [1.0]\n", "unknown key 'nonsense'"),
        ("batch_size = [6]\n", "not in a section"),
        ("[train]\nbatch_size = []\n", "must be a list of values, or a range"),
        ("[train]\nbatch_size = 6\n", "must be a list of values, or a range"),
        ("[train]\nbatch_size = [6, 6]\n", "lists 6 twice"),
        ("[train]\nbatch_size = [6, -1]\n", "train.batch_size is -1"),
        ('[train]\nbatch_size = ["six"]\n', "train.batch_size is 'six'"),
        ("[train]\nlearning_rate = { low = 2.0, high = 1.0 }\n", "must be a list of values, or a range"),
        ("[train]\nlearning_rate = { low = 0.0, high = 1.0, log = true }\n", "must be a list of values, or a range"),
        ("[train]\nlearning_rate = { low = 0.1, high = inf }\n", "must be a list of values, or a range"),
        ("[train]\nlearning_rate = { low = -1.0, high = 1.0 }\n", "train.learning_rate is -1.0"),
        ("[privacy]\nepsilon = [1.0, 3.0]\n", "must be the same in all trials"),
        ("[data]\nvalidation = [10, 20]\n", "must be the same in all trials"),
        ("[certify]\nn = [10, 20]\n", "must be the same in all trials"),
        ("[train]\nthreads = [1, 2]\n", "must be the same in all trials"),
        ("[method]\nstability_gamma = [1.0]\n", "method.stability_gamma is set, but"),
        ("not toml", "is not TOML"),
    ],
)
def test_a_bad_space_is_one_clear_line(tmp_path, base, text, match):
    with pytest.raises(ConfigError, match=match) as caught:
        space_of(tmp_path, base, text)
    assert "\n" not in str(caught.value)


def test_draws_follow_the_space_and_are_functions_of_key_and_trial():
    space = Space({"a.b": ["x", "y", "z"], "c.d": Range(1.0, 100.0, True), "e.f": Range(3, 5)}, "space.toml")
    draws = [space.draw(KEY, trial) for trial in range(3000)]
    assert draws[:10] == [space.draw(KEY, trial) for trial in range(10)]
    counts = Counter(draw["a.b"] for draw in draws)
    assert min(counts.values()) > 850 and set(counts) == {"x", "y", "z"}
    below = sum(draw["c.d"] < 10.0 for draw in draws)
    assert 1350 < below < 1650, "half of a logarithmic range is below its geometric mean"
    assert not 1350 < sum(draw["c.d"] < 50.5 for draw in draws) < 1650, "a linear range would be"
    assert {draw["e.f"] for draw in draws} == {3, 4, 5} and all(1 <= draw["c.d"] <= 100 for draw in draws)
    assert space.draw(bytes([1]) * 32, 0) != space.draw(KEY, 0)


def test_a_small_space_is_tried_completely_and_only_once(tmp_path, base):
    space = space_of(tmp_path, base, "[train]\nbatch_size = [6, 12]\nmomentum = [0.0, 0.9]\n")
    found = space.distinct_draws(KEY, 50)
    assert len(found) == 4 == space.size and space.distinct_draws(KEY, 3) == found[:3]


def test_keys_that_the_drawn_method_does_not_have_are_left_out(tmp_path, base):
    text = '[method]\nname = ["dp-gaussian", "dp-gaussian+consistency"]\nconsistency_lambda = [5.0, 10.0]\n'
    text += '[train]\naveraging = ["none", "tail"]\ntail = [0.3]\n'
    space = space_of(tmp_path, base, text)
    plain = space.apply(base, {"method.name": "dp-gaussian", "method.consistency_lambda": 5.0, "train.averaging": "none"})
    assert plain.method.consistency_lambda is None and plain.train.tail is None
    setting = {"method.name": "dp-gaussian+consistency", "method.consistency_lambda": 10.0, "train.averaging": "tail"}
    other = space.apply(plain, {**setting, "train.tail": 0.3})
    assert other.method.consistency_lambda == 10.0 and other.train.tail == 0.3
    assert other.build_method().regulariser.lambda_ == 10.0


def test_the_score_does_not_depend_on_the_noise_that_is_searched(tmp_path, base):
    space = space_of(tmp_path, base, "[method]\nsigma = [0.5, 0.75]\n")
    assert {space.apply(base, {"method.sigma": sigma}).certification_sigma for sigma in (0.5, 0.75)} == {0.5}


def search_in(folder, base, trials=3, seeds=2, strategy="random", text="[train]\nlearning_rate = [0.1, 0.5, 1.0, 2.0]\n"):
    return UnchargedSearch(
        folder / "out", SearchRequest(base, space_of(folder, base, text), trials, strategy, seeds=seeds, seed=5)
    )


def run(search, base, executor):
    search.check()
    search.directory.path.mkdir(exist_ok=True)
    key = search.begin(load_data(base))
    runner = TrialRunner(search.trials_folder, executor, Resources(), lambda text, passing=False: None)
    runner._poll_seconds = 0.0
    return search.run(key, runner.run)


def test_a_search_is_resumed_extended_and_reports_winner_spread_and_cost(tmp_path, base):
    search = search_in(tmp_path, base)
    with pytest.raises(KeyboardInterrupt):
        run(search, base, InProcess(stop_after=2))
    summary = run(search, base, executor := InProcess())
    assert executor.ran[0] == "trial-002-seed5" and len(executor.ran) == 2, "two were done, one is left, and another seed"
    assert executor.ran[1].endswith("-seed6") and len(summary.by_seed) == 2
    first = max(result.score.acr for result in summary.results if result.trial.seed == 5)
    assert summary.best.score.acr == first and len(summary.results) == 4
    table = (search.directory.path / "trials.tsv").read_text().splitlines()
    assert len(table) == 5 and table[0].startswith("trial\trung\tseed\tacr")
    total = search.epsilon_of_all(summary.results, 1e-5)
    assert 3.0 < total < math.inf
    best = resolve(str(search.directory.path / "best.toml"), {})
    assert best.data.validation == 0 and best.train.seed is None
    assert best.train.learning_rate == summary.best.trial.config.train.learning_rate
    run(search_in(tmp_path, base, trials=4), base, more := InProcess())
    assert "trial-003-seed5" in more.ran and len(more.ran) <= 2, "more trials extend it"
    run(search_in(tmp_path, base, trials=3), base, none := InProcess())
    assert not [name for name in none.ran if name.endswith("seed5")], "fewer change nothing"


def test_another_search_in_the_same_folder_is_refused(tmp_path, base):
    run(search_in(tmp_path, base, trials=1, seeds=1), base, InProcess())
    with pytest.raises(RunError, match=r"space train.learning_rate is \[0.1, 0.5, 1.0, 2.0\], the request has \[0.1\]"):
        search_in(tmp_path, base, text="[train]\nlearning_rate = [0.1]\n").check()
    other = base.model_copy(update={"train": base.train.model_copy(update={"epochs": 2.0})})
    with pytest.raises(RunError, match=r"train.epochs is 1.0, the request has 2.0"):
        search_in(tmp_path, other).check()
    faster = base.model_copy(update={"train": base.train.model_copy(update={"physical_batch": 8})})
    search_in(tmp_path, faster, trials=1, seeds=1).check()


def test_a_failed_trial_is_named_and_the_others_are_kept(tmp_path, base):
    search = search_in(tmp_path, base, seeds=1)
    summary = run(search, base, InProcess(fail=lambda task: task.name.startswith("trial-000")))
    failed = [result for result in summary.results if result.failure]
    assert [result.trial.number for result in failed] == [0] and summary.best.trial.number != 0
    with pytest.raises(RunError, match="no trial has a score; the first failure: no such model"):
        run(search_in(tmp_path / "out", base, trials=1, seeds=1), base, InProcess(fail=lambda task: True))


def test_successive_halving_gives_more_training_to_fewer_settings(tmp_path, base):
    space = Space({"train.learning_rate": Range(0.1, 2.0)}, "space.toml")
    request = SearchRequest(base, space, 9, "halving", seeds=2)
    rounds = []

    def scored(trials):
        rounds.append([(trial.number, trial.config.train.epochs, trial.seed) for trial in trials])
        return [Result(trial, Score(trial.number / 10, 0.0, None, 0.5, {}, 1.0)) for trial in trials]

    results = run_rounds(request, KEY, scored)
    lengths = [(len(of_round), round(of_round[0][1], 6)) for of_round in rounds]
    assert lengths == [(9, round(1 / 9, 6)), (3, round(1 / 3, 6)), (1, 1.0), (1, 1.0)]
    assert {number for number, _, _ in rounds[1]} == {6, 7, 8}, "the best third is kept"
    assert rounds[2] == [(8, 1.0, 0)] and rounds[3] == [(8, 1.0, 1)] and len(results) == 14
    assert len({result.trial.name for result in results}) == 14, "each training has its own folder"


def test_the_first_of_equal_scores_wins_and_failures_never_do(tmp_path, base):
    request = SearchRequest(base, Space({"train.momentum": [0.0, 0.5, 0.9]}, ""), 3)
    trials = settings_of(request, KEY)
    same = [Result(trial, Score(0.5, 0.0, None, 0.5, {}, 1.0)) for trial in trials]
    assert best_of(same) is same[0] and best_of([Result(trials[0], failure="x"), same[1]]) is same[1]
    assert best_of([Result(trials[0], failure="x")]) is None and best_of([]) is None


def test_a_validation_split_that_leaves_too_few_records(tmp_path, base):
    data = base.model_copy(update={"data": base.data.model_copy(update={"validation": 68})})
    with pytest.raises(ConfigError, match="data.validation is 68, which leaves 4 records"):
        check_trials([data], len(load_data(data).x_train))
    all_of_them = base.model_copy(update={"data": base.data.model_copy(update={"validation": 72})})
    with pytest.raises(DataError, match="leave at least one record"):
        load_data(all_of_them)


def test_the_default_split_is_a_sixth(tmp_path, base):
    assert base.data.validation == 12 and base.certify.examples == 4


def test_the_command_line_refuses_bad_requests_in_one_line(tmp_path, capsys):
    from dpcert.cli.app import main

    data, space = write_data(tmp_path), write_space(tmp_path)
    cases = [
        (("--trials", "0"), "--trials is 0"),
        (("--trials", "2", "--law", "poisson"), "only a charged search has one"),
        (("--trials", "2", "--charge", "--search", "halving"), "only a random search can be charged"),
        (("--trials", "2", "--charge", "--seeds", "3"), "releases one model only"),
        (("--trials", "2", "--set", "data.validation=70"), "which leaves 2 records"),
        (("--trials", "2", "--on", "nowhere"), "--on is 'nowhere'"),
    ]
    for more, match in cases:
        with pytest.raises(SystemExit) as ended:
            main(words(data, space, tmp_path / "out", *more))
        printed = capsys.readouterr().err
        lines = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert ended.value.code == 2 and len(lines) == 1 and match in lines[0], (more, printed)
    assert not (tmp_path / "out" / "winner").exists()
