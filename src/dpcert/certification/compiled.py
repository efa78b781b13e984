"""Run a model, or the rest of a split model, as machine code or in ONNX Runtime, if that is installed, correct and fast.

On a CPU, PyTorch spends most of a vote in tanh and max-pool; ONNX Runtime needs a fraction of that time. It also folds the
BatchNorm of a frozen network, its activations and its shortcuts into the convolutions, in its own copy of the weights. The
compiled model is used only if its logits agree with PyTorch's up to rounding, for several batch sizes, if each row of a batch
has the logits that it has alone, and if it is measured to be as fast. Otherwise PyTorch is used.

A chain of known layers can be compiled to machine code (`chains`) where there is a C++ compiler. It is used under the same
conditions if it takes at most half the time of PyTorch; ONNX Runtime is not asked then.
"""

import importlib.util
import io
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..chains.chain import Chain, compiled_chain
from ..chains.layers import named_layers
from ..errors import ModelError
from ..isolation import Forward, dissimilar_rows
from .bank import SplitModel, agree

Rest = Callable[[Tensor, Tensor], Tensor]
REST_INPUTS, WHOLE_INPUTS = ("noise", "features"), ("rows",)
_ROWS = 128
_BATCHES = (1, 5, _ROWS)
_ABOUT_AS_FAST, _CLEARLY_FASTER = 1.25, 0.5


class _NoisePlusFeatures(nn.Module):
    def __init__(self, cut: SplitModel) -> None:
        super().__init__()
        self.cut, self.model = cut, cut.model

    def forward(self, noise: Tensor, features: Tensor) -> Tensor:
        return self.cut.logits(noise + features)


class Compiled:
    """A graph in ONNX Runtime, called with its inputs in order. Its bytes can be run by another process."""

    def __init__(self, graph: bytes, inputs: Sequence[str]) -> None:
        self.graph, self._inputs, self._session = graph, tuple(inputs), _session(graph)

    def __call__(self, *values: Tensor) -> Tensor:
        """Return the logits."""
        feeds = {name: value.contiguous().numpy() for name, value in zip(self._inputs, values, strict=True)}
        return torch.from_numpy(self._session.run(None, feeds)[0])


class MachineCode:
    """A chain with its weights: logits of rows, or of noise plus features. Each row is computed alone, to the bit."""

    def __init__(self, chain: Chain, model: nn.Module) -> None:
        self._chain, self._weights = chain, chain.pack(model)

    def __call__(self, rows: Tensor, shift: Tensor | None = None) -> Tensor:
        """Return the logits."""
        last = rows.ndim == 4 and rows.is_contiguous(memory_format=torch.channels_last)
        if last:
            rows, shift = rows.movedim(1, -1), None if shift is None else shift.movedim(1, -1)
        return self._chain.forward(rows, self._weights, shift=shift, last=last)


def rest_as_machine_code(cut: SplitModel, features: Tensor) -> MachineCode | None:
    """``(noise [n, ...], features [1, ...]) -> logits`` as machine code, or None."""
    layers = list(named_layers(cut.model))
    names = [name for name, _ in layers]
    rest = nn.Sequential(*(layer for _, layer in layers[names.index(cut.name) + 1 :])) if cut.name in names else nn.Identity()
    return _as_machine_code(rest, lambda a, b: cut.logits(a + b), _probe(features), features)


def whole_as_machine_code(model: nn.Module, x: Tensor, sigma: float) -> MachineCode | None:
    """``rows [n, ...] -> logits`` as machine code, or None; `x` are some inputs."""
    return _as_machine_code(model, model, _noisy(x, sigma))


def _as_machine_code(model: nn.Module, plain: Callable[..., Tensor], rows: Tensor, *shift: Tensor) -> MachineCode | None:
    try:
        chain = compiled_chain(model, tuple(rows.shape[1:]))
        if chain is None:
            return None
        code = MachineCode(chain, model)
        with torch.inference_mode():
            right = all(agree(code(rows[:n], *shift), plain(rows[:n], *shift)) for n in _BATCHES)
            return code if right and _seconds(code, rows, *shift) < _CLEARLY_FASTER * _seconds(plain, rows, *shift) else None
    except Exception:  # the model rejects the probe inputs
        return None


def compile_rest(cut: SplitModel, features: Tensor) -> Compiled | None:
    """``(noise [n, ...], features [1, ...]) -> logits`` by ONNX Runtime, or None.

    `features` is the first layer's output for some input.
    """
    noise = _probe(features)
    try:
        rest = _compiled(_NoisePlusFeatures(cut), {"noise": noise[:3], "features": features}, REST_INPUTS[:1])
        if rest is None:
            return None
        with torch.inference_mode():
            right = all(agree(rest(noise[:n], features), cut.logits(noise[:n] + features)) for n in _BATCHES)
            usable = right and _is_fast(rest, lambda a, b: cut.logits(a + b), noise, features)
    except Exception:  # what the exporter or the runtime cannot do is run by PyTorch
        return None
    return rest if usable else None


