"""The ledger: chained, ordered, written before the step; anything odd is refused."""

import json

import pytest

from dpcert.errors import LedgerError
from dpcert.privacy.ledger import Ledger

KEY = bytes(range(32))
FACTS = {"clip_rule": "flat", "noise_multiplier": 1.0, "steps": 250}


def written(path):
    ledger = Ledger(path, KEY)
    ledger.open(FACTS)
    for first, steps in ((0, 100), (100, 100), (200, 50)):
        ledger.authorise(first, steps, 1.0, 0.01)
    ledger.close()
    return ledger


def test_a_ledger_is_read_back(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = written(path)
    for key in (KEY, None):
        again = Ledger.load(path, key)
        assert again.events == ledger.events and again.head == ledger.head
        assert again.is_closed and again.steps_authorised == 250
        assert sum(release.steps for release in again.releases()) == 250


def test_every_changed_byte_is_seen(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path)
    data = path.read_bytes()
    missed = []
    for position in range(0, len(data), 7):
        for bit in (0, 3, 6):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            path.write_bytes(bytes(changed))
            try:
                Ledger.load(path, KEY)
                missed.append((position, bit))
            except LedgerError:
                pass
    assert not missed


def test_without_the_key_all_but_the_macs_are_checked(tmp_path):
    path = tmp_path / "ledger.jsonl"
    written(path)
    line = json.loads(path.read_text().splitlines()[1])
    path.write_text(path.read_text().replace(f'"steps":{line["data"]["steps"]}', '"steps":99'))
    with pytest.raises(LedgerError, match=r"line \d"):
        Ledger.load(path)


def test_a_cut_is_seen_by_the_chain_or_by_the_missing_end(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = written(path)
    lines = path.read_text().splitlines(keepends=True)
    for drop in range(len(lines) - 1):  # a line missing in the middle
        path.write_text("".join(lines[:drop] + lines[drop + 1 :]))
        with pytest.raises(LedgerError):
            Ledger.load(path)
    path.write_text("".join(lines[:-1]))  # at the end: no longer closed, and the checkpoint's head is gone
    shorter = Ledger.load(path)
    assert not shorter.is_closed and not shorter.contains(ledger.head)
    path.write_text("".join(lines)[:-9])
    with pytest.raises(LedgerError, match="truncated"):
        Ledger.load(path)
    path.write_text("")
    with pytest.raises(LedgerError):
        Ledger.load(path)
    path.unlink()
    with pytest.raises(LedgerError, match="missing"):
        Ledger.load(path)


def test_someone_without_the_key_cannot_extend_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, KEY)
    ledger.open(FACTS)
    forged = Ledger.load(path)  # no key
    forged._mac_key = bytes(32)
    forged.authorise(0, 1, 100.0, 0.01)
    Ledger.load(path)  # the chain alone holds
    with pytest.raises(LedgerError, match="HMAC"):
        Ledger.load(path, KEY)


def test_steps_are_authorised_in_order_and_never_after_the_end(tmp_path):
    ledger = Ledger()
    ledger.open(FACTS)
    with pytest.raises(LedgerError, match="in order"):
        ledger.authorise(5, 10, 1.0, 0.01)
    ledger.authorise(0, 10, 1.0, 0.01)
    with pytest.raises(LedgerError, match="in order"):
        ledger.authorise(0, 10, 1.0, 0.01)
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.authorise(10, 1, 1.0, 0.01)


def test_a_failed_write_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, KEY)
    ledger.open(FACTS)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match="No space left"):
        ledger.authorise(0, 10, 1.0, 0.01)
    monkeypatch.undo()
    assert path.read_bytes() == before and ledger.steps_authorised == 0
    ledger.authorise(0, 10, 1.0, 0.01)
    assert Ledger.load(path, KEY).steps_authorised == 10


def test_the_file_holds_no_time_host_or_path(tmp_path):
    first, second = tmp_path / "a" / "ledger.jsonl", tmp_path / "b" / "ledger.jsonl"
    for path in (first, second):
        path.parent.mkdir()
        written(path)
    assert first.read_bytes() == second.read_bytes()
    assert str(tmp_path) not in first.read_text()


def test_a_line_without_an_hmac_is_refused_while_the_key_lives(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger(path, KEY).open(FACTS)
    bare = Ledger.load(path)  # no key: what it appends has no HMAC
    bare.authorise(0, 1, 100.0, 0.01)
    with pytest.raises(LedgerError, match="HMAC"):
        Ledger.load(path, KEY)


@pytest.mark.parametrize("after", ["authorise", "close", "open"])
def test_nothing_follows_the_end(tmp_path, after):
    path = tmp_path / "ledger.jsonl"
    ledger = written(path)
    block = {"first_step": 250, "steps": 1, "noise_multiplier": 1.0, "sampling_probability": 0.01}
    ledger._append(
        {"authorise": {"event": after, **block}, "close": {"event": after, "steps": 250}}.get(
            after, {"event": "open", "format": 1}
        )
    )
    with pytest.raises(LedgerError, match="out of order"):
        Ledger.load(path, KEY)
