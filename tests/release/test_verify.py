"""An outsider's check: it passes what is honest, and each forgery fails the check that names it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpcert.errors import VerifyError
from dpcert.privacy.ledger import Ledger
from dpcert.privacy.statement import state
from dpcert.release.files import PublicFiles, read_public_files
from dpcert.release.verify import FAILED, NOT_CHECKED, OK, Evidence, _covers, require_verified, verify
from dpcert.store.durable import canonical_json, sha256_hex
from dpcert.store.records import CertificateRow, CurveRow, header, read_rows, text_of
from dpcert.training.curve import spent
from dpcert.training.state import model_bytes, parse_model

from .conftest import call

RESULTS = Path(__file__).parents[2] / "results"
PLAIN, JOINT = "certificates-sigma0.50", "certificates-sigma0.50-simultaneous20"


def outcomes(path):
    return {check.name: check.outcome for check in verify(read_public_files(path))}


def failures(path):
    return [name for name, outcome in outcomes(path).items() if outcome == FAILED]


def test_an_honest_run_passes_and_says_what_was_not_checked(finished, capsys):
    assert call("verify", finished) == 0
    out = capsys.readouterr().out
    assert "FAILED" not in out and " 0 failed, " in out
    for words in (
        "ledger chain",
        "epsilon recomputed: epsilon = ",
        f"{JOINT}.tsv rows: 20 radii",
        "model against ledger",
        "training curve: steps",
    ):
        assert f"ok           {words}" in out
    for words in ("HMACs", "noise was secret", "data were what", "tuning", "votes", "accuracies and gradient norms"):
        assert any(words in line for line in out.splitlines() if line.startswith("not checked")), words


def committed(name):
    found = outcomes(RESULTS / name)
    return FAILED not in found.values() and found["model content"] == OK and found["certificates"] == OK


def test_a_committed_result_passes():
    assert committed("mnist-dp-gaussian")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.parent.name for file in RESULTS.glob("*/metrics.json")))
def test_every_committed_result_passes(name):
    assert committed(name)


def test_rows_without_their_weights_pass_as_far_as_they_go():
    found = outcomes(Path(__file__).parents[1] / "stored_runs" / "fashion-mnist-dp-gaussian")
    assert FAILED not in found.values() and found["model content"] == NOT_CHECKED


# ------------------------------------------------------------------ forgeries, each as consistent as its maker could make it


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    if "check" in value:
        value.pop("check")
        value["check"] = sha256_hex(canonical_json(value).encode())
    path.write_text(json.dumps(value, indent=2) + "\n")


def edit_rows(path, change):
    rows = [change(row) for row in read_rows(CertificateRow, path)]
    path.write_text("\n".join([header(CertificateRow), *(text_of(row) for row in rows if row is not None)]) + "\n")


def edit_curve(run, change):
    """Other points of the training curve; `change` gets the list of rows."""
    rows = change(read_rows(CurveRow, run / "training.tsv"))
    (run / "training.tsv").write_text("\n".join([header(CurveRow), *map(text_of, rows)]) + "\n")


def spend(factor, place):
    """A point that is said to have cost `factor` times as much."""

    def change(rows):
        rows[place] = replace(rows[place], epsilon=rows[place].epsilon * factor)
        return rows

    return lambda run: edit_curve(run, change)


def edit_row(run, name, **changes):
    def change(row):
        return row if row.idx else CertificateRow(**{**vars(row), **changes})

    edit_rows(run / f"{name}.tsv", change)


def edit_model(run, weights=None, facts=None):
    """Other weights or facts, with a content hash that fits them."""
    tensors, stated = parse_model((run / "model.safetensors").read_bytes(), "model")
    if weights:
        weights(tensors)
    (run / "model.safetensors").write_bytes(
        model_bytes(SimpleNamespace(state_dict=lambda: tensors), {**stated, **(facts or {})})
    )


def adopt_model(run):
    """Let the sidecars name the model that is there now."""
    for path in run.glob("*-sigma*.json"):
        edit_json(path, lambda v: v.update(model_sha256=sha256_hex((run / "model.safetensors").read_bytes())))


def new_chain(run, change_open=None, change_block=None, head_in_model=False):
    """A whole ledger, hashed anew, with other events."""
    events = [json.loads(line)["data"] for line in (run / "ledger.jsonl").read_text().splitlines()]
    (run / "ledger.jsonl").unlink()
    ledger = Ledger(run / "ledger.jsonl")
    for event in events:
        if event["event"] == "open":
            (change_open or (lambda e: None))(event)
        elif event["event"] == "authorise":
            (change_block or (lambda e: None))(event)
        ledger._append(event)
    if head_in_model:
        edit_model(run, facts={"ledger_head": ledger.head, "ledger_sha256": ledger.sha256})
        adopt_model(run)
    return ledger


def privacy(**changes):
    return lambda metrics: metrics["privacy"].update(changes)


def entry_of(metrics, name):
    return next(entry for entry in metrics["certification"] if entry["file"] == f"{name}.tsv")


def cut_ledger(run):
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:-1]))


def flip(run, name, place):
    data = bytearray((run / name).read_bytes())
    data[place] ^= 1
    (run / name).write_bytes(bytes(data))


def larger_noise(event):
    event["noise_multiplier"] = event["noise_multiplier"] * 2


def more_epsilon(run):
    """Everything tells of twice the noise and the epsilon that would go with it; only the config's budget cannot be met."""
    ledger = new_chain(run, larger_noise, larger_noise, head_in_model=True)
    statement = state(ledger)
    edit_json(run / "metrics.json", lambda m: m.update(privacy=statement.as_metrics()))
    short = {"epsilon": repr(statement.epsilon), "privacy": statement.short}
    edit_model(run, facts={**short, "statement": canonical_json(statement.as_metrics())})
    adopt_model(run)
    edit_curve(run, lambda rows: [replace(row, epsilon=spent(row.step, statement)) for row in rows])


