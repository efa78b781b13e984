"""CPU time of a clipped sum for each model setting, relative to the paper's CNN. JSON on stdout.

OMP_NUM_THREADS=1 python benchmarks/model_costs.py
"""

import json
import time
from typing import Any

import torch

from dpcert.gradients.choose import choose
from dpcert.gradients.engine import Clip
from dpcert.losses import cross_entropy
from dpcert.models.registry import build_model
from dpcert.privacy.clipping import Flat

EXAMPLES, VIEWS, REPETITIONS = 160, 3, 7
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("cnn", {}),
    *(("cnn", {"width": width}) for width in (2, 3, 4)),
    *(("cnn", {"norm": norm}) for norm in ("group", "plain")),
    ("cnn", {"pool": "average"}),
    ("cnn", {"blur": 1.0}),
    ("cnn", {"input_scale": 0.67}),
    ("lenet", {}),
    ("lenet", {"norm": "none"}),
]


def cpu_seconds(name: str, settings: dict[str, Any]) -> tuple[float, int]:
    """The least CPU time of several calls, and the number of trained parameters."""
    model = build_model(name, seed=0, **settings)
    (engine,) = choose("auto", model, cross_entropy, (1, 28, 28))
    views, labels = torch.rand(EXAMPLES, VIEWS, 1, 28, 28), torch.randint(0, 10, (EXAMPLES,))
    times = []
    for _ in range(REPETITIONS + 1):
        began = time.process_time()
        engine(model, cross_entropy, views, labels, Clip(Flat(), 0.1))
        times.append(time.process_time() - began)
    return min(times[1:]), sum(p.numel() for p in model.parameters() if p.requires_grad)


def main() -> None:
    """Measure all settings."""
    torch.set_num_threads(1)
    base, rows = 0.0, []
    for name, settings in SETTINGS:
        seconds, parameters = cpu_seconds(name, settings)
        base = base or seconds
        rows.append({"model": name, **settings, "parameters": parameters, "cpu_seconds": seconds, "relative": seconds / base})
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
