"""Pages of a real run, with rows of every kind beside it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dpcert.paper.comparison import figures_of
from dpcert.report.html import render
from dpcert.report.tables import read_run
from dpcert.store.durable import sha256_hex, write_checked_json
from dpcert.store.records import AttackRow, CertificateRow, CurveRow, Row, SampleRow, header, read_rows, text_of

RUNS = Path(__file__).parents[1] / "stored_runs"  # as they were on some day: results/ may grow without a test minding
CERTIFICATES = "certificates-sigma0.50.tsv"


def write_rows(path: Path, kind: type[Row], rows: list) -> None:
    path.write_text("\n".join([header(kind), *map(text_of, rows)]) + "\n")


def sample_rows(certificates: list[CertificateRow]) -> list[SampleRow]:
    """Metrics that fall with the radius, as the paper finds."""
    noise = np.random.default_rng(3).normal(size=(len(certificates), 3))
    return [
        SampleRow(
            row.idx, row.label, max(row.predict, 0), float(np.exp(a - 3 * row.radius)), float(np.exp(1 + b - 2 * row.radius)), 1e-4,
            float(np.exp(4 + 0.3 * c - 0.6 * row.radius)), 0.5, row.radius, row.correct,
        )
        for row, (a, b, c) in zip(certificates, noise, strict=True)
    ]  # fmt: skip


def attack_rows() -> list[AttackRow]:
    rows = []
    for attack, target, sigma in (
        ("fgsm", "base", None),
        ("pgd-linf", "base", None),
        ("pgd-l2", "base", None),
        ("pgd-l2", "smoothed", 0.5),
    ):
        for strength in (0.0, 0.01, 0.1, 0.5, 1.0):
            accuracy = 0.97 - 0.4 * strength
            rows.append(AttackRow(attack, target, sigma, strength, 20, 1, 500, accuracy, accuracy - 0.03, accuracy + 0.02))
    return rows


def curve_rows(private: bool = True, steps: int = 4687) -> list[CurveRow]:
    """Forty points, of which the last is of the last step."""
    return [
        CurveRow(steps * e // 40, float(e), 0.07 * e if private else float("inf"), 0.05 / e, 1 - 0.5 / e) for e in range(1, 41)
    ]


def complete_run(folder: Path, source: str = "mnist-dp-gaussian") -> Path:
    shutil.copytree(RUNS / source, folder)
    write_rows(folder / "samples.tsv", SampleRow, sample_rows(read_rows(CertificateRow, folder / CERTIFICATES)))
    write_rows(folder / "attacks.tsv", AttackRow, attack_rows())
    write_rows(
        folder / "training.tsv",
        CurveRow,
        curve_rows(steps=json.loads((folder / "metrics.json").read_text())["privacy"]["steps"]),
    )
    for name in ("samples.json", "attacks.json"):
        write_checked_json(folder / name, {"model_sha256": sha256_hex((folder / "model.safetensors").read_bytes())})
    return folder


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    return complete_run(tmp_path_factory.mktemp("report") / "complete")


@pytest.fixture(scope="session")
def page(complete):
    """The page of one run with every part, the images of the data set among them."""
    from dpcert.runs.page import with_images

    return render(with_images([read_run(complete)]), figures_of)


@pytest.fixture(scope="session")
def comparison(complete):
    """The page of three runs of which only one has every part."""
    return render([read_run(path) for path in (complete, RUNS / "mnist-dpsgd", RUNS / "mnist-regular")], figures_of)


@pytest.fixture
def copied(tmp_path):
    """A run that a test may spoil."""
    shutil.copytree(RUNS / "mnist-dp-gaussian", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def without_figures(monkeypatch):
    """Pages in a fraction of the time, for tests that look at other things."""
    monkeypatch.setattr("dpcert.report.theme.Drawing.inline", lambda drawing: '<svg viewBox="0 0 1 1"></svg>')
