"""The list of mutants cannot rot: each still applies, and each names tests that exist.."""

import ast
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.listed import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
CRITICAL = {
    *(f"privacy/{name}.py" for name in ("clipping", "noise", "sampling", "accounting", "mechanism", "ledger", "statement")),
    *(f"gradients/{name}.py" for name in ("engine", "layerwise", "parts", "sums", "checkpointed", "compiled")),
    *("chains/chain.cpp", "training/step.py", "training/state.py", "losses.py", "views/gaussian.py", "views/smoothadv.py"),
    *("models/noisy.py", "models/systems.py", "operator_norm.py", "training/noise_weights.py"),
    *(
        f"certification/{name}.py"
        for name in ("bounds", "smooth", "votes", "sequence", "metrics", "request", "sweep", "heads", "laws")
    ),
}


def test_the_list_covers_every_critical_file():
    assert len(MUTANTS) >= 28 and {mutant.file for mutant in MUTANTS} >= CRITICAL
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_folder_of_the_sources_has_mutants():
    folders = {file.parent.name for file in (ROOT / "src" / "dpcert").glob("*/*.py") if file.name != "__init__.py"}
    assert folders <= {mutant.file.split("/")[0] for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_still_applies_and_names_tests_that_exist(mutant):
    text = (ROOT / "src" / "dpcert" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1 and mutant.new not in (mutant.old, "")
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))
    for test in mutant.tests:
        file, name = test.split("::")
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name.split("[")[0] in functions, test


def small_project(folder: Path, expected: int) -> None:
    (folder / "src" / "dpcert").mkdir(parents=True)
    (folder / "src" / "dpcert" / "__init__.py").write_text("VALUE = 1\n")
    (folder / "test_value.py").write_text(f"import dpcert\n\n\ndef test_value():\n    assert dpcert.VALUE in (1, {expected})\n")


@pytest.mark.parametrize(("expected", "outcome"), [(1, run.KILLED), (2, run.SURVIVED)])
def test_the_runner_tells_a_kill_from_a_survivor(tmp_path, expected, outcome):
    small_project(tmp_path, expected)
    mutant = Mutant("__init__.py", "VALUE = 1", "VALUE = 2", ("test_value.py::test_value",), "")
    assert run.outcome(tmp_path, mutant) == outcome
    assert (tmp_path / "src" / "dpcert" / "__init__.py").read_text() == "VALUE = 1\n"


def test_the_runner_counts_neither_missing_tests_nor_missing_text_as_kills(tmp_path):
    small_project(tmp_path, 1)
    assert run.outcome(tmp_path, Mutant("__init__.py", "VALUE = 3", "VALUE = 2", ("test_value.py",), "")) == run.NOT_APPLIED
    assert run.outcome(tmp_path, Mutant("__init__.py", "VALUE = 1", "VALUE = 2", ("test_value.py::no",), "")) == run.NOT_RUN
    assert run.outcome(tmp_path, Mutant("__init__.py", "VALUE = 1", "VALUE = (", ("test_value.py",), "")) == run.NOT_RUN
