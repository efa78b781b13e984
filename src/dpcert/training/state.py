"""Checkpoints, from which a killed run resumes and produces the same bytes. Safetensors and JSON with SHA-256, no pickle."""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ..data.digests import record_digests
from ..data.images import Images, chunks
from ..errors import RunError
from ..gradients.choose import LAYERWISE
from ..privacy.ledger import Ledger
from ..progress import Progress, silent
from ..rng import KEY_BYTES, Purpose, stream_bytes
from ..store import opened
from ..store.durable import canonical_json, read_file, remove, sha256_hex, write_atomically
from ..store.runs import RunDirectory
from ..store.weights import digest_of_tensors, read_facts, with_sorted_header
from .curve import Point

_BY_RECORD = "records:"  # starts an identity that is made of the digests of the records
_MODEL, _OPTIMIZER, _AVERAGE = "model.", "optimizer.", "average."
_TEXTS = ("checkpoint", "sha256", "ledger_head", "data_identity")
_STATE_TYPES = {"step": (int,), **dict.fromkeys(_TEXTS, (str,)), "config_sha256": (str, type(None)), "curve": (list,)}
_STATE_TYPES |= {"initial_weights": (str,), "engine": (str,)}


@dataclass(frozen=True)
class Origin:
    """The data and the config that a run was started with and must be resumed with (config None: there is no config file)."""

    data_identity: str
    config_sha256: str | None
    initial_weights: str = "{}"  # canonical JSON of the ledger's facts about them


@dataclass(frozen=True)
class Resumed:
    """Where a run resumes."""

    step: int
    ledger_head: str
    origin: Origin
    curve: list[Point]
    engine: str = ""  # the name of the engine; empty if no step was taken with it


def data_identity(key: bytes, images: Tensor, labels: Tensor, progress: Progress = silent, like: str | None = None) -> str:
    """Return an HMAC of the training data under the run key: identifies the data, reveals nothing without the key.

    It covers the digests of the records, which do not depend on where the records are (memory, file, map-style dataset).
    Floats in memory are covered directly, as in older versions. With `like`, the result has the form of that identity.
    """
    by_record = isinstance(images, Images) if like is None else like.startswith(_BY_RECORD)
    mac = hmac.new(stream_bytes(key, Purpose.DATA_IDENTITY, KEY_BYTES), digestmod=hashlib.sha256)
    if by_record:
        for digests in record_digests(images, labels, progress):
            mac.update(digests)
        return _BY_RECORD + mac.hexdigest()
    for tensor, report in ((images, progress), (labels, silent)):
        mac.update(canonical_json([str(tensor.dtype), list(tensor.shape)]).encode())
        for rows in chunks(tensor, report):
            mac.update(rows.numpy().data)
    return mac.hexdigest()


