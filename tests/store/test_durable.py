"""Rows on their way to the disk: what was added some seconds ago survives a power cut."""

import os
from types import SimpleNamespace

from dpcert.store import durable
from dpcert.store.durable import Appender


def test_lines_are_made_durable_every_few_seconds_and_at_the_end(tmp_path, monkeypatch):
    clock, synced = [0.0], []
    monkeypatch.setattr(durable, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    path = tmp_path / "rows"
    path.write_text("old\n")
    with Appender(path, 2.0) as file:
        for now in (1.0, 2.0, 2.5, 3.0, 4.6, 4.7):
            clock[0] = now
            file.add("line")
    assert path.read_text() == "old\n" + 6 * "line\n"
    in_time = [4 + 3 * 5, 4 + 5 * 5]  # more than two seconds after the last time: at 2.5 and 4.6 s
    assert synced == [*in_time, 4 + 6 * 5]