def hidden_seed(run):
    """The noise seed stood in the config, and the ledger says that the noise was secret."""
    text = (run / "config.toml").read_text().replace("[privacy]\n", "[privacy]\nnoise_seed = 7\n")
    (run / "config.toml").write_text(text)
    edit_model(run, facts={"config_sha256": sha256_hex(text.encode())})
    adopt_model(run)


def relabel(run, source, alpha_is):
    """Certificates of one kind said to be of the other."""

    def change(facts):
        facts["alpha_is"] = alpha_is
        if alpha_is == "simultaneous":
            facts.update(together=20, alpha_each=facts["alpha"] / 20)
        else:
            facts.pop("together"), facts.pop("alpha_each")

    edit_json(run / f"{source}.json", change)
    edit_json(run / "metrics.json", lambda m: change(entry_of(m, source)))


def count_only(run):
    row = next(row for row in read_rows(CertificateRow, run / f"{PLAIN}.tsv") if row.idx == 0)
    edit_row(run, PLAIN, count=row.count - 1)


FORGERIES = {
    "an edited line of the ledger": (
        lambda run: (run / "ledger.jsonl").write_text(
            (run / "ledger.jsonl").read_text().replace('"noise_multiplier":', '"noise_multiplier":1', 1)
        ),
        "ledger chain",
    ),
    "no ledger": (lambda run: (run / "ledger.jsonl").unlink(), "ledger chain"),
    "a ledger without its last line": (cut_ledger, "ledger closed"),
    "the key lies beside the run": (
        lambda run: ((run / "private").mkdir(exist_ok=True), (run / "private" / "key").write_bytes(bytes(32))),
        "ledger closed",
    ),
    "a new chain with more noise in its plan": (lambda run: new_chain(run, larger_noise), "ledger against its plan"),
    "a new chain with more noise": (lambda run: new_chain(run, larger_noise, larger_noise), "model against ledger"),
    "the same, named by the model": (
        lambda run: new_chain(run, larger_noise, larger_noise, head_in_model=True),
        "epsilon recomputed",
    ),
    "a smaller batch than the plan's q": (lambda run: new_chain(run, lambda e: e.update(batch_size=9)), "ledger against its plan"),
    "another divisor than the batch size": (lambda run: new_chain(run, lambda e: e.update(divisor=9)), "ledger against its plan"),
    "another delta": (lambda run: new_chain(run, lambda e: e.update(delta=1e-3)), "ledger against config"),
    "another number of records in the config": (
        lambda run: (run / "config.toml").write_text((run / "config.toml").read_text().replace("[data]\n", "[data]\nsize = 1000\n")),
        "ledger against config",
    ),
    "held-out records that the config does not name": (
        lambda run: new_chain(run, lambda e: e.update(held_out=5)),
        "ledger against config",
    ),
    "a noise seed kept quiet": (hidden_seed, "ledger against config"),
    "a smaller epsilon in metrics": (
        lambda run: edit_json(run / "metrics.json", privacy(epsilon=1.0)),
        "epsilon recomputed",
    ),
    "a smaller delta in metrics": (lambda run: edit_json(run / "metrics.json", privacy(delta=1e-9)), "epsilon recomputed"),
    "another relation in metrics": (
        lambda run: edit_json(run / "metrics.json", privacy(relation="replace-one")),
        "epsilon recomputed",
    ),
    "no conditions in metrics": (lambda run: edit_json(run / "metrics.json", privacy(conditions=[])), "epsilon recomputed"),
    "tuning said to be charged": (lambda run: edit_json(run / "metrics.json", privacy(tuning="charged")), "epsilon recomputed"),
    "epsilon left out": (lambda run: edit_json(run / "metrics.json", lambda m: m["privacy"].pop("epsilon")), "epsilon recomputed"),
    "true for epsilon": (lambda run: edit_json(run / "metrics.json", privacy(epsilon=True)), "epsilon recomputed"),
    "a flipped bit of the weights": (lambda run: flip(run, "model.safetensors", -5), "model content"),
    "a flipped bit of the header": (lambda run: flip(run, "model.safetensors", 60), "model content"),
    "other weights": (lambda run: edit_model(run, weights=lambda t: next(iter(t.values())).add_(1.0)), f"{PLAIN}.tsv belongs to the model"),
    "another epsilon in the header": (lambda run: edit_model(run, facts={"epsilon": "1.0"}), "model against epsilon"),
    "a smaller delta in the header": (lambda run: edit_model(run, facts={"delta": "1e-09"}), "model against epsilon"),
    "another statement in the header": (
        lambda run: edit_model(run, facts={"statement": canonical_json({"epsilon": 1.0, "delta": 1e-5})}),
        "model against epsilon",
    ),
    "an edited config": (
        lambda run: (run / "config.toml").write_text((run / "config.toml").read_text().replace("momentum = 0.9", "momentum = 0.8")),
        "model against config",
    ),
    "a larger radius": (lambda run: edit_row(run, PLAIN, radius=3.0), f"{PLAIN}.tsv rows"),
    "a radius larger by its last digit": (
        lambda run: edit_rows(run / f"{PLAIN}.tsv", lambda r: CertificateRow(**{**vars(r), "radius": r.radius + 2e-6})),
        f"{PLAIN}.tsv rows",
    ),
    "another count": (count_only, f"{PLAIN}.tsv rows"),
    "more votes than were cast": (lambda run: edit_row(run, PLAIN, count=201), f"{PLAIN}.tsv rows"),
    "a wrong answer said to be right": (lambda run: edit_row(run, PLAIN, label=2, predict=1, correct=1), f"{PLAIN}.tsv rows"),
    "an edited row without its checksum": (
        lambda run: (run / f"{PLAIN}.tsv").write_text((run / f"{PLAIN}.tsv").read_text().replace("\t200\t", "\t201\t", 1)),
        f"{PLAIN}.tsv rows",
    ),
    "a row left out": (lambda run: edit_rows(run / f"{PLAIN}.tsv", lambda r: r if r.idx else None), f"{PLAIN}.tsv figures"),
    "no rows": (lambda run: (run / f"{PLAIN}.tsv").unlink(), f"{PLAIN}.tsv rows"),
    "a larger ACR": (
        lambda run: edit_json(run / "metrics.json", lambda m: entry_of(m, PLAIN).update(acr=entry_of(m, PLAIN)["acr"] + 1e-4)),
        f"{PLAIN}.tsv figures",
    ),
    "a larger certified accuracy": (
        lambda run: edit_json(run / "metrics.json", lambda m: entry_of(m, PLAIN)["certified_accuracy"].update({"1.00": 1.0})),
        f"{PLAIN}.tsv figures",
    ),
    "fewer abstentions": (
        lambda run: edit_json(run / "metrics.json", lambda m: entry_of(m, PLAIN).update(abstained=-1)),
        f"{PLAIN}.tsv figures",
    ),
    "a larger sigma": (
        lambda run: edit_json(run / "metrics.json", lambda m: entry_of(m, PLAIN).update(sigma=1.0)),
        f"{PLAIN}.tsv belongs to the model",
    ),
    "an edited sidecar": (
        lambda run: (run / f"{PLAIN}.json").write_text((run / f"{PLAIN}.json").read_text().replace("0.001", "0.002")),
        f"{PLAIN}.tsv belongs to the model",
    ),
    "per input said to be simultaneous": (lambda run: relabel(run, PLAIN, "simultaneous"), f"{PLAIN}.tsv rows"),
    "simultaneous said to be per input": (lambda run: relabel(run, JOINT, "per input"), f"{JOINT}.tsv rows"),
    "a smaller epsilon on the way": (spend(0.999, 0), "training curve"),
    "a smaller epsilon at the end": (spend(0.999, -1), "training curve"),
    "a larger epsilon on the way": (spend(1.02, 1), "training curve"),
    "no privacy on the way": (spend(float("inf"), 0), "training curve"),
    "a curve without its end": (lambda run: edit_curve(run, lambda rows: rows[:-1]), "training curve"),
    "a curve with more steps": (
        lambda run: edit_curve(run, lambda rows: [*rows, replace(rows[-1], step=rows[-1].step + 1)]),
        "training curve",
    ),
    "a curve of other epochs": (
        lambda run: edit_curve(run, lambda rows: [replace(row, epoch=2 * row.epoch) for row in rows]),
        "training curve",
    ),
    "a curve of no points": (lambda run: edit_curve(run, lambda rows: []), "training curve"),
    "an edited point without its checksum": (
        lambda run: (run / "training.tsv").write_text((run / "training.tsv").read_text().replace("\t1.0000\t", "\t1.0001\t")),
        "training curve",
    ),
    "a certification twice": (
        lambda run: edit_json(run / "metrics.json", lambda m: m["certification"].append(m["certification"][0])),
        "certificates",
    ),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_fails_the_check_that_names_it(forgery, copied, capsys):
    forge, name = FORGERIES[forgery]
    forge(copied)
    assert call("verify", copied) == 2
    shown = capsys.readouterr()
    assert f"FAILED       {name}: " in shown.out and "Traceback" not in shown.err
    assert shown.err.startswith("error: ") and len(shown.err.splitlines()) == 1 and name in shown.err


def test_a_forgery_that_agrees_with_itself_throughout_is_out_of_reach_and_is_said_to_be(copied, capsys):
    """The honest limit: whoever rewrites every file consistently passes; the list of what is not checked says so."""
    more_epsilon(copied)
    assert failures(copied) == []
    assert call("verify", copied) == 0
    assert "not checked  that these steps were what ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({}, OK), ({"radius": 0.3}, FAILED), ({"p_lower": 0.9}, FAILED), ({"label": 1, "correct": 1}, FAILED)],
    ids=["nothing", "a radius", "a bound", "a right answer"],
)
def test_a_row_whose_votes_were_not_cast_claims_nothing(changes, outcome, copied):
    """Rows of certify --skip-misclassified: a wrong class, and neither count, bound nor radius."""
    edit_json(copied / "metrics.json", lambda m: entry_of(m, PLAIN).update(skip_misclassified=True))
    edit_row(copied, PLAIN, **{"label": 2, "predict": 1, "correct": 0, "count": None, "radius": 0.0, "p_lower": 0.0, **changes})
    assert outcomes(copied)[f"{PLAIN}.tsv rows"] == outcome


