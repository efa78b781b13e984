"""A session on other nodes: the same code, and a folder whose files and locks all nodes share."""

import os
import subprocess
import sys
import time

import pytest

from dpcert.errors import RunError
from dpcert.scale import ray_worker, session
from dpcert.scale.session import code_identity, shared_session, why_not_shared, why_other_code


def test_a_node_that_shares_the_folder_may_work(tmp_path):
    with shared_session(tmp_path / "logs") as name:
        assert why_not_shared(tmp_path / "logs", name, "node a") is None
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_node_without_the_folder_is_refused(tmp_path):
    with shared_session(tmp_path) as name:
        for folder in (tmp_path / "elsewhere", tmp_path.parent):
            why = why_not_shared(folder, name, "node a")
            assert why is not None and why.startswith("node a does not share the results folder: ") and "same path" in why


def test_a_node_with_a_copy_of_the_folder_is_refused(tmp_path):
    """A synchronised copy has the file, but not its lock: two nodes could train into one run directory."""
    with shared_session(tmp_path / "a") as name:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / name).write_text("")
        assert "file locks are not shared" in (why_not_shared(tmp_path / "b", name, "node a") or "")


def test_the_lock_ends_with_the_driver(tmp_path):
    with shared_session(tmp_path) as name:
        (tmp_path / name).rename(tmp_path / "kept")
    assert "file locks are not shared" in (why_not_shared(tmp_path, "kept", "node a") or "")


def test_files_of_killed_sessions_are_removed_and_those_of_others_stay(tmp_path):
    old, new = tmp_path / ".session-old", tmp_path / ".session-new"
    old.write_text(""), new.write_text("")
    os.utime(old, (time.time() - 7200,) * 2)
    with shared_session(tmp_path) as first:
        os.utime(tmp_path / first, (time.time() - 7200,) * 2)
        with shared_session(tmp_path) as second:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".session-new", first, second])


def test_a_folder_that_cannot_be_written_gets_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write .*file.*"), shared_session(tmp_path / "file"):
        pass


def test_a_file_system_without_locks_gets_one_line(tmp_path, monkeypatch):
    import errno
    import fcntl

    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match="cannot be locked: No locks available"), shared_session(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dpcert", "source files of dpcert", "torch", "numpy", "Python"])
def test_other_code_is_refused(name):
    driver = code_identity()
    assert why_other_code(driver, "node a") is None and "+" not in driver["torch"]
    why = why_other_code({**driver, name: "9.9"}, "node a")
    assert why is not None and f"has {name} {driver[name]}, the driver has 9.9" in why
    assert why_other_code({key: value for key, value in driver.items() if key != name}, "node a") is not None


def test_a_changed_source_file_is_other_code(tmp_path, monkeypatch):
    package = tmp_path / "dpcert"
    (package / "scale").mkdir(parents=True)
    (package / "scale" / "session.py").write_text("one")
    monkeypatch.setattr(session, "__file__", str(package / "scale" / "session.py"))
    seen = {code_identity()["source files of dpcert"]}
    (package / "scale" / "session.py").write_text("two")
    seen.add(code_identity()["source files of dpcert"])
    (package / "more.py").write_text("")
    seen.add(code_identity()["source files of dpcert"])
    assert len(seen) == 3


def test_a_worker_of_a_cluster_that_ignores_interrupts_can_be_cancelled():
    """A shell script that starts Ray with & lets its processes ignore SIGINT; Ray cancels a task with that signal."""
    code = """
import _thread, signal, sys, time
from dpcert.scale import ray_worker
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.argv[1] == "accept":
    ray_worker._accept_interrupts()
try:
    _thread.interrupt_main()
    time.sleep(0.2)
except KeyboardInterrupt:
    print("cancelled")
"""
    for how, printed in (("accept", "cancelled\n"), ("ignore", "")):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        assert done.stdout == printed


def test_a_refused_node_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_worker, "Child", None)
    request = {"identity": code_identity(), "folder": str(tmp_path), "session": "none"}
    assert "does not share" in ray_worker.run_task(request)["refused"]
    assert "install the same version" in ray_worker.run_task({**request, "identity": {}})["refused"]
