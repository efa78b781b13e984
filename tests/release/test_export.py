"""Bundles: the same bytes from the same run, nothing secret in them, nothing hostile read from them."""

import base64
import io
import json
import re
import shutil
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from dpcert.errors import RunError
from dpcert.privacy.ledger import Ledger
from dpcert.release.files import MOST_MEMBERS, bundle_bytes, read_public_files, write_new
from dpcert.release.verify import FAILED, OK, verify
from dpcert.training.lifecycle import _mac_key
from tests.conftest import blobs

from .conftest import SMALL, call, settings
from .test_verify import edit_json


@pytest.fixture(scope="session")
def bundle(finished, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "run.zip"
    assert call("export", finished, path) == 0
    return path


def test_a_bundle_holds_what_the_contract_names_and_verifies(bundle, capsys):
    content = read_public_files(bundle).content
    assert set(content) == {
        "bundle.json",
        "certificates-sigma0.50-simultaneous20.json",
        "certificates-sigma0.50-simultaneous20.tsv",
        "certificates-sigma0.50.json",
        "certificates-sigma0.50.tsv",
        "config.toml",
        "ledger.jsonl",
        "metrics.json",
        "model.safetensors",
        "report.html",
        "robust-sigma0.50-r0.1.json",
        "robust-sigma0.50-r0.1.tsv",
        "statement.txt",
        "training.tsv",
    }
    assert call("verify", bundle) == 0
    out = capsys.readouterr().out
    assert "ok           bundle's list of files: 13 files" in out and "ok           statement.txt" in out
    assert content["statement.txt"].decode().startswith("epsilon = ") and b"is not charged" in content["statement.txt"]
    assert json.loads(content["metrics.json"])["timing"] == {}


def test_the_page_of_a_bundle_speaks_of_what_is_in_it(bundle):
    """The curve is; attacks and per-image metrics are not, and no command of the reader's could make them there."""
    page = read_public_files(bundle).content["report.html"].decode()
    assert 'id="figure-training_epsilon"' in page
    assert "Attack rows are not in this bundle." in page and "Per-image metrics are not in this bundle." in page
    assert "dpcert analyze" not in page and "dpcert attack" not in page


def test_a_damaged_curve_is_not_exported(copied, tmp_path, capsys):
    whole = (copied / "training.tsv").read_text()
    for damaged in (whole[:-9], whole.replace("\t1.0000\t", "\t1.5000\t")):
        (copied / "training.tsv").write_text(damaged)
        assert call("export", copied, tmp_path / "b.zip") == 2
        err = capsys.readouterr().err
        assert "training.tsv" in err and len(err.splitlines()) == 1 and not (tmp_path / "b.zip").exists()


def test_the_same_run_gives_the_same_bytes_wherever_it_is(finished, bundle, tmp_path):
    shutil.copytree(finished, tmp_path / "elsewhere")
    for file in (tmp_path / "elsewhere").iterdir():
        file.touch()
    assert call("export", tmp_path / "elsewhere", tmp_path / "again.zip") == 0
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.namelist() == sorted(archive.namelist())


def test_an_existing_file_is_never_replaced(finished, bundle, tmp_path, capsys):
    before = bundle.read_bytes()
    assert call("export", finished, bundle) == 0
    assert "nothing to do" in capsys.readouterr().out and bundle.read_bytes() == before
    (tmp_path / "mine.zip").write_text("precious")
    for target in (tmp_path / "mine.zip", tmp_path):
        assert call("export", finished, target) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert (tmp_path / "mine.zip").read_text() == "precious"
    with pytest.raises(RunError, match="exists"):
        write_new(tmp_path / "mine.zip", b"other")


@pytest.mark.parametrize("missing", ["model.safetensors", "metrics.json", "ledger.jsonl", "last line", "key"])
def test_an_unfinished_run_is_refused_in_one_line(missing, copied, tmp_path, capsys):
    if missing == "last line":
        lines = (copied / "ledger.jsonl").read_text().splitlines(keepends=True)
        (copied / "ledger.jsonl").write_text("".join(lines[:-1]))
    elif missing == "key":
        (copied / "private" / "key").write_bytes(bytes(32))
    else:
        (copied / missing).unlink()
    assert call("export", copied, tmp_path / "b.zip") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and "is not finished; resume it with: dpcert train" in err
    assert not (tmp_path / "b.zip").exists()


def test_a_run_that_does_not_verify_is_not_exported(copied, tmp_path, capsys):
    edit_json(copied / "metrics.json", lambda metrics: metrics["privacy"].update(epsilon=0.5))
    assert call("export", copied, tmp_path / "b.zip") == 2
    assert "epsilon recomputed" in capsys.readouterr().err and not (tmp_path / "b.zip").exists()


# ------------------------------------------------------------------ nothing secret (S6)


def windows(secret: bytes, size: int = 5):
    return [secret[start : start + size] for start in range(len(secret) - size + 1)]


def leaks(content: bytes, secret: bytes) -> int:
    """How many pieces of five bytes of a secret are in `content`: raw, as hex or in base64."""
    text = content.lower()
    found = sum(piece in content or piece.hex().encode() in text for piece in windows(secret))
    return found + sum(piece in content for piece in windows(base64.b64encode(secret).rstrip(b"="), 8))


def test_released_files_hold_no_byte_of_a_key(made, bundle, evidence):
    run, keys = made
    secrets = [*keys, _mac_key(keys[0])]
    data = bundle.read_bytes()
    assert [leaks(data, secret) for secret in secrets] == [0] * 5
    # in the run directory itself: nothing of the DP key, and the certification keys in the sidecars only, by design
    public = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    assert not any(leaks(content, secret) for content in public.values() for secret in (keys[0], secrets[-1]))
    holders = {name for name, content in public.items() for secret in keys[1:] if leaks(content, secret)}
    assert holders == {name for name in public if name.startswith(("certificates", "robust")) and name.endswith(".json")}
    # the twin: a bundle of the sidecars as they are
    twin = bundle_bytes({**read_public_files(bundle).content, **{name: public[name] for name in holders}})
    assert all(leaks(twin, secret) for secret in keys[1:])
    figure = "0 pieces of 5 bytes of 5 keys in a bundle (raw, hex, base64); the DP key in no file of the run"
    evidence("S6", figure=figure, trials=len(secrets), twin="a bundle of the sidecars as they are: 3 of 3 keys found")


def test_hmacs_stay_at_home_and_the_chain_stays_whole(finished, bundle):
    shared = read_public_files(bundle).content["ledger.jsonl"]
    assert b'"mac"' in (finished / "ledger.jsonl").read_bytes() and b'"mac"' not in shared
    assert Ledger.parse(shared, "shared").head == Ledger.load(finished / "ledger.jsonl").head
    assert Ledger.parse(shared, "shared").events == Ledger.load(finished / "ledger.jsonl").events


def test_no_path_of_the_machine_but_the_one_in_the_config(finished, bundle, capsys):
    folder = str(finished.parent).encode()
    content = read_public_files(bundle).content
    assert {name for name, data in content.items() if folder in data} == {"config.toml", "report.html"}  # it shows the config
    assert str(finished).encode() not in content["report.html"] and b"this bundle" in content["report.html"]
    assert call("export", finished, bundle) == 0
    assert "note: config.toml" in capsys.readouterr().out


def test_held_out_records_are_left_out(tmp_path, capsys):
    np.savez(tmp_path / "blobs.npz", **blobs(0))
    run, file = tmp_path / "run", tmp_path / "run.zip"
    chosen = settings(f"data.path={tmp_path / 'blobs.npz'}", "data.validation=40", *SMALL)
    assert call("train", *chosen, "--out", run) == 0
    for split in ("validation", "test"):
        assert call("certify", run, "--n", 100, "--examples", 5, "--split", split) == 0
    assert call("report", run, "--html", run / "report.html") == 0
    capsys.readouterr()
    assert call("export", run, file) == 0
    out = capsys.readouterr().out
    assert "left out: certificates-validation-sigma0.50.tsv (held-out training records, which epsilon does not cover)" in out
    content = read_public_files(file).content
    assert not any("validation-" in name for name in content)
    metrics = json.loads(content["metrics.json"])
    assert "validation_accuracy" not in metrics and [e["split"] for e in metrics["certification"]] == ["test"]
    for page in (content["report.html"], (run / "report.html").read_bytes()):
        assert b"(validation)" not in page and b"certificates-validation" not in page
    assert b"40 held-out validation records are not covered" in content["statement.txt"]
    assert call("verify", file) == 0 and call("verify", run) == 0


# ------------------------------------------------------------------ nothing hostile (S3)


def member(name, data=b"x", *, compress=zipfile.ZIP_STORED, mode=0o100644):
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.create_system, info.external_attr, info.compress_type = 3, mode << 16, compress
    return info, data


def archive(*members):
    buffer = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(buffer, "w") as file:  # a doubled name is meant
        for info, data in members:
            file.writestr(info, data)
    return buffer.getvalue()


def patched(data, old, new, count=-1):
    assert old in data and len(old) == len(new)
    return data.replace(old, new, count)


def central(data, offset, value):
    """`data` with bytes of the first entry of the central directory replaced."""
    place = data.index(b"PK\x01\x02") + offset
    return data[:place] + value + data[place + len(value) :]


def overlapping():
    """Two entries of the directory point to the same bytes: more is promised than there is."""
    data = archive(member("metrics.json", b"a" * 5000), member("config.toml", b"b"))
    second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    return data[: second + 20] + (5000).to_bytes(4, "little") * 2 + data[second + 28 :]


ONE = archive(member("metrics.json", b"{}" * 50))
HOSTILE = {
    "parent folder": archive(member("../metrics.json")),
    "deep parent": archive(member("a/../../metrics.json")),
    "absolute": archive(member("/etc/passwd")),
    "drive": archive(member("C:\\metrics.json")),
    "backslash": archive(member("..\\metrics.json")),
    "in a folder": archive(member("private/key")),
    "a folder": archive(member("figures/", b"")),
    "unknown name": archive(member("run.py", b"import os")),
    "pickle": archive(member("model.pkl", b"\x80\x04.")),
    "nul in the name": patched(archive(member("metrics.json!.py")), b"json!", b"json\x00"),
    "not ASCII": archive(member("mеtrics.json")),  # a Cyrillic e
    "symbolic link": archive(member("metrics.json", b"/etc/passwd", mode=0o120777)),
    "device": archive(member("metrics.json", b"", mode=0o020666)),
    "zip bomb": archive(member("metrics.json", bytes(10_000_000), compress=zipfile.ZIP_DEFLATED)),
    "bzip2": archive(member("metrics.json", bytes(1000), compress=zipfile.ZIP_BZIP2)),
    "lzma": archive(member("metrics.json", bytes(1000), compress=zipfile.ZIP_LZMA)),
    "twice": archive(member("metrics.json", b"{}"), member("metrics.json", b"[]")),
    "too many": archive(*(member(f"robust-{number}.tsv") for number in range(MOST_MEMBERS + 1))),
    "a lie about the size": central(ONE, 20, (2**31).to_bytes(4, "little") * 2),
    "overlapping": overlapping(),
    "encrypted": central(ONE, 8, b"\x01\x00"),
    "wrong checksum": central(ONE, 16, b"\x00\x00\x00\x00"),
    "changed content": patched(ONE, b"{}" * 50, b"[]" * 50),
    "names differ": patched(ONE, b"metrics.json", b"statement.tx", 1),
    "cut": ONE[:-30],
    "empty": archive(),
}


def test_hostile_members_are_refused_and_nothing_is_unpacked(tmp_path, monkeypatch, evidence):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    accepted = []
    for number, (name, data) in enumerate(HOSTILE.items()):
        path = folder / f"{number}.zip"
        path.write_bytes(data)
        try:
            read_public_files(path)
            accepted.append(name)
        except RunError as error:
            assert "\n" not in str(error)
        path.unlink()
    assert accepted == [] and list(tmp_path.rglob("*")) == [folder]
    honest = folder / "honest.zip"
    honest.write_bytes(ONE)
    assert read_public_files(honest).content == {"metrics.json": b"{}" * 50}  # the twin: the same archive unspoilt is read
    evidence("S3", figure=f"{len(HOSTILE)} of {len(HOSTILE)} hostile bundles refused, 0 files unpacked", trials=len(HOSTILE))


def test_a_member_changed_or_added_later_is_seen(bundle, tmp_path):
    content = dict(read_public_files(bundle).content)
    for change in ({"report.html": b"<p>epsilon = 0.1"}, {"robust-more.tsv": b"x\n"}, {"statement.txt": b"epsilon = 0.1\n"}):
        path = tmp_path / "changed.zip"
        path.write_bytes(bundle_bytes({**content, **change}))
        failed = [check.name for check in verify(read_public_files(path)) if check.outcome == FAILED]
        assert "bundle's list of files" in failed


def test_the_statement_of_an_older_bundle_passes_and_a_better_bound_does_not(bundle):
    """Bundles from before the sentence on membership attacks stay valid; a sentence that promises more than is proved fails."""
    files = read_public_files(bundle)
    text = files.content["statement.txt"].decode()
    sentence = next(line for line in text.splitlines() if "no attack detects" in line)
    shown = re.search(r"more than ([0-9.]+) %", sentence)[1]
    for changed, outcome in (
        (text.replace(f"{sentence}\n", ""), OK),
        (text.replace(shown, f"{float(shown) - 0.01:.2f}"), FAILED),
        (text.replace(sentence, "No bound on membership attacks: the run is not private."), FAILED),
    ):
        checks = verify(replace(files, content={**files.content, "statement.txt": changed.encode()}))
        assert {check.name: check.outcome for check in checks}["statement.txt"] == outcome


@pytest.mark.parametrize("command", ["verify", "export"])
def test_help_teaches(command, capsys):
    assert call(command, "--help") == 0
    assert "Example" in capsys.readouterr().out