def test_a_run_that_is_not_private_has_no_finite_epsilon_on_its_curve(finished):
    """The statement of such a run with the same rows: infinite ones pass, a finite one does not."""
    rows = read_rows(CurveRow, finished / "training.tsv")
    private = Evidence(read_public_files(finished)).statement
    assert all(_covers(row, private) for row in rows)
    nothing = replace(private, private=False, epsilon=float("inf"))
    assert not any(_covers(row, nothing) for row in rows)
    assert all(_covers(replace(row, epsilon=float("inf")), nothing) for row in rows)


def test_a_run_without_a_curve_is_not_blamed_for_it(copied):
    (copied / "training.tsv").unlink()
    assert outcomes(copied)["training curve"] == NOT_CHECKED and failures(copied) == []


def test_an_interrupted_sweep_claims_nothing(copied, tmp_path):
    for name in ("certificates-sigma0.70", "robust-sigma0.50-r0.2"):
        (copied / f"{name}.tsv").write_text("idx\tlabel\tpre")
    found = outcomes(copied)
    assert FAILED not in found.values()
    assert (
        found["certificates-sigma0.70.tsv belongs to the model"]
        == NOT_CHECKED
        == found["robust-sigma0.50-r0.2.tsv belongs to the model"]
    )
    assert call("export", copied, tmp_path / "b.zip") == 0
    assert not {"certificates-sigma0.70.tsv", "robust-sigma0.50-r0.2.tsv"} & set(read_public_files(tmp_path / "b.zip").content)


