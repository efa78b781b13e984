"""The README's figures come from stored files, its output from the command it shows, its links lead somewhere."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from dpcert.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
sys.path.insert(0, str(ROOT / "scripts"))

import demo  # noqa: E402
import readme_figure  # noqa: E402


def test_the_output_shown_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["report", "results/mnist-dp-gaussian"])
    assert f"$ .venv/bin/dpcert report results/mnist-dp-gaussian\n{capsys.readouterr().out}```" in README


@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("sigma", ["0.25", "0.5", "1.0"])
def test_the_table_holds_the_stored_figures(dataset, sigma):
    suffix = {"0.25": "-sigma0.25", "0.5": "", "1.0": "-sigma1.00"}[sigma]
    stored = json.loads((ROOT / "results" / f"{dataset}-dp-gaussian{suffix}" / "metrics.json").read_text())
    certified = next(row for row in stored["certification"] if row["sigma"] == float(sigma))
    low, high = certified["acr_interval"]
    table = re.findall(r"(?m)^\|.*", README.split("\n## Results\n")[1].split("\n## ")[0])
    rows = table[2:5] if dataset == "mnist" else table[5:8]
    row = next(line for line in rows if f"| {sigma} |" in line)
    assert certified["examples"] == 1000
    assert f"| {100 * stored['clean_accuracy']:.2f} % " in row
    assert f"| {certified['acr']:.3f} ({low:.3f} to {high:.3f}) " in row
    assert f"| {100 * certified['certified_accuracy']['0.25']:.1f} % " in row


def test_the_picture_is_drawn_from_the_rows_that_are_stored():
    assert Image.open(readme_figure.FIGURE).text["Rows"] == readme_figure.digest_of_rows(), "python scripts/readme_figure.py"


def test_the_python_of_readme_and_docs_parses():
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
        generated = link.endswith("reference/commands.md") or link == "commands.md"
        assert "://" in link or generated or (page.parent / link).exists(), link


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"(?m)^{target}:.*##", makefile), target


def test_the_demo_leaves_a_run_directory_alone(tmp_path):
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(SystemExit, match="is a run directory, must be free for the demo"):
        demo.main(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


@pytest.mark.slow
def test_the_demo_tells_its_story_and_changes_no_result(tmp_path):
    before = {path: path.read_bytes() for path in demo.STORED.iterdir()}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", tmp_path / "demo"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    report = tmp_path / "demo" / "mnist-dp-gaussian" / "report.html"
    assert f"report: {report}" in done.stdout and report.exists()
    assert "of 20 abstained" in done.stdout and "certified radius" in done.stdout
    assert {path: path.read_bytes() for path in demo.STORED.iterdir()} == before
    shutil.rmtree(tmp_path / "demo")