def compile_whole(model: nn.Module, x: Tensor, sigma: float) -> Compiled | None:
    """``rows [n, ...] -> logits`` by ONNX Runtime, or None. `model` must keep rows apart; `x` are some inputs."""
    rows = _noisy(x, sigma)
    try:
        whole = _correct(model, rows)
        with torch.inference_mode():
            usable = whole is not None and _is_fast(whole, model, rows)
    except Exception:  # what the exporter or the runtime cannot do is run by PyTorch
        return None
    return whole if usable else None


def whole_graph(model: nn.Module, x: Tensor, sigma: float) -> bytes:
    """Return the ONNX graph ``rows [n, ...] -> logits``, for another runtime. Its logits agree with PyTorch's up to rounding.

    `model` must keep rows apart; `x` are some inputs.
    """
    try:
        whole = _correct(model, _noisy(x, sigma))
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"the model cannot be exported to ONNX ({why}); use operations that torch.onnx supports") from error
    if whole is None:
        raise ModelError(
            "the model as an ONNX graph does not compute what it computes in PyTorch, or onnxruntime is missing; "
            "install it with: pip install 'dpcert[fast]'"
        )
    return whole.graph


def _probe(features: Tensor) -> Tensor:
    """Return noise of about the size of the features."""
    return torch.randn((_ROWS, *features.shape[1:]), generator=torch.Generator().manual_seed(0)) * features.abs().mean()


def _noisy(x: Tensor, sigma: float) -> Tensor:
    rows = x[torch.arange(_ROWS) % len(x)]
    return rows + sigma * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))


def _correct(model: nn.Module, rows: Tensor) -> Compiled | None:
    """Return the compiled model; None if it differs from PyTorch, mixes rows, or ONNX Runtime is not installed."""
    whole = _compiled(model, {"rows": rows[:3]}, WHOLE_INPUTS)
    if whole is None:
        return None
    with torch.inference_mode():
        right = all(agree(whole(rows[:n]), model(rows[:n])) for n in _BATCHES) and _rows_stay_apart(whole, rows)
    return whole if right else None


def load_compiled(graph: bytes, inputs: Sequence[str]) -> Compiled:
    """Return a graph that another process compiled and chose, to run here what runs there."""
    try:
        return Compiled(graph, inputs)
    except Exception as error:
        raise ModelError(
            f"this process cannot run the ONNX graph that rank 0 uses ({error or type(error).__name__}); "
            "install the same onnxruntime everywhere, or nowhere"
        ) from error


def seconds_a_row(model: nn.Module, x: Tensor) -> float:
    """Return how long a row takes in PyTorch; `x` is one input."""
    rows = x.expand(_ROWS, *x.shape[1:]).contiguous()
    return _seconds(model, rows) / _ROWS


def _rows_stay_apart(whole: Forward, rows: Tensor) -> bool:
    """Return whether each row of a batch has the logits that it has alone, up to rounding."""
    mixed = torch.cat([dissimilar_rows(tuple(rows.shape[1:])), rows[:6]])
    orders = (torch.arange(len(mixed)), torch.arange(len(mixed)).flip(0), torch.arange(0, len(mixed), 2))
    alone = [whole(row) for row in mixed.split(1)]  # type: ignore[no-untyped-call]
    return all(
        agree(logits, alone[int(row)][0]) for order in orders for row, logits in zip(order, whole(mixed[order]), strict=True)
    )


def _compiled(model: nn.Module, inputs: dict[str, Tensor], batched: Sequence[str]) -> Compiled | None:
    """Return the model in ONNX Runtime, or None if that is not installed; the first dimension of `batched` inputs is free."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    return Compiled(_exported(model, inputs, batched), tuple(inputs))


def _session(graph: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # the cores work on different inputs
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, ["CPUExecutionProvider"])


def _exported(model: nn.Module, inputs: dict[str, Tensor], batched: Sequence[str]) -> bytes:
    data, quiet = io.BytesIO(), logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.eval(),
                tuple(inputs.values()),
                data,  # type: ignore[arg-type]
                dynamo=False,
                input_names=list(inputs),
                output_names=["logits"],
                dynamic_axes={name: {0: "n"} for name in (*batched, "logits")},
                opset_version=17,
            )
    finally:
        quiet.setLevel(level)
    return data.getvalue()


def _is_fast(compiled: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Return whether the compiled model is at least about as fast.

    Large convolutions take the same time in both. Chance must not choose then: the same model is to run in the same way.
    """
    return _seconds(compiled, *inputs) < _ABOUT_AS_FAST * _seconds(plain, *inputs)


def _seconds(run: Callable[..., Tensor], *inputs: Tensor) -> float:
    """Return the processor time of a call on one thread, as a worker runs it; other programs hardly change it."""
    threads, best = torch.get_num_threads(), float("inf")
    torch.set_num_threads(1)
    try:
        for _ in range(4):
            began = time.thread_time()
            run(*inputs)
            best = min(best, time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return best
