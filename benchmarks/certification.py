"""How much faster is certification than the standard loop? Same n0, n and alpha; both sides cast every vote.

The loop of Cohen et al. (2019) takes one image at a time, repeats it 1,000 times, adds fresh noise and counts one by one.
"""

import math

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dpcert
from benchmarks._measure import arguments, bars, interleaved, ratio, save, summary
from dpcert.certification.bounds import certified_radius, lower_confidence_bound

N0, N, ALPHA, SIGMA, BATCH = 100, 10_000, 0.001, 0.5, 1000


def votes_one_by_one(model: nn.Module, x: Tensor, votes: int) -> np.ndarray:
    counts = np.zeros(10, dtype=int)
    with torch.no_grad():
        for _ in range(math.ceil(votes / BATCH)):
            size = min(BATCH, votes)
            votes -= size
            copies = x.repeat((size, 1, 1, 1))
            for vote in model(copies + torch.randn_like(copies) * SIGMA).argmax(1).numpy():
                counts[vote] += 1
    return counts


def cohens_loop(model: nn.Module, images: Tensor) -> list[float]:
    radii = []
    for x in images:
        chosen = int(votes_one_by_one(model, x, N0).argmax())
        count = int(votes_one_by_one(model, x, N)[chosen])
        radii.append(certified_radius(lower_confidence_bound(count, N, ALPHA), SIGMA))
    return radii


def main() -> None:
    options = arguments(__doc__ or "")
    rounds, ours = (2, 60) if options.quick else (max(3, options.rounds // 4), 500)
    data, model = dpcert.load_dataset("mnist"), dpcert.build_model("cnn", seed=0).eval()
    x, y = data.x_test, data.y_test

    def shared() -> None:
        dpcert.certify(model, x[:ours], y[:ours], sigma=SIGMA, n0=N0, n=N, alpha=ALPHA)

    def fresh() -> None:
        dpcert.certify(model, x[:4], y[:4], sigma=SIGMA, n0=N0, n=N, alpha=ALPHA, fresh_noise=True)

    work = {"Cohen's loop": (lambda: cohens_loop(model, x[:2]), 2), "dpcert, fresh noise": (fresh, 4), "dpcert": (shared, ours)}
    seconds = interleaved({name: job for name, (job, _) in work.items()}, rounds, warm_up=1)
    each = {name: [s / work[name][1] for s in seconds[name]] for name in work}
    table = Table(title=f"CERTIFY, n0 = {N0}, n = {N}, MNIST, the paper's CNN")
    for heading in ("way", "µs a vote", "ms an image", "times faster", "quartiles", "10,000 images"):
        table.add_column(heading)
    result, bar = {}, {}
    for name, s in each.items():
        faster, one = ratio(each["Cohen's loop"], s), summary(s)
        result[name] = {**one, "microseconds_a_vote": one["median_ms"] * 1e3 / (N0 + N), "speedup": faster}
        bar[name] = faster["median"]
        spread, whole = f"{faster['low']:.1f} to {faster['high']:.1f}", f"{one['median_ms'] * 10 / 60:.1f} min"
        per_vote = f"{result[name]['microseconds_a_vote']:.1f}"
        table.add_row(name, per_vote, f"{one['median_ms']:.0f}", f"{faster['median']:.1f}", spread, whole)
    Console(width=120).print(table)
    print(save("certification", {"rounds": rounds, "images_of_the_bank": ours, **result}))
    print(bars("certification", "Certification: times faster than Cohen's loop", {"CERTIFY": bar}, "times"))


if __name__ == "__main__":
    main()