def save_checkpoint(
    directory: RunDirectory,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    head: str,
    origin: Origin,
    curve: Sequence[Point] = (),
    average: Sequence[Tensor] = (),
    engine: str = "",
) -> None:
    """Write weights, optimizer state and average, then the small file that refers to them, then delete older checkpoints."""
    data = checkpoint_bytes(model, optimizer, average)
    file = directory.private / f"checkpoint-{step}.safetensors"
    write_atomically(file, data, mode=0o600, real_folder=True)
    state = {"step": step, "checkpoint": file.name, "sha256": sha256_hex(data), "ledger_head": head, **asdict(origin)}
    state |= {"curve": [list(astuple(point)) for point in curve], "engine": engine}
    state["check"] = sha256_hex(canonical_json(state).encode())
    write_atomically(directory.state, (canonical_json(state) + "\n").encode(), mode=0o600, real_folder=True)
    for older in directory.private.glob("checkpoint-*.safetensors"):
        if older != file:
            remove(older)


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, average: Sequence[Tensor] = ()) -> bytes:
    """Return weights, optimizer state and average as safetensors."""
    tensors = {_MODEL + name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{index}.{name}"] = value.detach().cpu().contiguous()
    tensors |= {f"{_AVERAGE}{index}": value.detach().cpu().contiguous() for index, value in enumerate(average)}
    return save(tensors)


def steps_in_checkpoint(directory: RunDirectory) -> int:
    """Return the number of steps of the newest checkpoint; 0 if there is none yet."""
    return int(_read_state(directory.state)["step"]) if directory.state.exists() else 0


def load_checkpoint(
    directory: RunDirectory, model: nn.Module, optimizer: torch.optim.Optimizer, average: Sequence[Tensor] = ()
) -> Resumed | None:
    """Load the newest checkpoint into `model`, `optimizer` and `average`; return None if there is none yet."""
    if not directory.state.exists():
        return None
    state = _read_state(directory.state)
    file = directory.private / state["checkpoint"]
    _continue_with(load_tensors(file, state["sha256"]), file, model, optimizer, average)
    origin = Origin(state["data_identity"], state["config_sha256"], state["initial_weights"])
    return Resumed(state["step"], state["ledger_head"], origin, state["curve"], state["engine"])


def load_checkpoint_bytes(
    data: bytes, origin: str, model: nn.Module, optimizer: torch.optim.Optimizer, average: Sequence[Tensor] = ()
) -> None:
    """Load what `checkpoint_bytes` returned into `model`, `optimizer` and `average`."""
    _continue_with(_tensors(data, origin), Path(origin), model, optimizer, average)


def _continue_with(
    tensors: dict[str, Tensor], file: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Sequence[Tensor]
) -> None:
    weights = {name.removeprefix(_MODEL): value for name, value in tensors.items() if name.startswith(_MODEL)}
    load_weights(model, weights, file)
    slots: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(_OPTIMIZER):
            index, _, slot = name.removeprefix(_OPTIMIZER).partition(".")
            slots.setdefault(int(index) if index.isdecimal() else -1, {})[slot] = value
    if slots and not _fits(slots, optimizer):
        raise RunError(f"{file} does not fit the optimizer; this run cannot be resumed, start another with --out")
    _load_average(average, {name: value for name, value in tensors.items() if name.startswith(_AVERAGE)}, file)
    if slots:
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


def _load_average(average: Sequence[Tensor], stored: dict[str, Tensor], file: Path) -> None:
    wanted = {f"{_AVERAGE}{index}": value for index, value in enumerate(average)}
    kinds = [{name: (value.shape, value.dtype) for name, value in tensors.items()} for tensors in (wanted, stored)]
    if kinds[0] != kinds[1]:
        raise RunError(f"{file} does not fit train.averaging; use the setting the run was started with, or another --out")
    for name, value in wanted.items():
        value.copy_(stored[name])


def _fits(slots: dict[int, dict[str, Tensor]], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether each slot belongs to a parameter and has its shape (or is a scalar, like Adam's step)."""
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    return all(
        0 <= index < len(shapes) and all(value.ndim == 0 or value.shape == shapes[index] for value in values.values())
        for index, values in slots.items()
    )


def _read_state(path: Path) -> dict[str, Any]:
    try:
        text = read_file(path).decode()
        state = json.loads(text)
        check = state.pop("check")
        intact = sha256_hex(canonical_json(state).encode()) == check
        intact = intact and text == canonical_json({**state, "check": check}) + "\n"
        state = {
            "config_sha256": None,
            "curve": [],
            "initial_weights": "{}",
            "engine": LAYERWISE if state.get("step") else "",
            **state,
        }  # runs of older versions lack these keys and can still be resumed
        intact = intact and state.keys() == _STATE_TYPES.keys()
        intact = intact and all(type(state[name]) in kinds for name, kinds in _STATE_TYPES.items())  # a bool is not a step
        state["curve"] = [_point(values) for values in state["curve"]]
        intact = intact and state["step"] >= 0 and state["checkpoint"] == f"checkpoint-{state['step']}.safetensors"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({error}); this run cannot be resumed, start another with --out") from error
    if not intact:
        raise RunError(f"{path} is damaged (its checksum is wrong); this run cannot be resumed, start another with --out")
    assert isinstance(state, dict)
    return state


def _point(values: list[Any]) -> Point:
    step, norm, accuracy = values
    if not (isinstance(step, int) and isinstance(norm, float | None) and isinstance(accuracy, float | None)):
        raise ValueError("a point of the training curve is not three numbers")
    return Point(step, norm, accuracy)


def load_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; its digest must be `sha256` if given."""
    data = _read(path)
    if sha256 is not None and sha256_hex(data) != sha256:
        raise RunError(f"{path} is damaged (its SHA-256 is wrong); restore it from a copy or train again with another --out")
    return _tensors(data, str(path))


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


def _tensors(data: bytes, origin: str) -> dict[str, Tensor]:
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise RunError(f"{origin} is not a safetensors file ({str(error)[:200]}); restore it from a copy") from error


def load_weights(model: nn.Module, weights: dict[str, Tensor], origin: Path) -> None:
    """Load `weights` into `model`; names and shapes must match."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        raise RunError(f"{origin} does not fit the model: {detail}") from error


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the weights and facts of a model file; its content digest must match."""
    return parse_model(_read(path), str(path))


def parse_model(data: bytes, origin: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Like `read_model`, for bytes from another source (such as a bundle)."""
    facts = read_facts(data, origin)
    return _tensors(data, origin), facts


def require_made_with(directory: RunDirectory, facts: dict[str, str], ledger: Ledger, config_sha256: str | None) -> None:
    """Raise unless a model's header (`facts`) refers to this ledger and this config."""
    opened.require_made_with(facts, ledger.head, ledger.sha256, config_sha256, directory.config, directory.ledger)


def model_bytes(model: nn.Module, metadata: dict[str, str]) -> bytes:
    """Return the final weights as safetensors, with public facts in the header; the same input gives the same bytes."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    digest = digest_of_tensors(save(tensors), metadata)
    return with_sorted_header(save(tensors, metadata={**metadata, "content_sha256": digest}))
