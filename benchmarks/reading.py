"""Does reading ahead pay? Training on records that take a while to read, with and without it; and the speed of sampling."""

import time

import numpy as np
from rich.console import Console
from rich.table import Table

import dpcert
from benchmarks._measure import arguments, interleaved, ratio, save, summary
from dpcert.data.ahead import Ahead
from dpcert.privacy.sampling import poisson_indices

RECORDS, BATCH, STEPS, LATENCY = 600, 48, 30, 0.001  # seconds a record: a fast network disk
MILLION = 10**6


class FarAway:
    """Records that come from another machine: the processor waits."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(LATENCY)
        return np.full((1, 28, 28), index % 256, np.uint8), index % 10


def train(data: dpcert.Dataset) -> None:
    model = dpcert.build_model("cnn", seed=0)
    settings = {"epochs": STEPS * BATCH / RECORDS, "batch_size": BATCH, "delta": 1e-3, "noise_seed": 1}
    dpcert.train(model, data, dpcert.method("dp-gaussian", sigma=0.5), **settings)


def without_reading_ahead(data: dpcert.Dataset) -> None:
    announce = Ahead.announce
    Ahead.announce = lambda self, draw: None
    try:
        train(data)
    finally:
        Ahead.announce = announce


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = 3 if options.quick else options.rounds
    near = [FarAway()[index] for index in range(RECORDS)]
    x, y = np.stack([pixels for pixels, _ in near]), np.array([label for _, label in near])
    far, here = dpcert.Dataset.from_items(FarAway(), near[:20]), dpcert.Dataset(x, y, x[:20], y[:20])
    processes = dpcert.Dataset.from_items(FarAway(), near[:20], workers=2)
    contenders = {
        "in memory": lambda: train(here),
        "far away, read ahead by a thread": lambda: train(far),
        "far away, read ahead by two processes": lambda: train(processes),
        "far away, read when asked for": lambda: without_reading_ahead(far),
    }
    seconds = interleaved(contenders, rounds, warm_up=1)
    sampling = interleaved({"sampling": lambda: poisson_indices(100 * MILLION, 1e-6, bytes(32), 1)}, rounds, warm_up=1)
    speed = 100 / (summary(sampling["sampling"])["median_ms"] / 1e3)
    table = Table(title=f"{STEPS} steps of {BATCH} records, {1e3 * LATENCY:g} ms a record")
    for heading in ("records", "ms", "to in memory"):
        table.add_column(heading)
    for name, each in seconds.items():
        table.add_row(name, f"{summary(each)['median_ms']:.0f}", f"{ratio(each, seconds['in memory'])['median']:.2f}")
    Console(width=110).print(table)
    print(f"Poisson sampling: {speed:.0f} million records a second")
    ratios = {name: ratio(each, seconds["in memory"]) for name, each in seconds.items()}
    print(save("reading", {"ratio_to_memory": ratios, "sampling_million_records_per_second": speed}))


if __name__ == "__main__":
    main()
