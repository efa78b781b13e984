"""What is missing is found by looking: done work is skipped, foreign work is refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from dpcert.errors import DpcertError
from dpcert.paper.estimate import Estimator, as_words
from dpcert.paper.grid import Cell, Need
from dpcert.paper.pieces import Piece, check_examples, check_results, missing_of
from dpcert.store.durable import write_checked_json
from dpcert.store.records import SampleRow, header, read_rows, text_of
from tests.grid_fakes import entry, fake_run, radius_of

CELL = Cell("mnist", "dp-gaussian")
NEED = Need(CELL, (0.5,), samples=True, attacks=("fgsm",))


def kinds(need, results, examples=100):
    return [piece.kind for piece in missing_of(need, results, examples)]


def test_nothing_there_is_everything_missing_in_order(tmp_path):
    assert kinds(NEED, tmp_path) == ["train", "certify", "analyze", "attack"]


def test_done_is_done(tmp_path):
    fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)}, samples=lambda k: (1, 1, 1), fgsm=(0.9, 0.8, 0.3, 0.1, 0.1))
    before = {path: path.read_bytes() for path in (tmp_path / CELL.name).iterdir()}
    assert kinds(NEED, tmp_path) == []
    assert kinds(NEED, tmp_path, 50) == []  # more than was asked for is left alone
    assert before == {path: path.read_bytes() for path in (tmp_path / CELL.name).iterdir()}


def test_too_few_examples_are_certified_further(tmp_path):
    fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)}, samples=lambda k: (1, 1, 1), fgsm=(0.9, 0.8, 0.3, 0.1, 0.1))
    assert kinds(NEED, tmp_path, 101) == ["certify", "analyze"]


def test_attacks_of_too_few_images_are_made_again(tmp_path):
    fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5, 2000)}, fgsm=(0.9, 0.8, 0.3, 0.1, 0.1))  # of 1,000 images
    need = Need(CELL, attacks=("fgsm",))
    assert kinds(need, tmp_path, 1000) == []
    (piece,) = missing_of(need, tmp_path, 1001)
    words = piece.command(tmp_path)
    assert words[0] == "attack" and words[-3:] == ["--examples", "1001", "--again"]
    file = tmp_path / CELL.name / "attacks.tsv"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    (piece,) = missing_of(need, tmp_path, 500)  # the strength that is missing is of as many images as the others
    assert piece.examples == 1000


def test_metrics_of_images_that_are_not_certified_do_not_count(tmp_path):
    folder = fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)}, samples=lambda k: (1, 1, 1))
    rows = [replace(row, idx=row.idx + 1) for row in read_rows(SampleRow, folder / "samples.tsv")]
    need = Need(CELL, (0.5,), samples=True)
    assert kinds(need, tmp_path) == []
    (folder / "samples.tsv").write_text("\n".join([header(SampleRow), *map(text_of, rows)]) + "\n")
    assert kinds(need, tmp_path) == ["analyze"]


@pytest.mark.parametrize(
    ("piece", "file"),
    [
        (Piece("train", CELL, 100), "ledger.jsonl"),
        (Piece("certify", CELL, 100, sigma=0.5), "certificates-sigma0.50.json"),
        (Piece("analyze", CELL, 100), "samples.tsv"),
        (Piece("attack", CELL, 100, attack="fgsm"), None),  # is made anew as a whole
    ],
    ids=lambda value: value.kind if isinstance(value, Piece) else "",
)
def test_a_piece_has_begun_with_its_own_first_file(tmp_path, piece, file):
    folder = tmp_path / CELL.name
    folder.mkdir()
    certificates = "certificates-sigma0.50.json", "certificates-sigma1.00.json"
    for name in {"ledger.jsonl", *certificates, "samples.tsv", "attacks.tsv"} - {file}:
        (folder / name).touch()
    assert not piece.has_begun(tmp_path)
    if file is not None:
        (folder / file).touch()
        assert piece.has_begun(tmp_path)


def test_one_run_serves_three_sigmas(tmp_path):
    cell = Cell("mnist", "dpsgd")
    fake_run(tmp_path, cell, {0.5: radius_of(1, 0.5)})
    assert [piece.sigma for piece in missing_of(Need(cell, (0.25, 0.5, 1.0)), tmp_path, 100)] == [0.25, 1.0]


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1000},
        {"n0": 10},
        {"alpha": 0.01},
        {"split": "validation"},
        {"alpha_is": "simultaneous"},
        {"skip_misclassified": True},
    ],
)
def test_certificates_of_another_kind_are_not_the_papers(tmp_path, change):
    folder = fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)})
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics.pop("check")
    metrics["certification"] = [entry(0.5, radius_of(1, 0.5)) | change]
    write_checked_json(folder / "metrics.json", metrics)
    assert kinds(Need(CELL, (0.5,)), tmp_path) == ["certify"]


def test_rows_without_weights_are_enough_if_they_are_all_there(tmp_path):
    fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)}, weights=False, fgsm=(0.9, 0.8, 0.3, 0.1, 0.1))
    assert kinds(Need(CELL), tmp_path) == kinds(Need(CELL, (0.5,), attacks=("fgsm",)), tmp_path) == []
    everything = ["train", "certify", "attack"]  # the rows there are of other weights than a new training gives
    assert kinds(Need(CELL, (0.5,), attacks=("fgsm",)), tmp_path, 101) == everything
    assert kinds(NEED, tmp_path) == ["train", "certify", "analyze", "attack"]


def test_a_half_finished_run_goes_on(tmp_path):
    folder = tmp_path / CELL.name
    folder.mkdir()
    (folder / "config.toml").write_text(CELL.config().to_toml())
    assert kinds(Need(CELL, (0.5,)), tmp_path) == ["train", "certify"]


def test_certification_goes_on_with_the_noise_it_began_with(tmp_path):
    piece = Piece("certify", CELL, 1000, 0.5)
    assert piece.command(tmp_path)[-2:] == ["--seed", "0"]
    fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)})
    (tmp_path / CELL.name / "certificates-sigma0.50.json").write_text("{}")
    assert "--seed" not in piece.command(tmp_path)


def _refusal(tmp_path, cell=CELL):
    with pytest.raises(DpcertError) as error:
        missing_of(Need(cell, (0.5,)), tmp_path, 100)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_of_other_settings_is_refused_by_its_key(tmp_path):
    folder = fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)})
    text = (folder / "config.toml").read_text()
    for old, new, key in (
        ("learning_rate = 0.5", "learning_rate = 0.7", "train.learning_rate: 0.7 -> 0.5"),
        ('name = "mnist"', 'name = "fashion-mnist"', "data.name: fashion-mnist -> mnist"),
        ("seed = 0\nphysical", "seed = 3\nphysical", "train.seed: 3 -> 0"),
        ("copies = 2", "copies = 3", "method.copies: 3 -> 2"),
    ):
        assert old in text
        (folder / "config.toml").write_text(text.replace(old, new, 1))
        assert f"other settings than its name says ({key})" in _refusal(tmp_path)


def test_a_run_without_a_seed_is_a_first_draw(tmp_path):
    folder = fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)})
    config = folder / "config.toml"
    config.write_text(re.sub(r"(?m)^seed = 0\n", "", config.read_text()))
    assert missing_of(Need(CELL, (0.5,)), tmp_path, 100) == []
    other = Cell("mnist", "dp-gaussian", seed=1)
    folder.rename(tmp_path / other.name)
    assert "train.seed: None -> 1" in _refusal(tmp_path, other)


def test_a_config_of_a_newer_version_is_refused(tmp_path):
    folder = fake_run(tmp_path, CELL, {0.5: radius_of(1, 0.5)})
    with (folder / "config.toml").open("a") as file:
        file.write("[quantum]\nbits = 3\n")
    assert "unknown key 'quantum'" in _refusal(tmp_path) and "newer version: update dpcert" in _refusal(tmp_path)


def test_wrong_places_and_numbers(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / CELL.name).write_text("")
    assert "is a file, must be the run directory" in _refusal(tmp_path)
    with pytest.raises(DpcertError, match="--results .*file is a file"):
        check_results(tmp_path / "file")
    for wrong in (0, -1, 10_001):
        with pytest.raises(DpcertError, match=f"--examples is {wrong}, must be a whole number in .1, 10000."):
            check_examples(wrong)
    assert check_examples(10_000) == 10_000


def test_estimates_follow_what_was_measured(tmp_path):
    dpsgd, gaussian = Cell("mnist", "dpsgd"), CELL
    fake_run(tmp_path, dpsgd, {0.5: np.full(100, 0.2)}, seconds=50.0)
    estimator = Estimator(tmp_path, [dpsgd, gaussian])
    train = Piece("train", gaussian, 100)
    assert estimator.seconds(train) == pytest.approx(50.0 * 2.6)  # the table's cost of the method
    assert estimator.seconds(Piece("certify", gaussian, 300, 0.5)) == pytest.approx(60.0)
    estimator.note(train, 1300.0)  # this session knows better
    assert estimator.seconds(Piece("train", dpsgd, 100)) == pytest.approx(500.0)
    chains = [[train], [train], [train, train]]
    assert estimator.left(chains, 1) == pytest.approx(4 * 1300)
    assert estimator.left(chains, 8) == pytest.approx(2 * 1300)  # no quicker than the longest chain
    assert estimator.left([], 2) == 0


@pytest.mark.parametrize(("seconds", "words"), [(10, "1 min"), (90, "2 min"), (3540, "59 min"), (7265, "2 h 01 min")])
def test_words_for_times(seconds, words):
    assert as_words(seconds) == words


def test_a_gpu_is_asked_for_by_every_kind_and_matters_for_speed_only(tmp_path):
    from dpcert.runs.config import differences

    for piece in missing_of(NEED, tmp_path, 100):
        assert piece.command(tmp_path, "cuda") == [*piece.command(tmp_path), "--device", "cuda"]
    on_a_gpu = Cell("mnist", "dp-gaussian", change=(("train.device", "cuda"),)).config()
    assert differences(CELL.config(), on_a_gpu) == []
