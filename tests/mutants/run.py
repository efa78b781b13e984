"""Apply each listed mutant to a copy of the project, run the tests that must kill it, and tell which survived (D15).

    python -m tests.mutants.run [--list] [--only N [N ...]]

The working tree is never touched: sources and tests are copied to a temporary folder. First the named tests must pass on the
unchanged copy, or a failure would prove nothing. Exit code 1 if a mutant survives or cannot be tried.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import EVIDENCE
from tests.mutants.listed import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
KILLED, SURVIVED, NOT_APPLIED, NOT_RUN = "killed", "SURVIVED", "did not apply", "tests did not run"
_TESTS_FAILED, _MOST_SECONDS = 1, 900


def copied(folder: Path) -> None:
    """The project in `folder`; large data files are linked, not copied."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.gz"))
    for data in (ROOT / "src").rglob("*.gz"):
        (folder / data.relative_to(ROOT)).symlink_to(data)
    (folder / "results").symlink_to(ROOT / "results")
    shutil.copy(ROOT / "pyproject.toml", folder)


def pytest_code(folder: Path, tests: list[str]) -> int:
    """The exit code of pytest on the copy."""
    paths = os.pathsep.join([str(folder / "src"), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=_MOST_SECONDS, check=False)
    return done.returncode


def outcome(folder: Path, mutant: Mutant) -> str:
    """Whether the mutant's own tests notice it."""
    file = folder / "src" / "dpcert" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return NOT_APPLIED
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code = pytest_code(folder, list(mutant.tests))
    except subprocess.TimeoutExpired:
        return NOT_RUN
    finally:
        file.write_text(text, encoding="utf-8")
    return {0: SURVIVED, _TESTS_FAILED: KILLED}.get(code, NOT_RUN)


def note(outcomes: list[str], seconds: float) -> None:
    """A line of evidence, as the fixture `evidence` writes it."""
    killed = outcomes.count(KILLED)
    row = {"id": "D15", "figure": f"{killed} of {len(outcomes)} mutants killed", "trials": len(outcomes)}
    row |= {"twin": "the unchanged copy passes the same tests", "seconds": round(seconds, 1), "test": "tests/mutants/run.py"}
    EVIDENCE.parent.mkdir(exist_ok=True)
    with EVIDENCE.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only show them")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these numbers of the list")
    options = parser.parse_args(arguments)
    chosen = options.only or list(range(len(MUTANTS)))
    if options.list:
        print("\n".join(f"{number:3} {MUTANTS[number].file}: {MUTANTS[number].why}" for number in chosen))
        return 0
    began, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copied(folder)
        unchanged = pytest_code(folder, sorted({test for number in chosen for test in MUTANTS[number].tests}))
        if unchanged != 0:
            print(f"the named tests do not pass on the unchanged sources (pytest says {unchanged}); nothing can be concluded")
            return 1
        for number in chosen:
            outcomes.append(outcome(folder, MUTANTS[number]))
            print(f"{number:3} {outcomes[-1]:17} {MUTANTS[number].file}: {MUTANTS[number].why}", flush=True)
    print(f"{outcomes.count(KILLED)} of {len(outcomes)} mutants killed")
    if options.only is None:
        note(outcomes, time.monotonic() - began)
    return 0 if set(outcomes) == {KILLED} else 1


if __name__ == "__main__":
    sys.exit(main())
