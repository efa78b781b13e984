"""The pretraining loop. All randomness is a function of (seed, step), so a resumed pretraining gives the same weights."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError, RunError
from ..interrupts import Interrupted, stop_requests
from ..models.feature_cnn import Backbone, backbone
from ..progress import Progress, silent
from ..rng import Purpose, bulk_normal, key_from_seed
from ..store.durable import canonical_json, remove, sha256_hex, write_atomically
from . import card
from .images import SIGMAS, PublicImages, epoch_order, noisy_batch, split
from .settings import Settings

SECONDS_BETWEEN_CHECKPOINTS = 120.0
_STATISTICS_BATCHES = 40
_EVALUATION_ROWS = 500


@dataclass
class State:
    """The state of a pretraining after `step` steps."""

    model: Backbone
    average: dict[str, Tensor]  # exponential moving average of weights and statistics, which is what is released
    momentum: dict[str, Tensor]
    step: int = 0


def pretrain(
    data: PublicImages,
    out: Path,
    settings: Settings,
    *,
    about: dict[str, Any],
    device: torch.device | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Pretrain on public images, or resume an interrupted pretraining; write `out` and its card; return the card."""
    device = device or torch.device("cpu")
    key = key_from_seed(settings.seed, "pretrain")
    training, held_out = split(data, min(settings.held_out, len(data) // 10), key)
    steps = settings.steps(len(training))
    if steps == 0:
        raise DataError(
            f"the public data has {len(training)} images, fewer than one batch of {settings.batch_size}; lower --batch-size"
        )
    request = canonical_json({"settings": settings.as_dict(), "data": about["data_sha256"], "shape": list(data.shape)})
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    state = _resume(checkpoint, request, _fresh(settings, data, device))
    _run(state, training, settings, key, steps, lambda: _save(checkpoint, request, state), progress)
    model = _released(state, settings, data, device)
    _standardize(model, training, key, steps, settings, device)
    accuracy = {f"{sigma:.2f}": _accuracy(model, held_out, sigma, key, device) for sigma in (0.0, *SIGMAS)}
    written = card.write(out, model, settings, data, {**about, "accuracy": accuracy, "steps": steps, "images": len(training)})
    remove(checkpoint)
    return written


def _fresh(settings: Settings, data: PublicImages, device: torch.device) -> State:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = backbone(settings.model, data.shape, sum(data.classes))
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return State(model, average, {name: torch.zeros_like(p) for name, p in model.named_parameters()})


def _run(
    state: State, data: PublicImages, settings: Settings, key: bytes, steps: int, save: Callable[[], None], progress: Progress
) -> None:
    """Run the remaining steps, with a checkpoint every two minutes and on interrupt."""
    saved = time.monotonic()
    device = next(state.model.parameters()).device
    state.model.train()
    with stop_requests() as asked_to_stop:
        for rows in _batches(state.step, steps, len(data), settings, key):
            x = noisy_batch(data, rows, key, state.step, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
                logits = state.model(x)
            loss = _loss(logits.float(), data, rows, settings)
            _update(state, loss, settings, settings.learning_rate_at(state.step, steps))
            state.step += 1
            if state.step % 10 == 0 or state.step == steps:
                progress(state.step, steps, loss=f"{float(loss.detach()):.3f}")
            if asked_to_stop or time.monotonic() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                save()
                saved = time.monotonic()
            if asked_to_stop:
                raise Interrupted(f"stopped after step {state.step} of {steps}")


def _batches(first: int, steps: int, size: int, settings: Settings, key: bytes) -> Iterator[np.ndarray]:
    """The rows of each step, starting at step `first`."""
    per_epoch = size // settings.batch_size
    epoch, order = -1, np.empty(0, dtype=np.int64)
    for step in range(first, steps):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = epoch_order(size, key, epoch)
        start = step % per_epoch * settings.batch_size
        yield order[start : start + settings.batch_size]


def _loss(logits: Tensor, data: PublicImages, rows: np.ndarray, settings: Settings) -> Tensor:
    """Cross-entropy of each image over the classes of its source."""
    labels = torch.from_numpy(data.labels[rows]).to(logits.device)
    total, start = logits.new_zeros(()), 0
    for source, classes in enumerate(data.classes):
        in_source = torch.from_numpy(data.sources[rows] == source).to(logits.device)
        head = logits[in_source, start : start + classes]
        total = total + F.cross_entropy(head, labels[in_source], label_smoothing=settings.label_smoothing, reduction="sum")
        start += classes
    return total / len(rows)


@torch.no_grad()
def _update(state: State, loss: Tensor, settings: Settings, learning_rate: float) -> None:
    """SGD with Nesterov momentum; weight decay for matrices and kernels only; then the moving average."""
    parameters = dict(state.model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        if parameter.ndim > 1:
            gradient = gradient + settings.weight_decay * parameter
        velocity = state.momentum[name].mul_(settings.momentum).add_(gradient)
        parameter.sub_(learning_rate * (gradient + settings.momentum * velocity))
    decay = min(
        settings.ema, (1 + state.step) / (10 + state.step)
    )  # shorter at first, so that the initial weights are forgotten
    for name, tensor in state.model.state_dict().items():
        if tensor.is_floating_point():
            state.average[name].lerp_(tensor, 1 - decay)


def _released(state: State, settings: Settings, data: PublicImages, device: torch.device) -> Backbone:
    """A new model with the averaged weights, in evaluation mode."""
    model = backbone(settings.model, data.shape, sum(data.classes))
    model.load_state_dict(state.average)
    model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval()


@torch.no_grad()
def _standardize(model: Backbone, data: PublicImages, key: bytes, steps: int, settings: Settings, device: torch.device) -> None:
    """Set the feature statistics from public images under the noise of pretraining; adapt the public head to them."""
    rows = np.array_split(
        epoch_order(len(data), key, settings.epochs)[: _STATISTICS_BATCHES * _EVALUATION_ROWS], _STATISTICS_BATCHES
    )
    features = torch.cat(
        [model.features(noisy_batch(data, part, key, steps + number, device)) for number, part in enumerate(rows) if len(part)]
    ).double()
    mean, scale = features.mean(dim=0), features.std(dim=0).clamp_min(1e-3)
    model.standardize.mean.copy_(mean)
    model.standardize.scale.copy_(scale)
    weight = model.head.weight.double()
    model.head.bias.copy_(model.head.bias.double() + weight @ mean)
    model.head.weight.copy_(weight * scale)


@torch.no_grad()
def _accuracy(model: Backbone, data: PublicImages, sigma: float, key: bytes, device: torch.device) -> float:
    """Accuracy on held-out public images with one draw of noise each, over the classes of the source of each image."""
    starts = torch.tensor([0, *np.cumsum(data.classes)])
    correct = 0
    for part, start in enumerate(range(0, len(data), _EVALUATION_ROWS)):
        stop = min(start + _EVALUATION_ROWS, len(data))
        x = torch.from_numpy(data.images[start:stop]).to(device).float() / 255.0
        x = x + sigma * bulk_normal(key, Purpose.ANALYSIS, tuple(x.shape), device, part=part)
        logits = model(x).cpu()
        sources = torch.from_numpy(data.sources[start:stop])
        columns = torch.arange(logits.shape[1])
        in_source = (columns >= starts[sources][:, None]) & (columns < starts[sources + 1][:, None])
        predicted = logits.masked_fill(~in_source, -torch.inf).argmax(dim=1) - starts[sources]
        correct += int((predicted == torch.from_numpy(data.labels[start:stop])).sum())
    return correct / len(data)


def _save(path: Path, request: str, state: State) -> None:
    tensors = {f"weights.{name}": tensor for name, tensor in state.model.state_dict().items()}
    tensors |= {f"average.{name}": tensor for name, tensor in state.average.items()}
    tensors |= {f"momentum.{name}": tensor for name, tensor in state.momentum.items()}
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    body = safetensors.torch.save(contiguous, metadata={"request": request, "step": str(state.step)})
    write_atomically(path, sha256_hex(body).encode() + body)


def _resume(path: Path, request: str, state: State) -> State:
    """Load the checkpoint into `state`, if there is one. A checkpoint with other settings is refused and kept."""
    if not path.exists():
        return state
    data = path.read_bytes()
    check, body = data[:64], data[64:]
    if sha256_hex(body).encode() != check:
        raise RunError(f"{path} is damaged (its checksum is wrong); remove it to start over")
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    if header["request"] != request:
        raise RunError(
            f"{path} is from a pretraining with other settings or data ({_difference(header['request'], request)}); "
            "use the same settings, choose another --out, or remove the checkpoint"
        )
    tensors = safetensors.torch.load(body)
    state.model.load_state_dict(_part(tensors, "weights."))
    for name, tensor in _part(tensors, "average.").items():
        state.average[name].copy_(tensor)
    for name, tensor in _part(tensors, "momentum.").items():
        state.momentum[name].copy_(tensor)
    state.step = int(header["step"])
    return state


def _difference(recorded: str, requested: str) -> str:
    """The first setting in which two requests differ."""
    old, new = json.loads(recorded), json.loads(requested)
    for name, value in new["settings"].items():
        if old["settings"].get(name) != value:
            return f"{name} {old['settings'].get(name)}, now {value}"
    return "different images"


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
