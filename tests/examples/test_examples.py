"""Every example runs from an empty folder, as a user would start it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SPACES = sorted(EXAMPLES.glob("*.toml"))
EXPECTED = {  # what a user must see at the end
    "custom_data": r"report: runs/custom-data/report\.html",
    "custom_model": r"report: runs/custom-model/report\.html",
    "choose_a_method": r"dp-gaussian +[23]\.\d+ +[\d.]+ % +\d\.\d+",
    "certify_any_classifier": r"average certified radius 0\.[1-9]",
    "check_a_bundle": r"FAILED +certificates-sigma0\.50\.tsv rows",
}


def run_in(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_from_an_empty_folder(script, tmp_path):
    assert re.search(EXPECTED[script.stem], run_in(tmp_path, script))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_in_order(notebook, tmp_path):
    cells = json.loads(notebook.read_text())["cells"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    assert re.search(r"certified accuracy at 0\.25: \d+ %", run_in(tmp_path, script))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def test_the_list_names_every_example():
    listed = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in [*SCRIPTS, *NOTEBOOKS, *SPACES])
    assert {path.stem for path in SCRIPTS} == set(EXPECTED)


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_a_space_can_be_searched_with_the_preset_that_it_names(path):
    from dpcert.runs.resolve import resolve
    from dpcert.tuning.space import read_space

    base = resolve(re.search(r"dpcert tune (\S+)", path.read_text()).group(1), {})
    space = read_space(path, base)
    drawn = [space.apply(base, setting) for setting in space.distinct_draws(bytes(32), 40)]
    assert len(drawn) == 40 and all(config.build_method() and config.model_spec().bare((1, 28, 28), 10) for config in drawn)
