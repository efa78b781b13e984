"""Activation checkpointing: keep the values between segments of a proven trace, and compute the rest again when needed.

Memory use is that of one segment, instead of the whole model. Clipping needs the norm over all parameters before the first
sum, so the backward pass runs twice (`sums`): a step takes about twice as long.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import vmap

from .engine import LossOfOne
from .layers import Buffers
from .parts import PLAIN, Arithmetic, Part
from .traced import Run, Traced


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a trace. The result of one node before them, `entry`, is all they need; `exit` is their result."""

    nodes: list[fx.Node]
    entry: fx.Node
    exit: fx.Node
    names: list[str]  # the trained parameters they use


def segments(traced: Traced) -> list[Segment]:
    """Split the trace where one value is all that is passed on, into segments of about equal length.

    A parameter is used in one segment only, so that its gradient is complete there.
    """
    calls = [node for node in traced.proven.module.graph.nodes if node.op not in ("get_attr", "placeholder", "output")]
    (start,) = (node for node in traced.proven.module.graph.nodes if node.op == "placeholder")
    (end,) = (node for node in traced.proven.module.graph.nodes if node.op == "output")
    spans, length = _spans(traced, calls), math.isqrt(len(calls)) + 1
    found: list[Segment] = []
    first, entry = 0, start
    for last, node in enumerate(calls):
        only = _passed_on(calls, start, last)
        split = any(low <= last < high for low, high in spans.values())
        if last + 1 == len(calls) or (only is not None and not split and last + 1 - first >= length):
            leaves = end.all_input_nodes[0] if last + 1 == len(calls) else only
            assert leaves is not None, node
            names = [name for name, (low, _) in spans.items() if first <= low <= last]
            found.append(Segment(calls[first : last + 1], entry, leaves, names))
            first, entry = last + 1, leaves
    return found


def _spans(traced: Traced, calls: list[fx.Node]) -> dict[str, tuple[int, int]]:
    """Return the first and the last call that uses each trained parameter."""
    spans: dict[str, tuple[int, int]] = {}
    for place, node in enumerate(calls):
        for name in traced.used_by(node):
            spans[name] = (spans.get(name, (place, place))[0], place)
    return spans


def _passed_on(calls: list[fx.Node], start: fx.Node, last: int) -> fx.Node | None:
    """Return the one value that calls after `last` need from before; None if there are several."""
    done = {start, *calls[: last + 1]}
    needed = {value for node in calls[last + 1 :] for value in node.all_input_nodes if value in done}
    return needed.pop() if len(needed) == 1 else None


class Checkpointed:
    """One forward pass that keeps the values between segments; `backward` then gives the gradients, as often as needed."""

    def __init__(
        self,
        traced: Traced,
        parts: list[Segment],
        loss: LossOfOne,
        views: Tensor,
        labels: Tensor,
        arithmetic: Arithmetic = PLAIN,
    ) -> None:
        self._traced, self._segments, self._loss, self._labels = traced, parts, loss, labels
        self._arithmetic = arithmetic
        self._shape, self._entries = views.shape[:2], [views.flatten(0, 1)]
        with torch.no_grad():
            for segment in parts[:-1]:
                self._entries.append(Run(traced).through(segment.nodes, segment.entry, self._entries[-1], segment.exit))
        self._first = next(place for place, segment in enumerate(parts) if segment.names)

    def backward(self, model: nn.Module) -> Iterator[dict[str, Part]]:
        """Yield the gradients of the parameters of each segment, from the last to the first one with trained parameters.

        The memory that the rules use is that of one segment too: it is not kept for the next one.
        """
        arriving: Tensor | None = None
        for place in range(len(self._segments) - 1, self._first - 1, -1):
            segment, run, entry = self._segments[place], Run(self._traced), self._entries[place].detach()
            passes_on = place > self._first
            with torch.enable_grad():
                result = run.through(segment.nodes, segment.entry, entry.requires_grad_(passes_on), segment.exit)
                if arriving is None:
                    logits = torch.unflatten(result, 0, self._shape)
                    result = vmap(self._loss)(logits, self._labels).sum()
                wanted = [*run.outputs, *([entry] if passes_on else [])]
                found = torch.autograd.grad(result, wanted, arriving, allow_unused=True, materialize_grads=True)
            arriving = found[-1] if passes_on else None
            unused = self._traced.unused if place == len(self._segments) - 1 else []
            yield self._traced.parts(run, found, model, [*segment.names, *unused], self._shape[0], self._memory)

    def _memory(self, place: Any) -> Buffers:
        return Buffers(self._arithmetic)
