"""R3: bit flips and truncations of every state file. None is loaded silently; what is refused is left as it was.

*Detected* means one of two things: the file is refused with an error that names the remedy, or (rows of certificates and
blocks of the ledger that were cut at their end, as a crash cuts them) the work is done again to the same bytes.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from dpcert.errors import DpcertError
from dpcert.report.tables import read_run
from dpcert.runs import certify as certifying
from dpcert.runs import open as opening
from dpcert.runs.open import open_run
from dpcert.store import records
from dpcert.training import loop, state
from tests.faults import scene
from tests.faults.conftest import Stage
from tests.faults.injector import Fault, Killed, failing

CHECKPOINT = "private/checkpoint-3.safetensors"
SIDECAR = scene.ROWS.replace(".tsv", ".json")
# (what reads it, file): `resume` goes on with a killed training, the others read a finished run.
PLACES = [
    *(("resume", name) for name in ("ledger.jsonl", CHECKPOINT, "private/state.json", "private/key", "config.toml")),
    *(("reload", name) for name in ("ledger.jsonl", "model.safetensors", "config.toml")),
    *(("certify", name) for name in ("ledger.jsonl", "model.safetensors", "config.toml", scene.ROWS, SIDECAR, "metrics.json")),
    *(("report", name) for name in ("config.toml", "metrics.json", scene.ROWS, SIDECAR, "ledger.jsonl", "model.safetensors")),
]


@pytest.fixture
def killed(stage) -> Path:
    """Killed in its second block: the checkpoint stands at step 3, steps 3 to 5 are charged."""
    out = stage.folder / "killed"
    with failing(Fault("replace", 9, "kill after")), pytest.raises(Killed):
        scene.train(stage.data, out)
    assert json.loads((out / "private/state.json").read_text())["step"] == 3
    return out


def reader(stage: Stage, how: str) -> Callable[[Path], object]:
    request = certifying.request_of(scene.config(stage.data))
    return {
        "resume": lambda out: scene.train(stage.data, out),
        "reload": lambda out: scene.train(stage.data, out),
        "certify": lambda out: certifying.certify(open_run(out), request),
        "report": read_run,
    }[how]


@dataclass
class Count:
    tried: int = 0
    refused: int = 0
    done_again: int = 0
    silent: list[str] = field(default_factory=list)


def flips(data: bytes, count: int, seed: int) -> list[bytes]:
    found = []
    for bit in np.random.default_rng(seed).integers(0, 8 * len(data), count):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        found.append(bytes(changed))
    return found


def cuts(data: bytes, count: int, seed: int) -> list[bytes]:
    """At random lengths, and at each end of a line: where nothing looks torn."""
    random = np.random.default_rng(seed).integers(0, len(data), count).tolist()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")][:-1]
    return [data[:length] for length in [*random, *ends[:count]]]


def snapshot(out: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}


def damage(stage: Stage, source: Path, how: str, name: str, kind: str, count: int) -> Count:
    """Damage `name` again and again in a copy of `source`; each time read it as `how` does."""
    seen, out, seed = Count(), stage.folder / "damaged", PLACES.index((how, name))
    expected, read = scene.results(stage.folder / ("trained" if how == "resume" else "certified")), reader(stage, how)
    original = (source / name).read_bytes()
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    for data in (flips if kind == "flip" else cuts)(original, count, seed):
        (out / name).write_bytes(data)
        before = snapshot(out)
        seen.tried += 1
        try:
            with failing():
                read(out)
        except DpcertError as error:
            assert "\n" not in str(error) and snapshot(out) == before
            seen.refused += 1
        else:
            if _may_be_done_again(how, name, kind, data, original) and scene.results(out) == expected:
                seen.done_again += 1
            else:
                seen.silent.append(f"{how} {name}: {kind}, {len(data)} of {len(original)} bytes")
            shutil.rmtree(out)
            shutil.copytree(source, out)
        (out / name).write_bytes(original)
    return seen


def _may_be_done_again(how: str, name: str, kind: str, data: bytes, original: bytes) -> bool:
    if how == "certify" and name == scene.ROWS:  # a torn last line is dropped: a cut, or a flip of the very last byte
        return kind == "cut" or data[:-1] == original[:-1]
    return how == "resume" and name == "ledger.jsonl" and kind == "cut" and data.endswith(b"\n")


def damage_all(stage: Stage, killed: Path, kind: str, count: int) -> dict[str, Count]:
    found = {}
    for how, name in PLACES:
        source = killed if how == "resume" else stage.folder / "certified"
        found[f"{how} {name}"] = damage(stage, source, how, name, kind, count)
    return found


def report_damage(found: dict[str, Count], kind: str, evidence) -> None:
    assert [line for count in found.values() for line in count.silent] == []
    tried, again = sum(c.tried for c in found.values()), sum(c.done_again for c in found.values())
    assert sum(count.refused for count in found.values()) + again == tried
    word = "bit flips" if kind == "flip" else "truncations"
    each = min(count.tried for count in found.values())
    figure = f"0 of {tried} {word} loaded ({len(found)} file and reader pairs, >= {each} each; {again} done again)"
    evidence("R3", figure=figure, trials=tried, twin="readers without their check: caught")


@pytest.mark.parametrize(("kind", "count"), [("flip", 20), ("cut", 5)])
def test_damage_is_never_loaded_silently(stage, killed, kind, count, evidence):
    report_damage(damage_all(stage, killed, kind, count), kind, evidence)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("how", "name"), PLACES)
def test_a_thousand_flips_and_two_hundred_cuts_of_every_file(stage, killed, how, name, evidence):
    """1,000 flips and 200 cuts of each file. About half a minute of one core for each pair; false alarms: none possible."""
    source = killed if how == "resume" else stage.folder / "certified"
    for kind, count in (("flip", 1000), ("cut", 200)):
        report_damage({f"{how} {name}": damage(stage, source, how, name, kind, count)}, kind, evidence)


def _unchecked_model(path):
    with safe_open(path, framework="pt") as file:
        return state.load_tensors(path), dict(file.metadata())


def _unchecked_row(kind, line):
    return kind.from_fields(line.split("\t")[:-1])


def _unchecked_state(path):
    return json.loads(path.read_text())


def _unchecked_metrics(path):
    metrics = json.loads(path.read_bytes())
    metrics.pop("check", None)
    return metrics


_real_load_tensors = state.load_tensors
TWINS = [
    ("reload", "model.safetensors", loop, "read_model", _unchecked_model),  # as it was: found by this test
    ("resume", CHECKPOINT, state, "load_tensors", lambda path, sha256=None: _real_load_tensors(path)),
    ("resume", "private/state.json", state, "_read_state", _unchecked_state),
    ("resume", "config.toml", loop, "_refuse_other_origin", lambda *arguments: None),
    ("certify", "ledger.jsonl", opening, "require_made_with", lambda *arguments: None),
    ("certify", scene.ROWS, records, "row_of", _unchecked_row),
    ("certify", "metrics.json", certifying, "read_metrics", _unchecked_metrics),
]


@pytest.mark.parametrize(("how", "name", "module", "function", "careless"), TWINS)
def test_twin_a_reader_without_its_check_is_caught(stage, killed, monkeypatch, how, name, module, function, careless):
    monkeypatch.setattr(module, function, careless)
    source = killed if how == "resume" else stage.folder / "certified"
    with failing():
        reader(stage, how)(shutil.copytree(source, stage.folder / "unharmed"))  # the twin reads what is in order
    caught = False
    try:
        caught = bool(damage(stage, source, how, name, "flip", 600 if name == "config.toml" else 150).silent)
    except Exception:  # nonsense that got far enough to break something else
        caught = True
    assert caught


def test_a_finished_run_without_its_ledger_is_not_trained_again(stage):
    """It would be a second release of the same records, charged once."""
    out = stage.folder / "certified"
    (out / "ledger.jsonl").unlink()
    before = snapshot(out)
    with pytest.raises(DpcertError, match="no ledger"):
        scene.train(stage.data, out)
    assert snapshot(out) == before


def test_damaged_metrics_are_made_again(stage):
    """The remedy that the error names: metrics follow from model, ledger and rows."""
    out = stage.folder / "certified"
    (out / "metrics.json").unlink()
    with pytest.raises(DpcertError, match="no metrics.json"):
        certifying.certify(open_run(out), certifying.request_of(scene.config(stage.data)))
    scene.train(stage.data, out)
    scene.certify(stage.data, out)
    assert scene.results(out) == stage.certified


def test_older_files_are_read(stage):
    """metrics.json without a checksum, a model without the ledger's digest (as in results/): read, not taken for damaged."""
    runs = sorted((Path(__file__).parents[2] / "results").glob("*/config.toml"))  # beside them: figures, logs
    assert runs
    for config in runs:
        read_run(config.parent)
    out = stage.folder / "certified"
    metrics = json.loads((out / "metrics.json").read_text())
    for name in ("check", "config_sha256"):
        metrics.pop(name)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2))
    assert read_run(out).metrics == metrics
    weights, facts = state.read_model(out / "model.safetensors")
    assert weights and facts.pop("ledger_sha256")
    ledger = loop.Ledger.load(out / "ledger.jsonl")
    state.require_made_with(loop.RunDirectory(out), facts, ledger, facts["config_sha256"])
