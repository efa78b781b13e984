"""Names of files, of row files and of targets exist once in the sources: whoever changes one changes it everywhere."""

import ast
from collections import Counter

import pytest

from dpcert.paper import targets
from dpcert.store import runs

from .test_imports import FILES, SOURCE, name_of

FILE_NAMES = [value for name, value in vars(runs).items() if name.isupper() and isinstance(value, str) and "." in value]
TARGET_NAMES = [
    value
    for name, value in vars(targets).items()
    if name.isupper() and isinstance(value, str) and value not in (targets.ALL, targets.LOGS)
]


def texts(path) -> list[str]:
    """The string literals of a file, parts of f-strings included, docstrings not."""
    tree = ast.parse(path.read_text())
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    docstrings = {id(owner.body[0].value) for owner in owners if owner.body and isinstance(owner.body[0], ast.Expr)}
    literals = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    return [node.value for node in literals if isinstance(node.value, str)]


TEXTS = {name_of(path): texts(path) for path in FILES}


def test_the_names_of_the_contract_are_looked_for():
    contract = {"config.toml", "model.safetensors", "ledger.jsonl", "metrics.json", "samples.tsv", "attacks.tsv", "report.html"}
    assert set(FILE_NAMES) >= contract and len(TARGET_NAMES) == 16


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_file_of_a_run_is_named_once(name):
    found = Counter({file: found.count(name) for file, found in TEXTS.items() if name in found})
    assert found == {"store/runs": 1}


@pytest.mark.parametrize("begin", [f"{runs.CERTIFICATES}-", f"{runs.ROBUST}-"])
def test_names_of_row_files_are_made_in_one_place(begin):
    assert [file for file, found in TEXTS.items() if any(begin in text for text in found)] == []


@pytest.mark.parametrize("begin", ["table1", "figure-", "ablation-"])
def test_targets_are_named_in_one_file(begin):
    found = {file: [text for text in found if text.startswith(begin)] for file, found in TEXTS.items()}
    assert {file for file, names in found.items() if names} == {"paper/targets"}
    assert max(Counter(found["paper/targets"]).values()) == 1


def test_every_target_is_run_and_shown():
    """The grid knows each name, and what draws or judges asks for no other."""
    from dpcert.paper.claims import CLAIMS, SWEEPS
    from dpcert.paper.figures import FIGURES
    from dpcert.paper.grid import TARGETS
    from dpcert.paper.sample_claims import SAMPLE_CLAIMS

    assert sorted(TARGETS) == sorted(TARGET_NAMES)
    shown = {targets.TABLE_1, targets.PRIOR, *SWEEPS, *FIGURES}
    assert shown == set(TARGETS) and {claim.target for claim in (*CLAIMS, *SAMPLE_CLAIMS)} <= shown


def test_twin_a_second_name_is_seen(tmp_path):
    file = tmp_path / "second.py"
    file.write_text('"""config.toml in a docstring is prose."""\nPLACE = "config.toml"\nOTHER = f"figure-{PLACE}"\n')
    assert texts(file) == ["config.toml", "figure-"] and SOURCE.is_dir()
