"""The rest of a cut model in ONNX Runtime, where that is installed, right and faster.

PyTorch's tanh and max-pool take most of a vote on a CPU; ONNX Runtime's take a fraction. The compiled model is used only if
its logits agree with the model's own to rounding, for several batch sizes, and if it is measured to be faster; otherwise
nothing changes.
"""

import io
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .bank import SplitModel, agree

Rest = Callable[[Tensor, Tensor], Tensor]
_ROWS = 128


class _NoiseAndOwn(nn.Module):
    def __init__(self, made: SplitModel) -> None:
        super().__init__()
        self.made, self.model = made, made.model

    def forward(self, noise: Tensor, own: Tensor) -> Tensor:
        return self.made.logits(noise + own)


def compile_rest(made: SplitModel, own: Tensor) -> Rest | None:
    """``(noise [n, ...], own [1, ...]) -> logits`` by ONNX Runtime, or None.

    `own` is the first layer's output for some input.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    noise = torch.randn((_ROWS, *own.shape[1:]), generator=torch.Generator().manual_seed(0)) * own.abs().mean()
    try:
        session = onnxruntime.InferenceSession(_exported(made, noise[:3], own), _options(onnxruntime), ["CPUExecutionProvider"])

        def rest(noise: Tensor, own: Tensor) -> Tensor:
            feeds = {"noise": noise.contiguous().numpy(), "own": own.contiguous().numpy()}
            return torch.from_numpy(session.run(None, feeds)[0])

        with torch.inference_mode():
            right = all(agree(rest(noise[:n], own), made.logits(noise[:n] + own)) for n in (1, 5, _ROWS))
            faster = right and _seconds(rest, noise, own) < _seconds(lambda a, b: made.logits(a + b), noise, own)
    except Exception:  # what the exporter or the runtime cannot do is run by PyTorch
        return None
    return rest if faster else None


def _exported(made: SplitModel, noise: Tensor, own: Tensor) -> bytes:
    data, quiet = io.BytesIO(), logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _NoiseAndOwn(made).eval(),
                (noise, own),
                data,  # type: ignore[arg-type]
                dynamo=False,
                input_names=["noise", "own"],
                output_names=["logits"],
                dynamic_axes={"noise": {0: "n"}, "logits": {0: "n"}},
                opset_version=17,
            )
    finally:
        quiet.setLevel(level)
    return data.getvalue()


def _options(onnxruntime: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the cores work on different inputs
    options.log_severity_level = 3
    return options


def _seconds(rest: Rest, noise: Tensor, own: Tensor) -> float:
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        rest(noise, own)
        best = min(best, time.perf_counter() - began)
    return best
