"""Which test images are certified: evenly spread ones, whatever the file's order and whichever requests came before."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpcert.certification.metrics import (
    average_certified_radius,
    certified_accuracy,
    classes_are_mixed_alike,
    even_subset,
    largest_radius,
)
from dpcert.cli import main
from dpcert.report.tables import read_run
from dpcert.store.durable import read_checked_json, write_checked_json
from dpcert.store.records import CertificateRow, read_rows
from tests.conftest import blobs

FILE = "certificates-sigma0.50.tsv"
RESULTS = Path(__file__).parents[2] / "results"


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code


def arranged(order):
    """The small data set with its test images in another order."""
    arrays = blobs(0, test=80)
    place = np.argsort(arrays["y_test"], kind="stable")
    if order == "classes take turns":
        of_class = [list(np.flatnonzero(arrays["y_test"] == c))[:20] for c in range(3)]
        place = [index for turn in zip(*of_class, strict=True) for index in turn]
    return arrays | {"x_test": arrays["x_test"][place], "y_test": arrays["y_test"][place]}


def trained(folder, order="sorted by class"):
    np.savez(folder / "blobs.npz", **arranged(order))
    small = [f"data.path={folder / 'blobs.npz'}", "model.name=linear", "train.batch_size=10", "train.epochs=3"]
    small += ["data.classes=3", "train.seed=1", "certify.n=200"]
    run = folder / "run"
    assert call("train", "mnist/dp-gaussian", *(w for s in small for w in ("--set", s)), "--out", run) == 0
    return run


@pytest.fixture
def run(tmp_path):
    return trained(tmp_path)


def certify(run, examples, *more):
    return call("certify", run, "--n", 200, "--examples", examples, *more)


def entry_of(run, file=FILE):
    return next(e for e in json.loads((run / "metrics.json").read_text())["certification"] if e["file"] == file)


def rows_in(run, file=FILE):
    return {row.idx: row for row in read_rows(CertificateRow, run / file)}


def as_earlier_versions_did(run, examples, monkeypatch):
    """Certificates of images 0, k, 2k, ... with k = floor(size / examples), and the entry that names k and no size."""
    monkeypatch.setattr("dpcert.runs.certify.even_subset", lambda size, n: [i * (size // n) for i in range(n)])
    assert certify(run, examples) == 0
    monkeypatch.undo()
    metrics = read_checked_json(run / "metrics.json", what="", remedy="")
    entry = metrics["certification"][0]
    rows = [row for _, row in sorted(rows_in(run).items())]
    radius, correct = np.array([row.radius for row in rows]), np.array([bool(row.correct) for row in rows])
    acr = average_certified_radius(radius, correct)
    entry |= {"stride": entry.pop("size") // examples, "acr_interval": [acr.low, acr.high]}
    write_checked_json(run / "metrics.json", metrics)


def test_a_file_sorted_by_class_gives_every_class_its_share(run):
    assert certify(run, 50) == 0
    labels = arranged("sorted by class")["y_test"]
    shares = [np.mean([row.label == c for row in rows_in(run).values()]) for c in range(3)]
    assert all(abs(share - np.mean(labels == c)) <= 1 / 50 for c, share in enumerate(shares))
    assert (labels[:50] == 2).mean() < 0.5 * (labels == 2).mean()  # the twin: the first 50 of the file
    assert sorted(rows_in(run)) == even_subset(80, 50)
    assert entry_of(run)["subset"] == "indices floor(i * 80 / 50) of the 80 test images"


def test_where_the_number_divides_the_size_nothing_changes(run):
    assert certify(run, 40) == 0
    assert sorted(rows_in(run)) == list(range(0, 80, 2))
    entry = entry_of(run)
    assert entry["subset"] == "indices 0, 2, 4, ... of the 80 test images" and entry["stride"] == 2


def test_extending_keeps_every_row_and_speaks_of_the_even_subset_only(run):
    made = {}
    for examples in (20, 33, 50, 80):
        assert certify(run, examples) == 0
        now, entry = rows_in(run), entry_of(run)
        assert all(now[index] == row for index, row in made.items())  # time included: nothing is done twice
        made = now
        assert set(now) >= set(even_subset(80, examples)) and entry["examples"] == examples
        spoken_of = [now[index] for index in even_subset(80, examples)]
        assert entry["acr"] == pytest.approx(np.mean([row.radius * row.correct for row in spoken_of]))
        assert len(read_run(run).main.rows) == examples
        assert call("verify", run) == 0
    assert len(made) == 80


def test_rows_outside_of_the_subset_are_left_out_of_every_join(run):
    assert certify(run, 33) == 0 and call("analyze", run) == 0
    assert certify(run, 50) == 0 and call("analyze", run) == 0
    assert set(even_subset(80, 33)) - set(even_subset(80, 50))  # some rows of the smaller request are not in the larger one
    facts = read_run(run)
    assert [row.idx for row in facts.analyzed] == even_subset(80, 50) and len(facts.samples) > 50
    assert call("report", run, "--html", run / "report.html") == 0 and call("verify", run) == 0


@pytest.mark.parametrize("cut", [0.2, 0.7])
def test_a_request_that_was_cut_while_extending_ends_in_the_same_rows(run, cut):
    assert certify(run, 20, "--seed", 3) == 0
    small = (run / FILE).read_text().splitlines(keepends=True)
    assert certify(run, 50) == 0
    whole = rows_in(run)
    lines = (run / FILE).read_text().splitlines(keepends=True)
    extra = [line for line in lines if line not in small]
    (run / FILE).write_text("".join(small + extra[: int(cut * len(extra))]))
    assert certify(run, 50) == 0
    again = rows_in(run)
    assert again.keys() == whole.keys() and all(again[i].radius == whole[i].radius for i in whole)
    assert call("verify", run) == 0


def test_what_an_earlier_version_certified_still_verifies_and_the_same_request_makes_it_even(run, monkeypatch, capsys):
    as_earlier_versions_did(run, 50, monkeypatch)
    assert sorted(rows_in(run)) == list(range(50))  # only the first 50 of 80
    before = rows_in(run)
    assert call("verify", run) == 0 and len(read_run(run).main.rows) == 50 and call("analyze", run) == 0
    assert certify(run, 50) == 0
    assert all(rows_in(run)[index] == row for index, row in before.items())
    assert entry_of(run)["size"] == 80 and "stride" not in entry_of(run)
    assert [row.idx for row in read_run(run).main.rows] == even_subset(80, 50)
    assert call("verify", run) == 0 and call("analyze", run) == 0


def test_an_entry_that_only_gains_its_size_keeps_its_timing(run, monkeypatch):
    as_earlier_versions_did(run, 40, monkeypatch)
    metrics = read_checked_json(run / "metrics.json", what="", remedy="")
    metrics["timing"]["certify_seconds"] = 123.4
    write_checked_json(run / "metrics.json", metrics)
    assert certify(run, 40) == 0
    assert json.loads((run / "metrics.json").read_text())["timing"]["certify_seconds"] == 123.4


def test_simultaneous_certificates_are_never_joined_by_others(run, monkeypatch, capsys):
    monkeypatch.setattr("dpcert.runs.certify.even_subset", lambda size, n: [i * (size // n) for i in range(n)])
    assert certify(run, 50, "--simultaneous") == 0
    monkeypatch.undo()
    before = (run / "certificates-sigma0.50-simultaneous50.tsv").read_bytes()
    assert certify(run, 50, "--simultaneous") == 2
    assert "rows of other images" in capsys.readouterr().err
    assert (run / "certificates-sigma0.50-simultaneous50.tsv").read_bytes() == before


def test_attacks_are_of_even_images_and_rows_of_others_are_replaced_only_when_asked(run, monkeypatch, capsys):
    attack = ["attack", run, "--examples", 50, "--strengths", "0.1,0.2"]
    monkeypatch.setattr("dpcert.runs.attack.even_subset", lambda size, n: [i * (size // n) for i in range(n)])
    assert call(*attack) == 0
    monkeypatch.undo()
    facts = read_checked_json(run / "attacks.json", what="", remedy="")
    facts.pop("chosen")
    write_checked_json(run / "attacks.json", facts)
    before = (run / "attacks.tsv").read_bytes()
    for _ in range(2):  # a refusal leaves no trace that the next call would take for consent
        assert call(*attack) == 2
        assert "50 of 80" in capsys.readouterr().err and (run / "attacks.tsv").read_bytes() == before
    assert call(*attack, "--again") == 0 and call(*attack) == 0
    assert call("attack", run, "--examples", 40, "--strengths", "0.1,0.2", "--again") == 0
    write_checked_json(run / "attacks.json", facts)  # an earlier file whose number of images divides the size stays good
    assert call("attack", run, "--examples", 40, "--strengths", "0.1,0.2") == 0


def test_a_file_in_which_classes_take_turns_is_named_as_such(tmp_path, capsys):
    run = trained(tmp_path, "classes take turns")
    assert certify(run, 20) == 0  # every third of 60: one class only
    assert len({row.label for row in rows_in(run).values()}) == 1
    assert "classes are not mixed as in the whole set" in capsys.readouterr().out
    assert "not mixed" in entry_of(run)["subset"] and call("verify", run) == 0
    assert certify(run, 25) == 0 and "not mixed" not in entry_of(run)["subset"]


def test_a_random_order_is_hardly_ever_suspected():
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(2000):
        labels = rng.choice(5, size=400, p=[0.5, 0.3, 0.15, 0.0475, 0.0025])  # rare classes too
        alarms += not classes_are_mixed_alike(labels[even_subset(400, 60)], labels)
    assert alarms <= 2
    assert not classes_are_mixed_alike(np.zeros(60), np.arange(400) % 5)


def test_stored_results_keep_their_rows_figures_and_intervals():
    stored = sorted(RESULTS.glob("*/metrics.json"))
    assert len(stored) >= 50
    for path in stored:
        for certified in read_run(path.parent).certified:
            f = certified.figures
            largest = largest_radius(f["n"], f["alpha"], f["sigma"])
            acr = average_certified_radius(certified.radius, certified.correct, largest)
            assert len(certified.rows) == f["examples"] and acr.value == f["acr"]
            assert [acr.low, acr.high] == f["acr_interval"]  # today's interval is the stored one, to its last bit
            assert certified_accuracy(certified.radius, certified.correct, 0.0).value == f["certified_accuracy"]["0.00"]
