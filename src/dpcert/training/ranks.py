"""One run on several ranks: what they must agree on, and how the others follow what rank 0 has begun.

Rank 0 begins or resumes the run: lock, config, key, ledger, checkpoint. The others receive the key, a copy of the ledger and
the weights through the process group's memory. They write nothing.
"""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace

import torch

from ..errors import ConfigError
from ..privacy.statement import installed_versions
from ..rng import secret_key
from ..scale.world import World
from ..sections import SPEED_ONLY, Section
from ..store.durable import canonical_json
from .lifecycle import Begun, Training, follow, remembering
from .state import checkpoint_bytes, data_identity, load_checkpoint_bytes

_RANK_0 = "the state of rank 0"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of a function: differs between processes


def device_name(world: World, name: str) -> str:
    """Return the device of this rank: with ``cuda``, each rank of a machine has its own GPU."""
    if world.size > 1 and name.startswith("cuda:"):
        raise ConfigError(f"device is {name!r}, but {world.size} ranks need one GPU each; use --device cuda")
    return f"cuda:{world.local_rank}" if world.size > 1 and name == "cuda" else name


def agree_on_request(world: World, training: Training, device: torch.device) -> None:
    """Raise on every rank unless all have the same software, devices, settings, model and training data.

    The data are compared by an HMAC under a key that is used for nothing else and exists in memory only.
    """
    if world.size == 1:
        return
    world.agree("package versions", _lines(installed_versions() | {"numpy": _numpy_version()}))
    world.agree("devices", _devices(device))
    world.agree("settings", _lines(_settings(training)))
    key = world.broadcast(secret_key() if world.is_first else None)
    world.agree("training data", data_identity(key, training.data.x_train, training.data.y_train))


def begin_together(world: World, training: Training, begin: Callable[[], Begun]) -> Begun:
    """Call `begin` on rank 0, and return on every rank what it has begun, with the same weights and optimizer state."""
    if world.size == 1:
        return begin()
    begun: list[Begun] = []

    def on_first() -> bytes:
        begun.append(replace(begin(), world=world))
        if begun[0].finished is not None:
            training.enter(len(training.phases) - 1)
        return _message(training, begun[0])

    facts = json.loads(world.first(on_first))
    if not world.is_first:
        training.enter(facts["phase"])
        key, ledger = bytes.fromhex(facts["key"]), facts["ledger"].encode()
        begun.append(follow(key, ledger, facts["first"], facts["finished"], facts["versions"], world))
    state_now = checkpoint_bytes(training.model, training.optimizer, training.average.values) if world.is_first else None
    received = world.broadcast(state_now)
    if not world.is_first:
        keeping = remembering(training, begun[0].ledger) if facts["finished"] else contextlib.nullcontext()
        with keeping:
            load_checkpoint_bytes(received, _RANK_0, training.model, training.optimizer, training.average.values)
    return begun[0]


def _message(training: Training, begun: Begun) -> bytes:
    """Return what the others need besides tensors. Contains the key: never written to a file."""
    finished = begun.finished is not None
    versions = dict(begun.finished.versions or {}) if begun.finished is not None else {}
    facts = {"key": begun.key.hex(), "ledger": begun.ledger.as_bytes().decode(), "first": begun.first}
    facts |= {"phase": training.phase, "finished": finished, "versions": versions}
    return canonical_json(facts).encode()


def _devices(device: torch.device) -> str:
    return f"{torch.cuda.device_count() if device.type == 'cuda' else 1} {device.type}"


def _settings(training: Training) -> dict[str, object]:
    """Return what decides the result, by name; not what affects speed only."""
    method, plan = training.method, training.plan
    values: dict[str, object] = {}
    for name in type(training.settings).model_fields:
        section = getattr(training.settings, name)
        assert isinstance(section, Section)
        kept = section.model_dump(exclude=section.keys_marked(SPEED_ONLY))
        values |= {f"{name}.{key}": value for key, value in kept.items()}
    values |= {"physical_batch": training.settings.train.physical_batch}  # how the batch is split among the ranks
    values |= {"method": _ADDRESS.sub("", repr(method)), "plan": repr(plan), "images": str(training.data.input_shape)}
    for name, parameter in training.model.named_parameters():
        values[f"parameter {name}"] = f"{list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    return values


def _lines(values: "dict[str, object] | dict[str, str]") -> str:
    return "\n".join(f"{name} = {value}" for name, value in values.items())


def _numpy_version() -> str:
    import numpy as np

    return np.__version__
