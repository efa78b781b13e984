"""Public weights: safetensors files with a model card, from the package or from a path. Never a pickle."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, ModelError
from ..store.durable import read_file, sha256_hex
from .checkpoint import load_weights, parse_tensors
from .crossvit import CrossViTClassifier, load_published
from .parts import head_name

PACKAGED = ("resnet-48", "fashion-cnn")
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
        raise ModelError(
            f"model.weights: {source} cannot be read: {error.strerror or error}; pass its path with --set model.weights=FILE "
            "(docs/how-to/pretrained-models.md)"
        ) from error


def parse_weights(data: bytes, name: str) -> PublicWeights:
    """Parse the bytes of a file of weights. Without a model card, the statement says that its data is not stated."""
    tensors = parse_tensors(data, f"model.weights {name}")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    try:
        card, sketch = json.loads(header.get("dpcert_card", "{}")), json.loads(header.get("data_sketch", "[]"))
        described = str(card.get("data", UNKNOWN_DATA))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"model.weights {name} has a damaged model card ({error}); use an undamaged file") from error
    return PublicWeights(name, sha256_hex(data), described, tensors, card, tuple(map(str, sketch)))


def with_statistics_of(weights: PublicWeights, stages: tuple[int, ...]) -> PublicWeights:
    """Return packaged weights with the feature statistics of more stages than the last, computed on the same public images.

    scripts/stage_statistics.py made the file; it names the weights it belongs to.
    """
    if stages == (3,):
        return weights
    if weights.name not in PACKAGED:
        raise ModelError(
            f"model.stages needs feature statistics, which {weights.name} has for its last stage only; leave it out"
        )
    name = f"{weights.name}-stages"
    data = resources.files(__package__).joinpath(f"pretrained/{name}.safetensors").read_bytes()
    more = parse_weights(data, name)
    if more.card.get("weights_sha256") != weights.sha256:
        raise ModelError(f"{name} belongs to other weights than {weights.name}; install dpcert again")
    last = {kind: weights.tensors[f"standardize.{kind}"] for kind in ("mean", "scale")}
    joined = {
        f"standardize.{kind}": torch.cat(
            [more.tensors[f"stage{stage}.{kind}"] for stage in stages if stage != 3] + [last[kind]]
        )
        for kind in last
    }
    named = f"{weights.name} (statistics of stages {', '.join(map(str, stages))}: SHA-256 {more.sha256[:16]}...)"
    return replace(weights, name=named, tensors={**weights.tensors, **joined})


def load_public(model: nn.Module, weights: PublicWeights) -> None:
    """Load public weights into `model`; its head, which the file has for other classes, starts at zero.

    All other tensors must be in the file with the same names and shapes, and no others.
    """
    trained = weights.card.get("model")
    hint = f" (weights of model.name={trained})" if isinstance(trained, str) else ""
    origin = f"model.weights {weights.name}{hint}"
    if isinstance(model, CrossViTClassifier):
        load_published(model.network, weights.tensors, origin)
        return
    head = f"{head_name(model)}."
    fresh = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if name.startswith(head)}
    given = {name: tensor for name, tensor in weights.tensors.items() if not name.startswith(head)}
    load_weights(model, {**given, **fresh}, origin)


def refuse_same_images(weights: PublicWeights, digests: Iterable[str], whose: str) -> None:
    """Raise if images occur in the data that the weights were trained on: epsilon would not cover them."""
    known = set(weights.sketch)
    if known and len(known.intersection(digests)) > _MOST_OVERLAP * len(known):
        raise DataError(
            f"the weights {weights.name} were pretrained on images of {whose} ({weights.data}); epsilon would not cover that "
            "use: choose other weights"
        )
