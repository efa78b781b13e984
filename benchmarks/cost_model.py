"""What do training and certification cost on other machines? Arithmetic, fitted on measured steps and checked on others.

    step      = fixed + work / (ranks * rate) + noise + reduction
    work      = B * R rows, each a forward pass and two more passes of its size (output gradients, per-example products)
    noise     = one float64 normal per trained parameter, drawn once, whatever the number of ranks
    reduction = 2 (ranks - 1) / ranks * 8 bytes per trained parameter, over the slowest link

Reads the results of the other benchmarks. ``python -m benchmarks.cost_model`` prints the tables of docs/scale.md.
"""

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._measure import RESULTS, save
from dpcert.models.spec import ModelSpec
from dpcert.privacy.noise import standard_normal
from dpcert.rng import key_from_seed

PASSES_OF_A_STEP = 3.0
BYTES_OF_A_SUM = 8


@dataclass(frozen=True)
class Cost:
    """What one model costs, whatever the machine."""

    flops: float  # of a forward pass of one row
    parameters: int  # trained ones

    def work(self, examples: float, views: int) -> float:
        """Operations of a private step."""
        return examples * views * self.flops * PASSES_OF_A_STEP

    def bytes_reduced(self, ranks: int) -> float:
        """Bytes that each rank sends in one step, in a ring."""
        return 2 * (ranks - 1) / ranks * BYTES_OF_A_SUM * self.parameters


@dataclass(frozen=True)
class Machine:
    """Ranks of equal speed. `rate` is what a rank reaches in a private step, not its peak."""

    ranks: int
    rate: float  # operations per second of one rank
    seconds_a_normal: float
    bandwidth: float = math.inf  # bytes per second of the slowest link
    fixed: float = 0.0  # seconds a step: sampling, Python, optimizer

    def seconds_a_step(self, cost: Cost, examples: float, views: int) -> float:
        """The formula at the top of this file."""
        work = cost.work(examples, views) / (self.ranks * self.rate)
        return self.fixed + work + cost.parameters * self.seconds_a_normal + cost.bytes_reduced(self.ranks) / self.bandwidth

    def seconds_a_vote(self, cost: Cost) -> float:
        """A vote is one forward pass; the ranks share the images."""
        return cost.flops / (self.ranks * self.rate)


def cost_of(model: nn.Module, input_shape: tuple[int, ...]) -> Cost:
    """Count the operations of one forward pass, on the meta device: nothing is computed."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.to("meta")(torch.empty((1, *input_shape), device="meta"))
    return Cost(float(counter.get_total_flops()), trained)


def fitted(few: tuple[int, float], many: tuple[int, float], cost: Cost, batch: int, ranks: int, normal: float) -> Machine:
    """Fit rate and fixed cost to two measured steps, (views, seconds) each."""
    rate = (cost.work(batch, many[0]) - cost.work(batch, few[0])) / (many[1] - few[1]) / ranks
    machine = Machine(ranks, rate, normal)
    return replace(machine, fixed=max(0.0, few[1] - machine.seconds_a_step(cost, batch, few[0])))


def seconds_a_normal(count: int = 1 << 20) -> float:
    """Measure the secret noise of one parameter."""
    key = key_from_seed(0, "benchmark")
    seconds = []
    for step in range(5):
        began = time.process_time()
        standard_normal(count, key, step)
        seconds.append(time.process_time() - began)
    return min(seconds) / count


CNN = ModelSpec("cnn"), (1, 28, 28)
BACKBONE = ModelSpec("resnet-48"), (3, 32, 32)
CROSSVIT = ModelSpec("crossvit-tiny", input_size=240), (3, 32, 32)
CASES = {"CNN": CNN, "backbone resnet-48": BACKBONE, "CrossViT-Tiny, 240 x 240": CROSSVIT}
GPU_RATE = 0.3 * 19.5e12  # an assumption: 30 % of the float32 peak of an A100, without TF32
GPU_BANDWIDTH = 100e9  # bytes per second between GPUs, an assumption too


def cost_of_spec(spec: ModelSpec, input_shape: tuple[int, int, int], classes: int = 10) -> Cost:
    """The cost of a packaged model, all parameters trained."""
    return cost_of(spec.bare(input_shape, classes, seed=0), input_shape)


def measured(name: str) -> dict[str, Any]:
    """The stored result of another benchmark."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


