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
from dataclasses import dataclass, replace
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
    standard_normal(count, key, 0)
    began = time.perf_counter()
    standard_normal(count, key, 1)
    return (time.perf_counter() - began) / count


CNN = ModelSpec("cnn"), (1, 28, 28)
BACKBONE = ModelSpec("resnet-48"), (3, 32, 32)
CROSSVIT = ModelSpec("crossvit-tiny", input_size=240), (3, 32, 32)


def cost_of_spec(spec: ModelSpec, input_shape: tuple[int, int, int], classes: int = 10) -> Cost:
    """The cost of a packaged model, all parameters trained."""
    return cost_of(spec.bare(input_shape, classes, seed=0), input_shape)


def measured(name: str) -> dict[str, Any]:
    """The stored result of another benchmark."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def checked(normal: float) -> dict[str, dict[str, Any]]:
    """Fit the CNN's machine on K = 0 and K = 2, and predict the other measured points with it."""
    steps, backbone = measured("training_step"), measured("backbone_step")
    seconds = {k: steps[f"K={k}"]["dpcert layerwise"]["median_ms"] / 1e3 for k in (0, 2, 8)}
    threads, cost = steps["machine"]["threads"], cost_of_spec(*CNN)
    machine = fitted((1, seconds[0]), (3, seconds[2]), cost, 512, threads, normal)
    points = {
        f"CNN, B = 512, R = {k + 1}": (seconds[k], machine.seconds_a_step(cost, 512, k + 1), k != 8) for k in (0, 2, 8)
    }
    one = replace(machine, ranks=backbone["machine"]["threads"])
    views = backbone.get("views", 3)
    points[f"backbone, B = {backbone['batch']}, R = {views}"] = (
        backbone["backbone, all"]["dpcert"]["median_ms"] / 1e3,
        one.seconds_a_step(cost_of_spec(*BACKBONE), backbone["batch"], views),
        False,
    )
    return {
        name: {"measured_seconds": found, "predicted_seconds": predicted, "fitted": was_fitted}
        for name, (found, predicted, was_fitted) in points.items()
    } | {"machine": {"rate_of_a_thread": machine.rate, "fixed_seconds": machine.fixed, "flops_of_a_row": cost.flops}}


def main() -> None:
    """Check the model on the stored points, then print what it predicts."""
    normal = seconds_a_normal()
    result = {"seconds_a_normal": normal, "checked": checked(normal)}
    print(json.dumps(result, indent=2))
    for name, case in (("cnn", CNN), ("backbone", BACKBONE), ("crossvit", CROSSVIT)):
        print(name, cost_of_spec(*case))


if __name__ == "__main__":
    main()
