"""``make demo``: certify, predict and report in under a minute with a stored private model. Writes to runs/demo only."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dpcert.privacy.ledger import Ledger
from dpcert.privacy.statement import state

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "results" / "mnist-dp-gaussian"
IMAGE = 280  # a test image that is easy to recognize in a terminal


def main(folder: Path) -> None:
    """Open a stored run, certify 20 images, predict one, write the report."""
    began = time.monotonic()
    if (folder / "config.toml").exists():
        sys.exit(f"error: {folder} is a run directory, must be free for the demo; move it away")
    shutil.rmtree(folder / STORED.name, ignore_errors=True)
    run = Path(shutil.copytree(STORED, folder / STORED.name))
    facts = json.loads((run / "metrics.json").read_text())
    statement = state(Ledger.load(run / "ledger.jsonl"))
    say(
        "1. A private model",
        f"{STORED.relative_to(ROOT)} was trained on 60,000 MNIST images with differential privacy.",
        f"{statement.short}, clean accuracy {100 * facts['clean_accuracy']:.2f} %.",
        statement.membership,
        f"The demo works on a copy: {run}",
    )
    say(
        "2. Certify 20 test images",
        "Each is classified 5,100 times under noise. The votes prove a radius: no change of the image",
        "within that radius can change the prediction. ACR is the average certified radius.",
    )
    dpcert("certify", run, "--examples", "20", "--n", "5000")
    digit, label = write_digit(folder)
    say("3. Predict one image", f"{digit} shows a {label}:", picture(digit))
    dpcert("predict", run, digit)
    say("4. Write the report", "One page with the privacy statement, the certificates and the least robust images.")
    dpcert("report", run, "--html", run / "report.html")
    say(
        f"Done in {time.monotonic() - began:.0f} s. Open {run / 'report.html'} in a browser. Next:",
        f"  .venv/bin/dpcert verify {STORED.relative_to(ROOT)}    # check all claims about this model, without secrets",
        "  make run                                           # train and certify a model (3 to 10 minutes on 2 cores)",
    )


def say(title: str, *lines: str) -> None:
    """Print a section of the demo."""
    print("\n".join([f"\n{title}", *lines]), flush=True)


def dpcert(*arguments: object) -> None:
    """Print a command as a user types it, and run it."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ dpcert {shlex.join(words)}", flush=True)
    environment = {**os.environ, "COLUMNS": os.environ.get("COLUMNS", "110")}
    done = subprocess.run([sys.executable, "-m", "dpcert", *words], env=environment, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)


def write_digit(folder: Path) -> tuple[Path, int]:
    """Write one MNIST test image as a PNG and return its path and label."""
    from PIL import Image

    import dpcert as library

    data = library.load_dataset("mnist")
    pixels = (255 * data.x_test[IMAGE, 0]).round().byte().numpy()
    path = folder / "digit.png"
    Image.fromarray(pixels).save(path)
    return path, int(data.y_test[IMAGE])


def picture(path: Path) -> str:
    """The digit as text, two rows of pixels per line."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(path)).astype(float)[4:24, 4:24]
    rows = pixels.reshape(10, 2, 20).mean(axis=1)
    return "\n".join("    " + "".join(" .:*#"[min(4, int(value / 52))] for value in row).rstrip() for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/demo"))
