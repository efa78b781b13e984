"""What a module's weights have already seen, so that a second training on the same records is not taken for a first one.

`dpcert.train` trains in place. Weights that have seen a record depend on it, so the epsilon of another training alone would
be too small. What was seen is remembered on the module and its trained parts, and by the digests of its trained tensors (for
weights that were copied into another module). A later training on any of the same records composes with the earlier ones;
where those were not private, nothing finite can be said.

Only this process is covered, and only weights that were copied as they are. Weights that come from a file or another program,
or that were computed from trained ones (an average of two models in a new module), carry no such memory: the privacy
statement names the condition that initial weights must not depend on the records.
"""

import hashlib
import secrets
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..privacy.accounting import GaussianSteps
from ..privacy.ledger import ASSUMED_INDEPENDENT, NOT_PRIVATE, TRAINED_BEFORE, Ledger
from ..privacy.statement import SEEN_WITHOUT_PRIVACY, why_not_private

_ATTRIBUTE = "dpcert_seen"
_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Seen:
    """One training: which records (None: not known, so perhaps any), and what it charged for them (None: not private)."""

    records: np.ndarray | None
    releases: tuple[GaussianSteps, ...] | None

    def __deepcopy__(self, memo: object) -> "Seen":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled module goes to other people: hashes of the records, even keyed ones, could tell who was among them.

        What comes back may have seen any records.
        """
        return Seen, (None, self.releases)


_SEEN_BY_TENSOR: dict[bytes, tuple[Seen, ...]] = {}


def initial_facts(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """What the ledger's first line says about the initial weights."""
    history = _history(model)
    records = record_hashes(images) if history else np.empty(0, dtype=np.uint64)
    again = [seen for seen in history if seen.records is None or len(np.intersect1d(seen.records, records))]
    if any(seen.releases is None for seen in again):
        return {"initial_weights": NOT_PRIVATE}
    earlier = [release for seen in again for release in seen.releases or ()]
    if not earlier:
        return {"initial_weights": ASSUMED_INDEPENDENT}
    return {"initial_weights": TRAINED_BEFORE, "earlier": Ledger.earlier_facts(earlier)}


def remember(model: nn.Module, before: dict[str, bytes], images: Tensor, ledger: Ledger) -> None:
    """Note that `model`, whose tensors had the digests `before`, was trained on `images` as `ledger` says."""
    _note(model, before, (*_history(model), Seen(record_hashes(images), _charged(ledger))))


def remember_loaded(model: nn.Module, ledger: Ledger) -> None:
    """Note that `model` holds the weights of a finished run, whose records may be any: training it further composes."""
    for module in model.modules():
        setattr(module, _ATTRIBUTE, ())  # all its weights were replaced
    if all(digest in _SEEN_BY_TENSOR for digest in tensor_digests(model).values()):
        return  # these very weights were trained in this process: their records are known
    private = why_not_private(ledger) is None
    earlier = tuple(ledger.earlier) if private else ()
    own = _charged(ledger) if private else None
    _note(model, {}, (Seen(None, None if own is None else (*earlier, *own)),))


def _charged(ledger: Ledger) -> tuple[GaussianSteps, ...] | None:
    private = why_not_private(ledger) in (None, SEEN_WITHOUT_PRIVACY)  # earlier trainings are in the history already
    return tuple(ledger.own_releases()) if private else None


def _note(model: nn.Module, before: dict[str, bytes], history: tuple[Seen, ...]) -> None:
    trained = {name: digest for name, digest in tensor_digests(model).items() if before.get(name) != digest}
    _SEEN_BY_TENSOR.update(dict.fromkeys(trained.values(), history))
    for path, module in model.named_modules():  # a trained part remembers too: it may be built into another model
        if not path or any(name.startswith(f"{path}.") for name in trained):
            setattr(module, _ATTRIBUTE, history)


def tensor_digests(model: nn.Module) -> dict[str, bytes]:
    """A digest of each parameter; constant ones (a bias of zeros) are left out, since any fresh model has them."""
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().contiguous().flatten()
        if values.numel() and not bool((values == values[0]).all()):
            found[name] = hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=16).digest()
    return found


def _history(model: nn.Module) -> tuple[Seen, ...]:
    """Every training that these weights carry, each once."""
    noted = [seen for module in model.modules() for seen in getattr(module, _ATTRIBUTE, ())]
    digests = tensor_digests(model).values()
    if all(digest in _SEEN_BY_TENSOR for digest in digests):  # trained in this process: which records is known exactly
        noted = [seen for seen in noted if seen.records is not None]
    by_tensor = [seen for digest in digests for seen in _SEEN_BY_TENSOR.get(digest, ())]
    return tuple(dict.fromkeys([*noted, *by_tensor]))


def record_hashes(images: Tensor) -> np.ndarray:
    """A 64-bit hash of each record under a key of this process: equal records have equal hashes."""
    width = -(-images[0].numel() * images.element_size() // 8)
    words = np.zeros((min(len(images), _ROWS), width * 8), dtype=np.uint8)
    hashes = np.empty(len(images), dtype=np.uint64)
    for start in range(0, len(images), _ROWS):
        rows = images[start : start + _ROWS].contiguous().flatten(1).view(torch.uint8).numpy()
        words[: len(rows), : rows.shape[1]] = rows
        numbers = words[: len(rows)].view(np.uint64)
        hashes[start : start + len(rows)] = (numbers * _multipliers(width)).sum(axis=1, dtype=np.uint64)
    return hashes


@cache
def _multipliers(width: int) -> np.ndarray:
    drawn = np.frombuffer(secrets.token_bytes(8 * width), dtype=np.uint64)
    return drawn | np.uint64(1)
