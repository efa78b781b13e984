"""Track which records a module's weights were trained on, so that a second run on the same records is charged for both.

`dpcert.train` trains in place. Weights that were trained on a record depend on it, so the epsilon of the second run alone
would be too small. The history is stored on the module and its trained submodules, and by the digests of its trained tensors
(for weights that were copied into another module). A later run on any of the same records composes with the earlier ones. If
an earlier run was not private, epsilon is infinite.

This covers only the current process, and only weights that were copied unchanged. Weights from a file or another program, or
computed from trained weights (such as an average of two models in a new module), have no history: the privacy statement
lists the condition that initial weights must not depend on the records.
"""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.hashes import record_hashes
from ..data.images import is_read_by_index
from ..privacy.accounting import GaussianSteps
from ..privacy.ledger import ASSUMED_INDEPENDENT, NOT_PRIVATE, TRAINED_BEFORE, Ledger
from ..privacy.statement import SEEN_WITHOUT_PRIVACY, why_not_private
from ..progress import Progress, silent

_ATTRIBUTE = "dpcert_seen"


@dataclass(frozen=True, eq=False)
class Seen:
    """One training run: the hashes of its records (None: unknown, so possibly any), and what it charged (None: not private)."""

    records: Callable[[], np.ndarray] | None
    releases: tuple[GaussianSteps, ...] | None

    def __deepcopy__(self, memo: object) -> "Seen":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Drop the record hashes: a pickled module may be shared, and even keyed hashes could reveal who is in the data.

        An unpickled module may have been trained on any records.
        """
        return Seen, (None, self.releases)


_SEEN_BY_TENSOR: dict[bytes, tuple[Seen, ...]] = {}


def initial_facts(model: nn.Module, images: Tensor, progress: Progress = silent) -> dict[str, Any]:
    """Return the facts about the initial weights for the ledger's first line."""
    history = _history(model)
    records = record_hashes(images, progress) if history else np.empty(0, dtype=np.uint64)
    again = [seen for seen in history if seen.records is None or len(np.intersect1d(seen.records(), records))]
    if any(seen.releases is None for seen in again):
        return {"initial_weights": NOT_PRIVATE}
    earlier = [release for seen in again for release in seen.releases or ()]
    if not earlier:
        return {"initial_weights": ASSUMED_INDEPENDENT}
    return {"initial_weights": TRAINED_BEFORE, "earlier": Ledger.earlier_facts(earlier)}


def remember(model: nn.Module, before: dict[str, bytes], images: Tensor, ledger: Ledger) -> None:
    """Record that `model`, whose tensors had the digests `before`, was trained on `images` as `ledger` says."""
    _note(model, before, (*_history(model), Seen(_hashes(images), _charged(ledger))))


def _hashes(images: Tensor) -> Callable[[], np.ndarray]:
    """Return a function that returns the hashes of records. Those on disk, which cannot change, are read when it is called.

    Most models are not trained twice, so most runs save a pass over their data.
    """
    if is_read_by_index(images):
        return cache(lambda: record_hashes(images))
    hashes = record_hashes(images)
    return lambda: hashes


def remember_loaded(model: nn.Module, ledger: Ledger, frozen: Collection[str] = ()) -> None:
    """Record that `model` has the weights of a finished run on unknown records: training it further composes.

    The run did not change its `frozen` parameters: other models may start from the same public values.
    """
    for module in model.modules():
        setattr(module, _ATTRIBUTE, ())  # all its weights were replaced
    if _was_trained_here(model):
        return  # their records are known
    private = why_not_private(ledger) is None
    earlier = tuple(ledger.earlier) if private else ()
    charged = _charged(ledger) if private else None
    before = {name: digest for name, digest in tensor_digests(model).items() if name in frozen}
    _note(model, before, (Seen(None, None if charged is None else (*earlier, *charged)),))


def _charged(ledger: Ledger) -> tuple[GaussianSteps, ...] | None:
    """Return the steps that a further training of these weights composes with; None if it cannot be private.

    The best trial of a charged search costs more than its own steps, and no list of steps says how much.
    """
    private = why_not_private(ledger) in (None, SEEN_WITHOUT_PRIVACY)  # earlier runs are already in the history
    return tuple(ledger.own_releases()) if private and ledger.selection is None else None


def _note(model: nn.Module, before: dict[str, bytes], history: tuple[Seen, ...]) -> None:
    trained = {name: digest for name, digest in tensor_digests(model).items() if before.get(name) != digest}
    _SEEN_BY_TENSOR.update(dict.fromkeys(trained.values(), history))
    for path, module in model.named_modules():  # trained submodules too: they may be reused in another model
        if not path or any(name.startswith(f"{path}.") for name in trained):
            setattr(module, _ATTRIBUTE, history)


def tensor_digests(model: nn.Module) -> dict[str, bytes]:
    """Return a digest of each parameter; constant ones (a bias of zeros) are left out, since any new model has them."""
    digests = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().contiguous().flatten()
        if values.numel() and not bool((values == values[0]).all()):
            digests[name] = hashlib.blake2b(values.view(torch.uint8).numpy().data, digest_size=16).digest()
    return digests


def _was_trained_here(model: nn.Module) -> bool:
    """Return whether all weights were trained in this process; without a digest nothing is known."""
    digests = tensor_digests(model).values()
    return bool(digests) and all(digest in _SEEN_BY_TENSOR for digest in digests)


def _history(model: nn.Module) -> tuple[Seen, ...]:
    """Return every training run of these weights, without duplicates."""
    noted = [seen for module in model.modules() for seen in getattr(module, _ATTRIBUTE, ())]
    digests = tensor_digests(model).values()
    if _was_trained_here(model):  # the records are known exactly
        noted = [seen for seen in noted if seen.records is not None]
    by_tensor = [seen for digest in digests for seen in _SEEN_BY_TENSOR.get(digest, ())]
    return tuple(dict.fromkeys([*noted, *by_tensor]))
