"""How much faster is certification than the standard loop? Same n0, n and alpha; both sides cast every vote.

The loop of Cohen et al. (2019) takes one image at a time, repeats it 1,000 times, adds fresh noise and counts one by one.
A second table has the votes of a larger network, the residual backbone: in PyTorch, compiled, and shared by three heads.
"""

import copy
import math
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dpcert
from benchmarks._measure import arguments, bars, interleaved, ratio, save, summary
from dpcert.certification.bounds import certified_radius, lower_confidence_bound
from dpcert.certification.heads import headed, heads_in, share
from dpcert.certification.smooth import Counter
from dpcert.certification.votes import FreshVotes, Voter, voting_copy
from dpcert.models.resnet import resnet
from dpcert.rng import Purpose, key_from_seed
from dpcert.workers import parallel_map, worker_count

BACKBONE, HEADS, KEY = "resnet-48", 3, key_from_seed(0, "benchmark")
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


def backbones(seed: int = 0) -> list[nn.Module]:
    """Backbones with different heads. The weights are random, with BatchNorm statistics of noisy images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = resnet(BACKBONE, (3, 32, 32), 10).train()
        with torch.no_grad():
            model(torch.rand(64, 3, 32, 32) + SIGMA * torch.randn(64, 3, 32, 32))
        models = [copy.deepcopy(model.eval()) for _ in range(HEADS)]
        for one in models:
            nn.init.normal_(one.head.weight, 0.0, 0.1)
    return list(models)


def votes_of_the_backbone(rounds: int, votes: int) -> dict[str, Any]:
    """Microseconds a vote, with the noise of a bank where it fits; one network in a pass, or three heads."""
    models, images = backbones(), torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    parts = [part for model in models if (part := headed(model, images)) is not None]
    shared = share(parts, images, SIGMA)
    if shared is None:
        raise RuntimeError("the heads do not share their trunk")
    needed, eager = {Purpose.CERTIFY_ESTIMATION: votes}, voting_copy(models[0])
    plain = [FreshVotes(copy.deepcopy(eager), SIGMA, KEY) for _ in range(worker_count(torch.device("cpu")))]

    def cast(counters: list[Counter]) -> None:
        for _ in parallel_map(counters, lambda c, i: c.count(images[i], 0, votes, Purpose.CERTIFY_ESTIMATION, i), range(2)):
            pass

    with (
        Voter(models[0], SIGMA).counters(images, KEY, needed) as one,
        Voter(shared, SIGMA).counters(images, KEY, needed) as together,
    ):
        ways: dict[str, tuple[list[Counter], int]] = {
            "PyTorch": (list(plain), 1),
            "dpcert": (one, 1),
            f"dpcert, {HEADS} heads in one pass": (together, heads_in(shared)),
        }
        seconds = interleaved({name: lambda c=c: cast(c) for name, (c, _) in ways.items()}, rounds, warm_up=1)  # type: ignore[misc]
    each = {name: [s / (2 * votes * heads) for s in seconds[name]] for name, (_, heads) in ways.items()}
    table = Table(title=f"Votes of {BACKBONE}, 3 x 32 x 32 pixels")
    for heading in ("way", "µs a vote and head", "times faster", "quartiles"):
        table.add_column(heading)
    result = {}
    for name, s in each.items():
        faster = ratio(each["PyTorch"], s)
        result[name] = {"microseconds_a_vote": 1e3 * summary(s)["median_ms"], "speedup": faster}
        per_vote, spread = f"{result[name]['microseconds_a_vote']:.0f}", f"{faster['low']:.2f} to {faster['high']:.2f}"
        table.add_row(name, per_vote, f"{faster['median']:.2f}", spread)
    Console(width=120).print(table)
    return result


def main() -> None:
    options = arguments(__doc__ or "")
    rounds, ours = (2, 60) if options.quick else (max(3, options.rounds // 4), 500)
    some = 20 if options.quick else 40
    data, model = dpcert.load_dataset("mnist"), dpcert.build_model("cnn", seed=0).eval()
    x, y = data.x_test, data.y_test

    def shared() -> None:
        dpcert.certify(model, x[:ours], y[:ours], sigma=SIGMA, n0=N0, n=N, alpha=ALPHA)

    fresh_noise = dpcert.SmoothedClassifier(model, SIGMA, fresh_noise=True)

    def fresh() -> None:
        fresh_noise.certify(x[:some], y[:some], n0=N0, n=N, alpha=ALPHA)

    loop = (lambda: cohens_loop(model, x[:2]), 2)
    work = {"Cohen's loop": loop, "dpcert, fresh noise": (fresh, some), "dpcert": (shared, ours)}
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
    backbone = votes_of_the_backbone(rounds, votes=512 if options.quick else 2048)
    print(save("certification", {"rounds": rounds, "images_of_the_bank": ours, **result, "backbone": backbone}))
    print(bars("certification", "Certification: times faster than Cohen's loop", {"CERTIFY": bar}, "times"))


if __name__ == "__main__":
    main()
