"""How a run recognizes its model and test images when the user passes them again.

Names and shapes of tensors cannot distinguish a ReLU from a tanh, so the header of a model file also records the class of the
module and its logits for one fixed image. All of it is computed from the released weights.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..certification.votes import device_of, evaluating
from ..data.dataset import Dataset
from ..data.images import chunks
from ..errors import DataError, RunError
from ..store.durable import canonical_json

_CLASS, _LOGITS, _IMAGES = "model_class", "model_logits", "test_images_sha256"
_DIGITS, _TOLERANCE = 6, 1e-3  # rounding depends on device and batch size; another architecture differs by far more


def images_sha256(x: Tensor, y: Tensor) -> str:
    """Digest of images and labels, which identifies the images of a row file."""
    digest = hashlib.sha256()
    for values in (x, y):
        for rows in chunks(values):
            digest.update(rows.numpy().data)
    return digest.hexdigest()


def facts_of(model: nn.Module, data: Dataset) -> dict[str, str]:
    """The facts about the module and the test images for the header of a model file.

    Called when the budget is spent, so it never raises: a model that cannot answer once more has no logits on record.
    """
    facts = {_CLASS: _class_of(model), _IMAGES: images_sha256(data.x_test, data.y_test)}
    with contextlib.suppress(Exception):
        facts[_LOGITS] = canonical_json([f"{value:.{_DIGITS}g}" for value in _logits(model, data.input_shape)])
    return facts


def require_same_model(model: nn.Module, input_shape: tuple[int, ...], facts: Mapping[str, str], place: str) -> None:
    """Raise unless `model`, loaded with the weights of a run, computes the same logits as the model of that run."""
    if _LOGITS not in facts:
        return  # runs of older versions do not record logits
    expected = [float(text) for text in json.loads(facts[_LOGITS])]
    if _alike(_logits(model, input_shape), expected):
        return
    given = _class_of(model)
    raise RunError(
        f"{place} was trained with another model ({facts.get(_CLASS)}): {given} accepts its weights but computes other logits; "
        "pass the model it was trained with"
    )


def require_same_test_images(data: Dataset, facts: Mapping[str, str], place: str) -> None:
    """Raise unless the test images are those the run was evaluated on when it was trained."""
    if _IMAGES in facts and images_sha256(data.x_test, data.y_test) != facts[_IMAGES]:
        raise DataError(f"the test images are not those of {place} (their SHA-256 differs); pass the data it was trained with")


def _class_of(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _alike(actual: list[float], expected: list[float]) -> bool:
    """Whether two lists of logits differ by rounding only; a diverged model has NaN in both."""
    scale = max([1.0, *(abs(value) for value in expected if math.isfinite(value))])
    pairs = zip(actual, expected, strict=False)
    near = (a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= _TOLERANCE * scale for a, b in pairs)
    return len(actual) == len(expected) and all(near)


def _logits(model: nn.Module, input_shape: tuple[int, ...]) -> list[float]:
    """The logits of one fixed image: a pattern with edges and without symmetries that could hide a layer."""
    size = torch.Size(input_shape).numel()
    image = ((torch.arange(size) * 7919) % 256).float().div(255.0).reshape(1, *input_shape)
    with evaluating(model) as copy:  # the modes of the user's own layers stay as they are
        return [float(value) for value in copy(image.to(device_of(copy))).flatten().double().cpu()]
