"""Verify the smoothing law of certificates: the norm of the noisy layer is computed again from the stored weights."""

import math
from typing import Any

from ..certification.laws import Smoothing, law_of_layer, stored_smoothing
from ..errors import VerifyError
from ..models.architectures import MODELS
from ..models.noisy import NoisyModel
from ..privacy.ledger import Ledger
from ..runs.config import Config
from ..runs.open import recorded_classes, recorded_shape
from ..store.public import PublicFiles
from ..store.runs import CONFIG, MODEL
from ..training.state import parse_model
from .certificates import NotCheckedError

_CLOSE = 1e-8  # relative: norms are stored with nine digits


def law_follows(files: PublicFiles, entry: dict[str, Any], config: Config, ledger: Ledger) -> str:
    """Check that the stated law is that of the model: noise scales and norm from its weights, geometry from its config."""
    stated = stored_smoothing(entry["sigma"], entry["smoothing"])
    if MODEL not in files.content:
        raise NotCheckedError(f"it needs the noisy layer of {MODEL}, which is missing")
    tensors = parse_model(files.bytes_of(MODEL), MODEL)[0]
    needed = ("first.weight", "scales", "input_scale")
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise VerifyError(f"the model has no {', '.join(missing)}, so it has no noisy layer")
    weight, scales, input_scale = (tensors[name] for name in needed)
    where = _geometry_follows(stated, tuple(weight.shape), config, ledger)
    try:
        found = law_of_layer(weight, scales, float(input_scale), stated.geometry, normalized=stated.normalized)
    except RuntimeError as error:  # untrusted shapes
        raise VerifyError(f"the noisy layer does not fit the stated geometry {stated.geometry}") from error
    if found.site != stated.site or found.input_scale != stated.input_scale:
        raise VerifyError(f"the weights have noise at {found.site} ({found.input_scale:g}), stated is {stated.site}")
    if not math.isclose(found.whitened_norm or 0.0, stated.whitened_norm or 0.0, rel_tol=_CLOSE):
        raise VerifyError(f"the whitened norm of the noisy layer is {found.whitened_norm}, stated is {stated.whitened_norm}")
    return f"whitened norm {stated.whitened_norm:.6g} computed from the weights, {where}; {stated.in_words}"


def _geometry_follows(stated: Smoothing, weight: tuple[int, ...], config: Config, ledger: Ledger) -> str:
    """Check stride, padding, groups and image size of the noisy layer, which the norm depends on."""
    shape = recorded_shape(config, ledger)
    if shape is None:
        return f"with the geometry of its .json (neither {CONFIG} nor the ledger states the size of the images)"
    if stated.geometry and (stated.geometry[0], stated.geometry[-1][0] * weight[1]) != (shape[1:], shape[0]):
        raise VerifyError(f"the stated geometry {stated.geometry} does not fit images of {shape} and a weight of {weight}")
    if config.model.name not in MODELS:
        return f"with stride and padding of its .json ({config.model.name} is a custom model)"
    model = config.model_spec().bare(shape, recorded_classes(ledger), seed=0)
    if not isinstance(model, NoisyModel):
        raise VerifyError(f"model {config.model.name} of {CONFIG} has no noise inside")
    if (model.geometry, model.normalize) != (stated.geometry, stated.normalized):
        raise VerifyError(f"the noisy layer has the geometry {model.geometry}, stated is {stated.geometry}")
    return f"with the geometry of model {config.model.name}"
