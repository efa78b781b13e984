"""Draw docs/images/certified_accuracy.png from the stored certificates: ``python scripts/readme_figure.py``."""

import csv
import hashlib
import json
from pathlib import Path

import matplotlib
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs" / "images" / "certified_accuracy.png"
ROWS = "certificates-sigma0.50.tsv"
RUNS = {  # run, message of the line, color, position of the label
    "mnist-regular": ("ordinary training: not private, not robust", "#707070", (0.03, 5)),
    "mnist-dpsgd": ("DP-SGD: private, not robust", "#b8432c", (0.42, 36)),
    "mnist-dp-gaussian": ("dpcert (dp-gaussian): private and robust", "#2a6fba", (0.03, 70)),
}


def digest_of_rows() -> str:
    """SHA-256 of the input of the figure. The PNG stores it, so that a test can detect a stale figure."""
    files = [ROOT / "results" / run / name for run in RUNS for name in (ROWS, "metrics.json")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def certified_accuracy(run: str, radii: np.ndarray) -> np.ndarray:
    """Share of the stored images, in percent, that are classified correctly and certified at each radius."""
    with (ROOT / "results" / run / ROWS).open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    certified = np.array([float(row["radius"]) if row["correct"] == "1" else -1.0 for row in rows])
    return 100.0 * (certified[None, :] >= radii[:, None]).mean(axis=1)


def label_of(run: str) -> str:
    """The label of a line, with the figures of the run."""
    metrics = json.loads((ROOT / "results" / run / "metrics.json").read_text())
    private = metrics["privacy"]["private"]
    budget = f"epsilon {metrics['privacy']['epsilon']:.2f}, " if private else ""
    return f"{RUNS[run][0]}\n{budget}clean accuracy {100 * metrics['clean_accuracy']:.2f} %"


def main() -> None:
    """Draw the three lines."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    radii = np.linspace(0.0, 1.75, 351)
    for run, (_, color, place) in RUNS.items():
        axes.plot(radii, certified_accuracy(run, radii), color=color, linewidth=2.5)
        axes.text(*place, label_of(run), color=color, fontsize=10, linespacing=1.4)
    axes.set(xlim=(0, 1.75), ylim=(0, 100), xlabel="L2 radius (pixels in [0, 1])", ylabel="certified accuracy (%)")
    axes.set_title("MNIST: test images whose class no change within the radius can alter", fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Software": None, "Rows": digest_of_rows()})


if __name__ == "__main__":
    main()
