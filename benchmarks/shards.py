"""How much faster do two single-threaded ranks certify than one? Same images, same votes, and the rows must be equal.

Both ways take turns in one group of processes: while one rank works alone, the other waits. A call includes what each rank
prepares: the compiled graph and the noise bank.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dpcert
from benchmarks._measure import arguments, ratio, save, summary
from dpcert.certification.sweep import Request, certify_to_files
from dpcert.rng import key_from_seed
from dpcert.scale.environment import RENDEZVOUS
from dpcert.scale.world import ALONE, World, join
from dpcert.store.records import CertificateRow

RANKS, SIGMA, KEY = 2, 0.5, key_from_seed(0, "benchmark")
WORKER = "DPCERT_BENCHMARK_RANK"  # says how many images and rounds
ONE, BOTH = "1 rank", f"{RANKS} ranks"


def certified(world: World, images: int, folder: Path) -> list[CertificateRow]:
    data, model = dpcert.load_dataset("mnist"), dpcert.build_model("cnn", seed=0).eval()
    files = [(folder / f"rows-{time.monotonic_ns()}.tsv", list(range(images)))]
    (rows,) = certify_to_files(model, data.x_test, data.y_test, files, Request(SIGMA), key=KEY, world=world) or [[]]
    return rows


def timed(world: World, images: int, folder: Path) -> tuple[float, list[tuple[Any, ...]]]:
    began = time.perf_counter()
    rows = certified(world, images, folder)
    return time.perf_counter() - began, [(row.idx, row.predict, row.count, row.p_lower) for row in rows]


def work(images: int, rounds: int) -> None:
    """What each rank runs; rank 0 prints the seconds of both ways in every round."""
    world = join()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {ONE: [], BOTH: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds + 1):
            alone = timed(ALONE, images, Path(folder)) if world.is_first else (0.0, [])
            world.wait()
            shared = timed(world, images, Path(folder))
            world.wait()
            if world.is_first and alone[1] != shared[1]:
                raise RuntimeError(f"{RANKS} ranks wrote other rows than one")
            if turn > 0:  # the first round warms up
                seconds[ONE].append(alone[0])
                seconds[BOTH].append(shared[0])
    if world.is_first:
        print(json.dumps(seconds))


def measure(images: int, rounds: int) -> dict[str, list[float]]:
    """Start the ranks and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        common = {**os.environ, "WORLD_SIZE": str(RANKS), RENDEZVOUS: f"{folder}/meeting", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.shards"]
        ranks = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, env={**common, "RANK": str(rank), WORKER: json.dumps([images, rounds])}
            )
            for rank in range(RANKS)
        ]
        printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank failed")
    seconds: dict[str, list[float]] = json.loads(printed[0])
    return seconds


def main() -> None:
    if WORKER in os.environ:
        work(*json.loads(os.environ[WORKER]))
        return
    options = arguments(__doc__ or "")
    images, rounds = (60, 2) if options.quick else (500, max(5, options.rounds // 3))
    seconds = measure(images, rounds)
    faster = ratio(seconds[ONE], seconds[BOTH])
    table = Table(title=f"CERTIFY on single-threaded ranks, {images} MNIST images, n0 = 100, n = 10,000, the paper's CNN")
    for heading in ("ranks", "seconds", "times faster", "quartiles"):
        table.add_column(heading)
    quartiles = f"{faster['low']:.2f} to {faster['high']:.2f}"
    for name, gain, spread in ((ONE, "1.00", ""), (BOTH, f"{faster['median']:.2f}", quartiles)):
        table.add_row(name, f"{summary(seconds[name])['median_ms'] / 1e3:.1f}", gain, spread)
    Console(width=120).print(table)
    each = {name: summary(s) for name, s in seconds.items()}
    print(save("shards", {"rounds": rounds, "images": images, "cores": os.cpu_count(), **each, "speedup": faster}))


if __name__ == "__main__":
    main()