def test_answers_at_a_radius_must_be_of_this_model(copied):
    edit_json(copied / "robust-sigma0.50-r0.1.json", lambda facts: facts.update(model_sha256="0" * 64))
    assert failures(copied) == ["robust-sigma0.50-r0.1.tsv belongs to the model"]


def test_an_unfinished_run_does_not_verify(copied, capsys):
    for name in ("model.safetensors", "metrics.json"):
        (copied / name).unlink()
    cut_ledger(copied)
    assert call("verify", copied) == 2
    assert "not finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "value", ["[]", "null", "{", "[" * 100_000, '{"privacy": 3, "certification": 7}', '{"a": NaN}', "\udcff"]
)
def test_files_of_any_form_are_a_failed_check_and_never_a_crash(value, copied, capsys):
    (copied / "metrics.json").write_bytes(value.encode("utf-8", "surrogateescape"))
    assert "epsilon recomputed" in failures(copied)
    shutil.copy(copied / "metrics.json", copied / f"{PLAIN}.json")
    assert call("verify", copied) == 2 and "Traceback" not in capsys.readouterr().err


def test_a_ledger_made_to_keep_the_accountant_busy_is_refused_at_once(copied):
    for noise, steps in ((0.06, 10**6), (1.0, 10**15)):
        ledger = Ledger()
        opening = dict(Ledger.load(copied / "ledger.jsonl").opening)
        del opening["event"], opening["format"]
        ledger.open({**opening, "noise_multiplier": noise})
        ledger.authorise(0, steps, noise, opening["sampling_probability"])
        ledger.close()
        (copied / "ledger.jsonl").write_bytes(ledger.without_macs())
        assert "epsilon recomputed" in failures(copied)


def test_what_is_no_run_gets_one_line(tmp_path, capsys):
    (tmp_path / "text.zip").write_text("not a bundle")
    for path, word in (
        (tmp_path, "not a run directory"),
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "text.zip", "text.zip"),
    ):
        assert call("verify", path) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and word in err and len(err.splitlines()) == 1


def test_a_failure_is_raised_by_name(finished):
    files = read_public_files(finished)
    spoilt = PublicFiles(files.origin, {**files.content, "config.toml": b""}, is_bundle=False)
    with pytest.raises(VerifyError, match="model against config"):
        require_verified(spoilt, verify(spoilt))
