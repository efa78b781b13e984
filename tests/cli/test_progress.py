"""The speed on a progress bar is that of the work, not of the preparations before it."""

from dpcert.cli import _show


def test_preparations_do_not_count(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(_show.time, "monotonic", lambda: clock[0])
    show = _show._lines("train", "steps")
    for moment, done in ((0, 0), (100, 0), (200, 0), (210, 10), (300, 100)):
        clock[0] = float(moment)
        show(done, 200)
    assert "train 100/200 1 steps/s, 1.7 min left" in capsys.readouterr().err
