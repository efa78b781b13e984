"""S6: no released file holds a byte of a key, in any spelling; key files are 0600 and their folder 0700."""

import base64
import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest

import dpcert
from dpcert.cli import main
from dpcert.interrupts import Interrupted
from dpcert.rng import KEY_BYTES, Purpose, stream_bytes
from dpcert.training import lifecycle
from tests.conftest import blobs

WINDOW = 8


def spellings(secret: bytes) -> list[bytes]:
    """Every run of 8 bytes of a secret: raw, reversed, in hex, in base64 at each of its three alignments, as decimal numbers."""
    found: list[bytes] = []
    for start in range(len(secret) - WINDOW + 1):
        part = secret[start : start + WINDOW]
        found += [part, part[::-1], part.hex().encode(), part.hex().upper().encode(), ", ".join(map(str, part)).encode()]
        for shift in range(3):
            whole = base64.b64encode(bytes(shift) + part)
            found.append(whole[-(-8 * shift // 6) : (8 * (shift + WINDOW)) // 6])  # the characters that depend on `part` alone
            found.append(found[-1].replace(b"+", b"-").replace(b"/", b"_"))
        found += [str(int.from_bytes(part, order)).encode() for order in ("big", "little")]
    return found


def holders(secret: bytes, files: list[Path]) -> list[Path]:
    """The files in which a secret, or eight bytes of it, can be found."""
    words = spellings(secret)
    return [file for file in files if any(word in data for data in [file.read_bytes()] for word in words)]


def outside_private(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and "private" not in file.parts]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


@pytest.fixture
def keys(monkeypatch):
    """All run keys that are made, and the keys that are derived from them."""
    made: list[bytes] = []
    real = lifecycle.secret_key

    def spy() -> bytes:
        key = real()
        purposes = (Purpose.LEDGER_MAC, Purpose.DATA_IDENTITY, Purpose.SAMPLING, Purpose.DP_NOISE)
        made.extend([key, *(stream_bytes(key, purpose, KEY_BYTES) for purpose in purposes)])
        return key

    monkeypatch.setattr(lifecycle, "secret_key", spy)
    return made


def test_no_released_file_holds_a_byte_of_a_key(tmp_path, keys, capsys, evidence):
    """A whole run (train, certify, decide, report, predict), looked at half way and at the end."""
    np.savez(tmp_path / "blobs.npz", **blobs(0))
    np.save(tmp_path / "image.npy", blobs(0)["x_test"][0])
    out = tmp_path / "run"
    settings = (
        f"data.path={tmp_path / 'blobs.npz'}",
        "model.name=linear",
        "train.batch_size=10",
        "train.epochs=5",
        "certify.n=200",
    )
    request = [
        "run",
        "mnist/dp-gaussian",
        *(word for s in settings for word in ("--set", s)),
        "--examples",
        "6",
        "--out",
        str(out),
    ]
    stop_after(keys, tmp_path / "half")
    assert call(*request) == 0
    assert call("certify", str(out), "--radius", "0.1", "--n", "300", "--examples", "4") == 0
    assert call("predict", str(out), str(tmp_path / "image.npy"), "--n", "50") == 0
    (tmp_path / "printed").write_text("".join(capsys.readouterr()))
    files = outside_private(tmp_path)
    assert {"ledger.jsonl", "model.safetensors", "metrics.json", "report.html", "printed"} <= {file.name for file in files}
    assert len(keys) == 10 and all(not holders(key, files) for key in keys)
    assert not list((out / "private").iterdir())
    trials = len(keys) * len(files) * len(spellings(keys[0]))
    evidence("S6", figure=f"0 of {len(files)} released files hold 8 bytes of one of {len(keys)} keys, in 13 spellings", trials=trials,
             twin="the key's bytes in hex, base64 or raw in a file: found")  # fmt: skip


def stop_after(keys: list[bytes], out: Path) -> None:
    """A run that is stopped half way and stays so: its key is alive, in private/ and nowhere else."""

    def stop(done: int, total: int, **facts: str) -> None:
        if done == 20:
            signal.raise_signal(signal.SIGTERM)

    data = dpcert.Dataset(**blobs(0), classes=3, size=240)
    with pytest.raises(Interrupted):
        dpcert.train("linear", data, "dpsgd", epochs=5, batch_size=10, out=out, progress=stop)
    assert holders(keys[0], [out / "private" / "key"])
    assert not holders(keys[0], [file for file in (out / "private").iterdir() if file.name != "key"])


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_key_files_are_for_their_owner_only(tmp_path, keys, umask):
    """Whatever the umask, and even if the folder was there before with other rights."""
    out = tmp_path / "run"
    (out / "private").mkdir(parents=True)
    (out / "private").chmod(0o777)
    before, seen = os.umask(umask), set()
    real = os.open

    def spy(path, flags, mode=0o777, **options):
        folder = options.get("dir_fd")  # names are given in the folder that was opened
        if flags & os.O_CREAT and folder is not None and os.path.samestat(os.fstat(folder), (out / "private").stat()):
            seen.add((Path(path).name.split("-")[0].strip("."), stat.S_IMODE(mode)))
        return real(path, flags, mode, **options)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", spy)
            stop_after(keys, out)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (out / "private").iterdir()}
    assert {"key", "state.json"} <= set(modes) and set(modes.values()) == {0o600}
    assert seen and {mode for _, mode in seen} == {0o600}  # from the first moment, not by a chmod afterwards
    assert stat.S_IMODE((out / "private").stat().st_mode) == 0o700


@pytest.mark.parametrize("spelling", range(13))
def test_twin_eight_bytes_of_a_key_are_found(tmp_path, spelling):
    secret = bytes(range(100, 132))
    words = spellings(secret)
    per_window = len(words) // (len(secret) - WINDOW + 1)
    assert per_window == 13
    (tmp_path / "leak").write_bytes(b"abc" + words[7 * per_window + spelling] + b"def")
    assert holders(secret, [tmp_path / "leak"])


def test_twin_base64_of_the_whole_key_is_found_at_every_offset(tmp_path):
    secret = bytes(range(100, 132))
    for shift in range(6):
        (tmp_path / "leak").write_bytes(base64.b64encode(b"x" * shift + secret + b"tail"))
        assert holders(secret, [tmp_path / "leak"])


def test_a_key_is_overwritten_before_its_name_goes(tmp_path, keys):
    """A second name for the same bytes on the disk shows what is left there when the run is over."""
    out, kept = tmp_path / "run", tmp_path / "what is left of the key"
    stop_after(keys, out)
    kept.hardlink_to(out / "private" / "key")
    assert kept.read_bytes() == keys[0]
    data = dpcert.Dataset(**blobs(0), classes=3, size=240)
    dpcert.train("linear", data, "dpsgd", epochs=5, batch_size=10, out=out)
    assert not (out / "private" / "key").exists() and kept.read_bytes() == bytes(KEY_BYTES)


def test_leftovers_of_a_crash_are_gone_with_the_key(tmp_path, keys):
    """A half-written checkpoint or key of an earlier crash does not outlive the run."""
    out = tmp_path / "run"
    stop_after(keys, out)
    for name in (".key.tmp", ".checkpoint-57.safetensors.tmp", "checkpoint-3.safetensors"):
        (out / "private" / name).write_bytes(keys[0])
    data = dpcert.Dataset(**blobs(0), classes=3, size=240)
    dpcert.train("linear", data, "dpsgd", epochs=5, batch_size=10, out=out)
    assert not list((out / "private").iterdir())
