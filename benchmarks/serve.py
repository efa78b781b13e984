"""What does HTTP cost? Latency and throughput of the service, as a ratio to the bare SmoothedClassifier in the same round."""

import json
from concurrent.futures import ThreadPoolExecutor

import torch
from rich.console import Console
from rich.table import Table
from tests.serve.client import STORED, Served

from benchmarks._measure import arguments, interleaved, ratio, save, summary
from dpcert.certification.sweep import SmoothedClassifier
from dpcert.data.registry import load_dataset
from dpcert.runs.open import open_run

MANY, CLIENTS = 16, 4
ONE, SEVERAL = "one image", f"{MANY} images"
BARE, FRESH, SERVED = "SmoothedClassifier", "SmoothedClassifier, fresh noise", "POST /predict"


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)  # as many workers as the service, which runs in a process of its own
    images = load_dataset("mnist").x_test[:MANY]
    bodies = [json.dumps({"image": image.tolist()}) for image in images]
    model = open_run(STORED).model
    bare, fresh = SmoothedClassifier(model, 0.5), SmoothedClassifier(model, 0.5, fresh_noise=True)
    with Served("--no-gallery") as service, ThreadPoolExecutor(CLIENTS) as clients:

        def ask(body: str) -> None:
            assert service.call("POST", "/predict", body).status == 200

        contenders = {
            (ONE, BARE): lambda: bare.certify(images[:1]),
            (ONE, FRESH): lambda: fresh.certify(images[:1]),
            (ONE, SERVED): lambda: ask(bodies[0]),
            (SEVERAL, BARE): lambda: bare.certify(images),
            (SEVERAL, FRESH): lambda: fresh.certify(images),
            (SEVERAL, SERVED): lambda: list(clients.map(ask, bodies)),
        }
        named = {" / ".join(name): work for name, work in contenders.items()}
        seconds = interleaved(named, 3 if options.quick else options.rounds, warm_up=1)
        health = [service.call("GET", "/health") for _ in range(3)]
        assert all(answer.status == 200 for answer in health)
    table = Table(title="10,000 votes an image, one worker")
    for heading in ("work", "by", "ms", "to bare", "to bare with fresh noise"):
        table.add_column(heading)
    ratios = {}
    for work, by in contenders:
        each = seconds[f"{work} / {by}"]
        to = {base: ratio(each, seconds[f"{work} / {base}"]) for base in (BARE, FRESH)}
        ratios[f"{work} / {by}"] = to
        table.add_row(work, by, f"{summary(each)['median_ms']:.0f}", *(f"{value['median']:.2f}" for value in to.values()))
    Console(width=110).print(table)
    print(save("serve", {"milliseconds": {name: summary(each) for name, each in seconds.items()}, "ratio": ratios}))


if __name__ == "__main__":
    main()
