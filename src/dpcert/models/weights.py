"""Public weights: safetensors files with a model card, from the package or from a path. Never a pickle."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from ..errors import DataError, ModelError
from ..store.durable import read_file, sha256_hex
from .parts import head_name, parameters_of

PACKAGED = ("resnet-48",)
_MOST_OVERLAP = 0.01
UNKNOWN_DATA = "not stated by the file"


@dataclass(frozen=True)
class PublicWeights:
    """A file of public weights: its tensors, and what its header says about the data it was trained on."""

    name: str
    sha256: str
    data: str
    tensors: dict[str, Tensor] = field(repr=False)
    card: dict[str, Any] = field(default_factory=dict, repr=False)
    sketch: tuple[str, ...] = field(default=(), repr=False)  # of the images it was trained on (`data.fingerprint`)

    @property
    def facts(self) -> dict[str, str]:
        """What the ledger and the statement record."""
        return {"name": self.name, "sha256": self.sha256, "data": self.data}


def read_weights(source: str) -> PublicWeights:
    """Read weights by the name of a packaged file, or by the path of a ``.safetensors`` file."""
    if source in PACKAGED:
        return parse_weights(resources.files(__package__).joinpath(f"pretrained/{source}.safetensors").read_bytes(), source)
    path = Path(source)
    if path.suffix != ".safetensors":
        raise ModelError(f"model.weights is {source!r}, must be one of: {', '.join(PACKAGED)}, or a .safetensors file")
    try:
        return parse_weights(read_file(path), path.name)
    except OSError as error:
        raise ModelError(f"model.weights: {source} cannot be read: {error.strerror or error}; check the path") from error


def parse_weights(data: bytes, name: str) -> PublicWeights:
    """Parse the bytes of a file of weights; every tensor must be finite."""
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
        card = json.loads(header.get("dpcert_card", "{}"))
        sketch = tuple(str(digest) for digest in json.loads(header.get("data_sketch", "[]")))
        described = str(card.get("data", UNKNOWN_DATA))
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"model.weights: {name} is not a safetensors file ({str(error)[:120]}); convert it, pickled files are never read"
        ) from error
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"model.weights: tensor {key!r} of {name} contains NaN or infinity; use an undamaged file")
    return PublicWeights(name, sha256_hex(data), described, tensors, card, sketch)


def load_public(model: nn.Module, weights: PublicWeights) -> None:
    """Load public weights into `model`; its head, which the file has for other classes, starts at zero.

    All other tensors must be in the file with the same names and shapes, and no others.
    """
    head = head_name(model)
    wanted = {key: value for key, value in model.state_dict().items() if value.is_floating_point()}
    wanted = {key: value for key, value in wanted.items() if not key.startswith(f"{head}.")}
    given = {key: value for key, value in weights.tensors.items() if value.is_floating_point() and not key.startswith(f"{head}.")}
    _require_same_keys(wanted, given, weights)
    for key, value in wanted.items():
        if given[key].shape != value.shape:
            shapes = f"{list(given[key].shape)}, the model needs {list(value.shape)}"
            raise ModelError(f"model.weights: tensor {key!r} of {weights.name} has shape {shapes}; {_advice(weights)}")
    with torch.no_grad():
        for key, value in wanted.items():
            value.copy_(given[key])
        for name, parameter in model.named_parameters():
            if name in parameters_of(model, head):
                parameter.zero_()


def refuse_same_images(weights: PublicWeights, digests: Iterable[str], whose: str) -> None:
    """Raise if images occur in the data that the weights were trained on: epsilon would not cover them."""
    known = set(weights.sketch)
    if known and len(known.intersection(digests)) > _MOST_OVERLAP * len(known):
        raise DataError(
            f"the weights {weights.name} were pretrained on images of {whose} ({weights.data}); epsilon would not cover that "
            "use: choose other weights"
        )


def _require_same_keys(wanted: dict[str, Tensor], given: dict[str, Tensor], weights: PublicWeights) -> None:
    missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    for keys, what in ((missing, "lacks"), (extra, "has the extra")):
        if keys:
            others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(f"model.weights: {weights.name} {what} tensor {keys[0]!r}{others}; {_advice(weights)}")


def _advice(weights: PublicWeights) -> str:
    trained = weights.card.get("model")
    return f"it is for model.name={trained}" if isinstance(trained, str) else "use weights of this architecture"
