"""Without a compiler, with a broken one, or without a usable cache: no error, and nothing half-written is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpcert.chains import build
from dpcert.chains.build import library
from dpcert.chains.chain import SOURCE
from tests.chains import ONE_LAYER, needs_compiler


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._target.cache_clear()
    return tmp_path / "dpcert"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("compiler", ["", "false", "true", "/nowhere/c++", "'unbalanced"])
def test_without_a_working_compiler_there_is_no_library(cache, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    assert library(SOURCE, ONE_LAYER) is None
    assert not cache.exists() or not list(cache.iterdir())


def test_no_compiler_is_installed(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    assert library(SOURCE, ONE_LAYER) is None


def test_a_compiler_that_writes_nonsense(cache, tmp_path, monkeypatch):
    text = 'for last; do :; done; case "$*" in *-dM*) echo macros;; *) echo nonsense > "$last";; esac'
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", text))
    assert library(SOURCE, ONE_LAYER) is None
    assert not list(cache.iterdir())


@needs_compiler
def test_a_source_that_does_not_compile(cache, tmp_path):
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("#error wrong")
    assert library(wrong, ONE_LAYER) is None
    assert not list(cache.iterdir())


@needs_compiler
def test_the_second_time_nothing_is_compiled(cache, monkeypatch):
    assert library(SOURCE, ONE_LAYER) is not None
    (made,) = cache.iterdir()
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail("compiled again"))
    assert library(SOURCE, ONE_LAYER) is not None
    assert made.stat().st_mode & 0o077 in (0, 0o055) and [made] == list(cache.iterdir())


@needs_compiler
def test_another_processor_or_compiler_has_its_own_library(cache, monkeypatch):
    """A home directory that machines share: what is made for one is never loaded on the other."""
    assert library(SOURCE, ONE_LAYER) is not None
    monkeypatch.setattr(build, "_target", lambda compiler: "other instructions")
    assert library(SOURCE, ONE_LAYER) is not None
    assert len(list(cache.iterdir())) == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "text", "folder"])
def test_a_damaged_library_in_the_cache_is_made_again(cache, damage):
    assert library(SOURCE, ONE_LAYER) is not None
    (made,) = cache.iterdir()
    made.unlink()
    if damage == "folder":
        made.mkdir()
    else:
        made.write_text("" if damage == "empty" else "not a library")
    assert library(SOURCE, ONE_LAYER) is not None
    assert damage == "folder" or made.stat().st_size > 1000


@needs_compiler
def test_a_cache_that_others_can_write_is_not_used(cache):
    """They could put their code there."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert library(SOURCE, ONE_LAYER) is not None
    assert not list(cache.iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_made(cache):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file")
    assert library(SOURCE, ONE_LAYER) is not None


@needs_compiler
def test_a_cache_that_cannot_be_written(cache, monkeypatch):
    cache.mkdir()
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != cache and allowed(path, mode))  # root may write everywhere
    assert library(SOURCE, ONE_LAYER) is not None
    assert not list(cache.iterdir())


@needs_compiler
def test_two_processes_at_once(cache):
    code = "import sys\nfrom tests.chains import ONE_LAYER\nfrom dpcert.chains.build import library\n"
    code += "from dpcert.chains.chain import SOURCE\nsys.exit(library(SOURCE, ONE_LAYER) is None)"
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [file.suffix for file in cache.iterdir()] == [".so"]
