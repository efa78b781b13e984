"""Check what a model returns, and explain in one line why it fails.

Works on any `nn.Module` or function, without knowledge of its layers.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError
from .shapes import channels_last, transpose_advice

_LONGEST_REASON = 200
# Parts of torch.func.vmap's error messages, in lower case, and what to tell the user instead.
_VMAP_REASONS = {
    ".item()": "it reads the value of a tensor (.item(), float(), if, while); keep it a tensor, decide with torch.where",
    "data-dependent control flow": "it decides by the value of a tensor (if, while); use torch.where",
    "random operation": "it draws random numbers; remove that layer or call .eval() on it",
    "dynamic shape": "the shape of a tensor depends on its values (nonzero, masks as an index); use torch.where",
    "inplace": "it changes a tensor in place; write x = x + y instead of x += y",
    "broadcast shape": "it changes a tensor in place; write x = x + y instead of x += y",
    "data pointer": "it leaves PyTorch (.numpy(), .tolist()); use tensor operations only",
    "storage": "it leaves PyTorch (.numpy(), .tolist()); use tensor operations only",
}


def logits_of(output: Any, rows: int | None = None, classes: int | None = None) -> Tensor:
    """Return the logits ``[rows, classes]`` of a model; raise `ModelError` for any other output."""
    if not isinstance(output, Tensor):
        raise ModelError(f"the model returns {_kind(output)}, must return a tensor of logits [rows, classes]{_remedy(output)}")
    if not output.is_floating_point():
        raise ModelError(f"the model returns {output.dtype}, must return float logits [rows, classes], not classes")
    if classes is not None and output.shape[1:] != (classes,):
        raise ModelError(
            f"the model returns outputs of shape {list(output.shape[1:])}, the data has {classes} classes; "
            "it must return logits of shape [rows, classes]"
        )
    if output.ndim != 2 or output.shape[1] < 2 or (rows is not None and len(output) != rows):
        shape = f"{list(output.shape)}" + ("" if rows is None else f" for {rows} inputs")
        raise ModelError(f"the classifier returns outputs of shape {shape}, must be [rows, 2 or more classes]")
    return output


def _kind(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a mapping with the keys {', '.join(map(str, output))[:_LONGEST_REASON]}"
    if isinstance(output, Sequence) and not isinstance(output, str):
        return f"a {type(output).__name__} of {len(output)}"
    return "nothing" if output is None else f"a {type(output).__name__}"


def _remedy(output: Any) -> str:
    if isinstance(output, Mapping):
        keys = [key for key, value in output.items() if isinstance(value, Tensor)]
        return f"; return output[{keys[0]!r}]" if keys else ""
    return "; return only the logits, e.g. output[0]" if isinstance(output, Sequence) else ""


def require_logits(model: Callable[[Tensor], Any], x: Tensor) -> None:
    """Run the model on ``x [rows, ...]`` once; raise `ModelError` unless it accepts them and returns logits."""
    try:
        output = model(x)
    except ModelError:
        raise
    except Exception as error:  # any model may come here
        raise does_not_take(tuple(x.shape[1:]), error) from error
    logits_of(output, len(x))


def does_not_take(shape: Sequence[int], error: Exception) -> ModelError:
    """Return the error for a model that failed on inputs of this shape."""
    advice = f"; {transpose_advice((0, *shape))}" if channels_last(shape) else ""
    return ModelError(f"the model does not take inputs of shape {list(shape)}: {_first_line(error)}{advice}")


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model; raise `ModelError` if it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # any model may come here
        remedy = "nn.utils.parametrizations.weight_norm can be copied, nn.utils.weight_norm cannot"
        raise ModelError(f"the model cannot be copied: {_first_line(error)}; {remedy}") from error


@contextlib.contextmanager
def explaining_vmap() -> Iterator[None]:
    """Turn errors of `torch.func.vmap` on a model that it cannot map over examples into a `ModelError`."""
    try:
        yield
    except Exception as error:  # any model may come here
        words = str(error).lower()
        if isinstance(error, (ModelError, MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in words:
            raise
        reason = next((text for sign, text in _VMAP_REASONS.items() if sign in words), _first_line(error))
        raise ModelError(f"per-example gradients cannot be computed because of the forward pass: {reason}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{lines[0] or type(error).__name__}"[:_LONGEST_REASON]
