"""Does time grow linearly? Training steps by examples, views and parameters; certification by votes."""

import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import dpcert
from benchmarks import training_step as t
from benchmarks._measure import arguments, save
from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip
from dpcert.losses import cross_entropy
from dpcert.privacy.clipping import Flat


def seconds(work, repeats: int) -> float:
    work()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Tanh(), nn.Linear(width, 10))


def by_parameters(width: int):
    model, x, y = wide(width), torch.rand(128, 3, 1, 28, 28), torch.randint(0, 10, (128,))
    (engine,), clip = choose("layerwise", model, cross_entropy, (1, 28, 28)), Clip(Flat(), 0.1)
    return lambda: engine(model, cross_entropy, x, y, clip)


def main() -> None:
    options = arguments(__doc__ or "")
    repeats = 2 if options.quick else 5
    data = dpcert.load_dataset("mnist")
    model = dpcert.build_model("cnn", seed=0)
    measured: dict[str, dict[str, float]] = {
        "examples in a step (K = 2)": {},
        "views K + 1 (B = 512)": {},
        "votes n": {},
        "parameters": {},
    }
    for batch in (256, 512, 1024, 2048):
        t.BATCH = batch
        measured["examples in a step (K = 2)"][str(batch)] = seconds(t.private(data, 2, "layerwise"), repeats)
    t.BATCH = 512
    for copies in (1, 3, 7):
        measured["views K + 1 (B = 512)"][str(copies + 1)] = seconds(t.private(data, copies, "layerwise"), repeats)
    for n in (2500, 5000, 10_000, 20_000):
        work = lambda n=n: dpcert.certify(model, data.x_test[:20], data.y_test[:20], sigma=0.5, n=n, seed=0)  # noqa: E731
        measured["votes n"][str(n)] = seconds(work, max(1, repeats // 2))
    for width in (64, 256, 1024, 4096):
        measured["parameters"][str(sum(p.numel() for p in wide(width).parameters()))] = seconds(by_parameters(width), repeats)
    table = Table(title="growth of time")
    for heading in ("by", "size", "ms", "time over size, first = 1"):
        table.add_column(heading)
    for name, series in measured.items():
        first_size, first = next((int(size), s) for size, s in series.items())
        for size, s in series.items():
            table.add_row(name, size, f"{1e3 * s:.0f}", f"{(s / first) / (int(size) / first_size):.2f}")
    Console(width=110).print(table)
    print(save("growth", {"seconds": measured}))


if __name__ == "__main__":
    main()