@dataclass(frozen=True)
class Point:
    """A measured time, and what the formula says about it from other points."""

    measured_seconds: float
    predicted_seconds: float


def checked(normal: float) -> dict[str, Point]:
    """Predict measured points from others: more views, a second rank, a vote from a step."""
    steps, ranks, shards = measured("training_step"), measured("ranks"), measured("shards")
    cost, threads = cost_of_spec(*CNN), steps["machine"]["threads"]
    at = {k: steps[f"K={k}"]["dpcert layerwise"]["median_ms"] / 1e3 for k in (0, 2, 8)}
    machine = fitted((1, at[0]), (3, at[2]), cost, 512, threads, normal)
    points = {"CNN, a step with 9 views, from 1 and 3 views": Point(at[8], machine.seconds_a_step(cost, 512, 9))}

    of_ranks = ranks["methods"]["dp-gaussian"]
    alone, both = (of_ranks[name]["median_ms"] / 1e3 for name in ("one process of one thread", "two ranks of one thread"))
    serial = min(alone, machine.fixed + cost.parameters * normal)
    points["CNN, a step of two ranks, from one"] = Point(both, serial + (alone - serial) / 2)

    one, two = (shards[name]["median_ms"] / 1e3 for name in ("1 rank", "2 ranks"))
    points["CNN, 500 certificates of two ranks, from one"] = Point(two, one / 2)

    backbone = measured("backbone_step")
    forward = backbone["backbone, head"]["forward pass"]["median_ms"] / 1e3
    step = backbone["backbone, all"]["best non-private"]["median_ms"] / 1e3
    points["backbone, a non-private step, from forward passes"] = Point(step, PASSES_OF_A_STEP * forward)
    return points


def predicted(normal: float) -> dict[str, dict[str, float]]:
    """The paper's CIFAR-10 setting and ImageNet, on eight GPUs that reach `GPU_RATE` each."""
    gpus = Machine(8, GPU_RATE, normal, GPU_BANDWIDTH, fixed=0.01)
    small, large = cost_of_spec(*CROSSVIT), cost_of_spec(*CROSSVIT, classes=1000)
    step, large_step = gpus.seconds_a_step(small, 512, 2), gpus.seconds_a_step(large, 16_384, 2)
    epoch = 1_281_167 / 16_384 * large_step
    return {
        "CrossViT-Tiny on CIFAR-10, B = 512, K = 1, 10 epochs": {
            "step_seconds": step,
            "noise_share": small.parameters * normal / step,
            "hours": step * int(10 * 50_000 / 512) / 3600,
        },
        "the same, 10,000 certificates of 10,100 votes": {"hours": 10_000 * 10_100 * gpus.seconds_a_vote(small) / 3600},
        "CrossViT-Tiny on ImageNet, B = 16,384, K = 1, one epoch": {
            "step_seconds": large_step,
            "noise_share": large.parameters * normal / large_step,
            "megabytes_reduced": large.bytes_reduced(8) / 1e6,
            "hours": epoch / 3600,
        },
    }


def main() -> None:
    """Check the formula on the stored points, predict, and print both."""
    normal = seconds_a_normal()
    points, others = checked(normal), predicted(normal)
    print(f"noise: {1e9 * normal:.0f} ns a parameter")
    for name, point in points.items():
        off = point.predicted_seconds / point.measured_seconds - 1
        print(f"{name}: {point.measured_seconds:.3g} s, predicted {point.predicted_seconds:.3g} s ({100 * off:+.0f} %)")
    for name, figures in others.items():
        print(f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in figures.items())}")
    costs = {name: asdict(cost_of_spec(*case)) for name, case in CASES.items()}
    for name, cost in costs.items():
        print(f"{name}: {cost['flops'] / 1e6:.3g} MFLOP a row, {cost['parameters']} parameters")
    checks = {name: asdict(point) for name, point in points.items()}
    print(save("cost_model", {"seconds_a_normal": normal, "costs": costs, "checked": checks, "predicted": others}))


if __name__ == "__main__":
    main()
