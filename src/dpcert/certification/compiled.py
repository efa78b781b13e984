"""Run the rest of a split model in ONNX Runtime, if that is installed, correct and faster.

On a CPU, PyTorch spends most of a vote in tanh and max-pool; ONNX Runtime needs a fraction of that time. The compiled model
is used only if its logits agree with PyTorch's up to rounding, for several batch sizes, and if it is measured to be faster.
Otherwise PyTorch is used.
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


class _NoisePlusFeatures(nn.Module):
    def __init__(self, cut: SplitModel) -> None:
        super().__init__()
        self.cut, self.model = cut, cut.model

    def forward(self, noise: Tensor, features: Tensor) -> Tensor:
        return self.cut.logits(noise + features)


def compile_rest(cut: SplitModel, features: Tensor) -> Rest | None:
    """``(noise [n, ...], features [1, ...]) -> logits`` by ONNX Runtime, or None.

    `features` is the first layer's output for some input.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    noise = torch.randn((_ROWS, *features.shape[1:]), generator=torch.Generator().manual_seed(0)) * features.abs().mean()
    try:
        session = onnxruntime.InferenceSession(
            _exported(cut, noise[:3], features), _options(onnxruntime), ["CPUExecutionProvider"]
        )

        def rest(noise: Tensor, features: Tensor) -> Tensor:
            feeds = {"noise": noise.contiguous().numpy(), "features": features.contiguous().numpy()}
            return torch.from_numpy(session.run(None, feeds)[0])

        with torch.inference_mode():
            right = all(agree(rest(noise[:n], features), cut.logits(noise[:n] + features)) for n in (1, 5, _ROWS))
            faster = right and _seconds(rest, noise, features) < _seconds(lambda a, b: cut.logits(a + b), noise, features)
    except Exception:  # what the exporter or the runtime cannot do is run by PyTorch
        return None
    return rest if faster else None


def _exported(cut: SplitModel, noise: Tensor, features: Tensor) -> bytes:
    data, quiet = io.BytesIO(), logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _NoisePlusFeatures(cut).eval(),
                (noise, features),
                data,  # type: ignore[arg-type]
                dynamo=False,
                input_names=["noise", "features"],
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


def _seconds(rest: Rest, noise: Tensor, features: Tensor) -> float:
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        rest(noise, features)
        best = min(best, time.perf_counter() - began)
    return best
