"""Load weights from a ``.safetensors`` file into a model. A mismatch is a `ModelError` in one line; nothing is unpickled."""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import ModelError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file, all finite, floating-point ones as float32."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}); check the name of the weights file") from error
    return parse_tensors(data, str(path))


def parse_tensors(data: bytes, origin: str) -> dict[str, Tensor]:
    """Like `read_tensors`, from bytes; `origin` names them in errors."""
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{origin} is not a .safetensors file ({reason}); convert the weights or download them again"
        ) from error
    single = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    for name, tensor in single.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{origin}: tensor {name!r} has NaN or infinite values; download or convert the weights again")
    return single


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Copy `tensors` into the parameters and floating-point buffers of the model: same names, same shapes, none left out.

    Counters such as BatchNorm's ``num_batches_tracked`` are not weights; they are ignored on both sides.
    """
    targets = {name: target for name, target in model.state_dict().items() if target.is_floating_point()}
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
    _same_names(list(targets), list(given), origin)
    for name, target in targets.items():
        if given[name].shape != target.shape or not given[name].is_floating_point():
            raise ModelError(
                f"{origin}: tensor {name!r} is {given[name].dtype} {list(given[name].shape)}, "
                f"the model needs float {list(target.shape)}; use weights of this model"
            )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(given[name])


def _same_names(expected: list[str], given: list[str], origin: str) -> None:
    missing = sorted(set(expected) - set(given))
    extra = sorted(set(given) - set(expected))
    for names, what in ((missing, "has no tensor"), (extra, "has an unknown tensor")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"{origin} {what} {names[0]!r}{more}; use weights of this model")
