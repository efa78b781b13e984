"""How a run recognizes its model and test images when they are given to it again.

Names and shapes of tensors do not tell a ReLU from a tanh, so the header of a model file also keeps the class of the module and
its logits for one fixed image. All of it is computed from the released weights.
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..data.dataset import Dataset
from ..errors import DataError, RunError
from ..store.durable import canonical_json, sha256_hex

_CLASS, _LOGITS, _IMAGES = "model_class", "model_logits", "test_images_sha256"
_DIGITS, _TOLERANCE = 6, 1e-3  # devices and batch sizes round differently; another architecture is far off


def images_sha256(x: Tensor, y: Tensor) -> str:
    """Which images rows are about."""
    return sha256_hex(x.numpy().tobytes() + y.numpy().tobytes())


def facts_of(model: nn.Module, data: Dataset) -> dict[str, str]:
    """What the header of a model file says about the module and the test images."""
    logits = [float(f"{value:.{_DIGITS}g}") for value in _logits(model, data.input_shape)]
    return {
        _CLASS: f"{type(model).__module__}.{type(model).__qualname__}",
        _LOGITS: canonical_json(logits),
        _IMAGES: images_sha256(data.x_test, data.y_test),
    }


def require_same_model(model: nn.Module, input_shape: tuple[int, ...], facts: Mapping[str, str], place: str) -> None:
    """Raise unless `model`, with the weights of a run in it, computes what the run's own module computed."""
    if _LOGITS not in facts:
        return  # a run of an older version
    expected = torch.tensor(json.loads(facts[_LOGITS]), dtype=torch.float64)
    found = torch.tensor(_logits(model, input_shape), dtype=torch.float64)
    scale = max(1.0, float(expected.abs().max()))
    if found.shape == expected.shape and bool((found - expected).abs().max() <= _TOLERANCE * scale):
        return
    given = f"{type(model).__module__}.{type(model).__qualname__}"
    raise RunError(
        f"{place} was trained with another model ({facts.get(_CLASS)}): {given} takes its weights but computes other logits; "
        "give the model it was trained with"
    )


def require_same_test_images(data: Dataset, facts: Mapping[str, str], place: str) -> None:
    """Raise unless the test images are those the run was evaluated on when it was trained."""
    if _IMAGES in facts and images_sha256(data.x_test, data.y_test) != facts[_IMAGES]:
        raise DataError(f"the test images are not those of {place} (their SHA-256 differs); give the data it was trained with")


def _logits(model: nn.Module, input_shape: tuple[int, ...]) -> list[float]:
    """The logits of one fixed image: a pattern with an edge in it, away from symmetries that would hide a layer."""
    parameter = next(model.parameters())
    size = torch.Size(input_shape).numel()
    image = ((torch.arange(size) * 7919) % 256).float().div(255.0).reshape(1, *input_shape)
    was_training = model.training
    try:
        with torch.no_grad():
            logits: Tensor = model.eval()(image.to(parameter.device))
    finally:
        model.train(was_training)
    return [float(value) for value in logits.flatten().double().cpu()]
