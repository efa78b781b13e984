"""Where does the time of a private step go? CPU time of one thread, so that other programs hardly change it.

Parts of the step are left out one after the other, and each costs what the step gets faster by. What remains at the end is the
forward pass, the gradients of layer outputs, sampling and the update. Nothing here is private: it only measures.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import backbone_step, training_step
from benchmarks._measure import arguments, save
from dpcert.data.registry import load_dataset
from dpcert.gradients.choose import COMPILED
from dpcert.gradients.layers import RULES
from dpcert.gradients.memory import keep_freed_memory
from dpcert.gradients.parts import ChannelsLast, Deferred, Instantiated

WHOLE, BASE, REST = "private step", "best non-private step", "forward, output gradients, update"
Parts = dict[str, dict[str, Any]]
Step = Callable[[], object]


def _zeros(examples: int, size: int) -> Instantiated:
    return Instantiated(torch.zeros(1, 1).expand(examples, size))


def _no_view_noise(key, purpose, start, stop, shape, device, *rest) -> torch.Tensor:
    return torch.zeros((stop - start, *shape))


def _only_form(sums: Any, some: slice, parts: dict[str, Any]) -> None:
    for part in parts.values():
        inner = part.part if isinstance(part, ChannelsLast) else part
        if isinstance(inner, Deferred):
            for _ in inner.form(range(inner.examples)):
                pass


def _no_product(inputs: torch.Tensor, deltas: torch.Tensor, allocate: Any) -> Instantiated:
    return _zeros(len(inputs), inputs.shape[2] * deltas.shape[2])


def _no_rule(layer: Any, x: Any, delta: Any, examples: int, buffers: Any) -> dict[str, Instantiated]:
    return {name: _zeros(examples, parameter.numel()) for name, parameter in layer.named_parameters()}


def _no_squares(chain: Any, work: Any, weights: Any, slopes: torch.Tensor, gradients: Any) -> torch.Tensor:
    return torch.zeros(len(slopes), dtype=torch.float64)


def _no_logits(chain: Any, rows: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.zeros(len(rows), chain.classes)


@contextmanager
def without(parts: int, left_out: Parts) -> Iterator[None]:
    """Leave out the first `parts` of `left_out`."""
    with ExitStack() as stack:
        for place, patches in enumerate(left_out.values()):
            for target, stub in patches.items() if place < parts else ():
                stack.enter_context(patch(target, stub))
        if parts == len(left_out):
            stack.enter_context(patch.dict(RULES, dict.fromkeys(RULES, _no_rule)))
        yield


_NOISE: Parts = {
    "noise of the release": {"dpcert.privacy.noise.standard_normal": lambda count, key, step: np.zeros(count)},
    "noise of the views": {"dpcert.training.step.normal_at_positions": _no_view_noise},
}
LEFT_OUT: Parts = {
    **_NOISE,
    "norms and sum in float64": {"dpcert.gradients.sums.Sums.add": _only_form},
    "products": {"dpcert.gradients.sums.Sums.add": lambda *_: None, "dpcert.gradients.layers.product": _no_product},
    "patches, biases, norm layers": {},  # all rules
}
LEFT_OUT_OF_MACHINE_CODE: Parts = {
    **_NOISE,
    "sum in float64": {"dpcert.chains.chain.Chain.add": lambda *_: None},
    "backward pass, gradients and norms": {"dpcert.chains.chain.Chain.backward": _no_squares},
    "forward pass": {"dpcert.chains.chain.Chain.forward": _no_logits},
}


def cpu_seconds(step: Step) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began


def profiled(ours: Step, bases: list[Step], rounds: int, left_out: Parts) -> dict[str, float]:
    """Milliseconds of each part, of the whole step and of the best non-private step: medians over interleaved rounds."""
    stages: list[list[float]] = [[] for _ in range(len(left_out) + 1)]
    others: list[list[float]] = [[] for _ in bases]
    for _ in range(rounds + 2):
        for parts, seen in enumerate(stages):
            with without(parts, left_out):
                seen += [cpu_seconds(ours)]
        for base, seen in zip(bases, others, strict=True):
            seen += [cpu_seconds(base)]
    medians = [1e3 * statistics.median(seen[2:]) for seen in stages]
    costs = {name: medians[place] - medians[place + 1] for place, name in enumerate(left_out)}
    return {**costs, REST: medians[-1], WHOLE: medians[0], BASE: min(1e3 * statistics.median(seen[2:]) for seen in others)}


def cases(batch: int) -> Iterator[tuple[str, Step, list[Step], Parts]]:
    mnist, images = load_dataset("mnist"), backbone_step.images(batch)
    for copies in (0, 2, 8):
        bases = [training_step.ordinary(mnist, copies, size, channels_last=True) for size in (64, 128)]
        if training_step.fastest_engine(mnist) == COMPILED:
            yield (
                f"CNN, K = {copies}, compiled",
                training_step.private(mnist, copies, COMPILED),
                bases,
                LEFT_OUT_OF_MACHINE_CODE,
            )
        yield f"CNN, K = {copies}", training_step.private(mnist, copies, "layerwise"), bases, LEFT_OUT
    bases = [backbone_step.ordinary(images, size) for size in (16, 32)]
    for name, trained in {"all": "", "last stage": "stage3", "head": "head"}.items():
        yield f"backbone, {name}", backbone_step.private(images, trained), bases, LEFT_OUT


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    keep_freed_memory()
    rounds, batch = (2, 16) if options.quick else (options.rounds, 128)
    title = f"ms of CPU time, one thread; CNN B = 512, backbone B = {batch}, K = 2; in brackets: of the non-private step"
    tables = [Table("", *parts, REST, WHOLE, BASE, title=title) for parts in (LEFT_OUT_OF_MACHINE_CODE, LEFT_OUT)]
    result = {}
    for name, ours, bases, parts in cases(batch):
        result[name] = found = profiled(ours, bases, rounds, parts)
        tables[parts is LEFT_OUT].add_row(name, *(f"{ms:.1f} ({ms / found[BASE]:.2f})" for ms in found.values()))
    for table in tables:
        Console(width=200).print(table)
    print(save("profile_step", {"rounds": rounds, "batch": batch, **result}))


if __name__ == "__main__":
    main()
