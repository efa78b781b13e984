"""The package as a wheel: complete, and usable from an empty folder without the repository."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (
    "dpcert/py.typed",
    "dpcert/report/page.html",
    "dpcert/report/page.css",
    "dpcert/report/theme.css",
    "dpcert/serve/page/index.html",
    "dpcert/serve/page/main.js",
    "dpcert/runs/presets/mnist.toml",
    "dpcert/data/mnist/train-images-idx3-ubyte.gz",
    "dpcert/data/mnist/train-labels-idx1-ubyte.gz",
    "dpcert/data/mnist/t10k-images-idx3-ubyte.gz",
    "dpcert/data/mnist/t10k-labels-idx1-ubyte.gz",
)
pytestmark = pytest.mark.slow


def call(*words, **options):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=1200, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PRETRAINED = ROOT / "src" / "dpcert" / "models" / "pretrained"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    call(*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("dpcert-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A new environment with the wheel; its dependencies are those of this one, by path, without the editable dpcert."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    call(*pip, "install", "--no-index", "--no-deps", wheel)
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "dpcert").rglob("*.py")}
    assert sources | set(NEEDED) <= names
    assert all(name.startswith(("dpcert/", "dpcert-")) for name in names)
    assert not any("private/" in name or name.endswith(".pyc") for name in names)
    weights = {path.relative_to(ROOT / "src").as_posix() for path in PRETRAINED.glob("*.safetensors")}
    assert {name for name in names if name.endswith(".safetensors")} == weights  # the public ones, no run's


def test_the_wheel_asks_for_no_development_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    always = " ".join(line for line in required if "extra ==" not in line)
    assert "torch" in always and not any(name in always for name in ("pytest", "mkdocs", "opacus", "foolbox", "hatchling"))


def test_the_installed_wheel_trains_and_certifies_from_an_empty_folder(installed, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    origin = call(installed / "python", "-c", "import dpcert; print(dpcert.__file__)", cwd=tmp_path, env=environment)
    assert str(installed.parent) in origin
    words = ["--set", "train.epochs=1", "--set", "certify.n=200", "--examples", "5", "--out", "run"]
    out = call(installed / "dpcert", "run", "mnist/dp-gaussian", *words, cwd=tmp_path, env=environment)
    assert "epsilon = " in out and "report: run/report.html" in out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["privacy"]["private"] and metrics["certification"][0]["examples"] == 5
