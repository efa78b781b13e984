"""Are regularizers with their original weights worse than plain Gaussian views, under clipping and noise? On held-out records.

    python benchmarks/weights.py [METHOD ...]        e.g. python benchmarks/weights.py dp-stability

Ten epochs of MNIST at (3, 1e-5) with 5,000 records held out; certified at sigma 0.5 on 500 of them with n = 1,000. The test
set is not read. Each run adds one line of JSON to results/weights.jsonl; runs that are already there are skipped.
"""

import json
import sys
from pathlib import Path

import dpcert

RESULTS = Path(__file__).parent / "results" / "weights.jsonl"
GRID: dict[str, list[dict[str, float]]] = {  # weights of the original papers; add others if these are worse than plain views
    "dp-gaussian": [{}],
    "dp-stability": [{"stability_gamma": 2.0}],
    "dp-gaussian+consistency": [{"consistency_lambda": 5.0, "consistency_eta": 0.5}],
    "dp-macer": [{"macer_lambda": 16.0}],
}


def measure(name: str, settings: dict[str, float]) -> dict[str, object]:
    data = dpcert.load_dataset("mnist").holding_out(5000)
    run = dpcert.train("cnn", data, dpcert.method(name, sigma=0.5, **settings), epochs=10, seed=0, clip_norm=0.1)
    x, y = data.x_validation[:500], data.y_validation[:500]
    certificates = dpcert.certify(run.model, x, y, sigma=0.5, n=1000, seed=0)
    clean = float((run.model(x).argmax(dim=1) == y).float().mean())
    at = {f"{radius:.2f}": certificates.certified_accuracy(radius) for radius in (0.25, 0.75)}
    return {"method": name, **settings, "epsilon": run.epsilon, "clean_500": clean, "acr": certificates.acr, "certified": at}


def main(names: list[str]) -> None:
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for name in names or list(GRID):
        for settings in GRID[name]:
            if any(row["method"] == name and all(row.get(k) == v for k, v in settings.items()) for row in done):
                continue
            row = measure(name, settings)
            print(json.dumps(row), flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
