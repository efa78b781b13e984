"""The Python API for training: `dpcert.train`, with plain arguments."""

from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..data.dataset import Dataset
from ..methods import Method, settings_of
from ..methods import method as named_method
from ..models.registry import build_model
from ..models.spec import ModelSpec, spec_of
from ..progress import Progress, silent
from ..scale.world import join
from ..store.runs import RunDirectory
from ..training.loop import Run, fit
from ..training.settings import Settings
from .config import Config, MethodConfig, parse
from .training import train_in


def train(
    model: nn.Module | str,
    data: Dataset,
    method: Method | str,
    *,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    epochs: float = 40,
    batch_size: int = 512,
    learning_rate: float = 0.5,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    clip_norm: float = 0.1,
    dataset_size: int | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    noise_seed: int | None = None,
    physical_batch: int = 480,
    engine: str = "auto",
    device: str = "cpu",
    progress: Progress = silent,
    **settings_by_name: Any,
) -> Run:
    """Train `model` (in place) on `data` within (epsilon, delta).

    `dataset_size` is the public N; the default is len(data.x_train), and the privacy statement says so. `seed` fixes the
    initialization of a model given by name (a module keeps its weights). `noise_seed` makes the run reproducible but not
    private. With `out`, the run is stored in a directory and survives a crash: the same call resumes it.
    Any other key of the config sections ``[train]``, ``[privacy]`` and ``[gradients]`` can be passed by name, for example
    ``schedule="cosine", warmup=0.1, averaging="ema"``.
    In a script that torchrun starts, all processes call this with the same arguments and train together.
    """
    method = named_method(method) if isinstance(method, str) else method
    if dataset_size is not None:
        data = Dataset(
            data.x_train,
            data.y_train,
            data.x_test,
            data.y_test,
            data.name,
            dataset_size,
            data.classes if data.classes_given else None,
            data.held_out,
            data.x_validation,
            data.y_validation,
        )
    settings = Settings.of(
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        momentum=momentum,
        optimizer=optimizer,
        clip_norm=clip_norm,
        noise_seed=noise_seed,
        physical_batch=physical_batch,
        engine=engine,
        device=device,
        seed=seed,
        **settings_by_name,
    )
    if isinstance(model, str):
        model = build_model(model, input_shape=data.input_shape, classes=data.classes or 0, seed=seed)
    if out is None:
        return fit(model, data, method, settings, progress=progress, world=join())
    config = _as_config(spec_of(model), data, method, settings, dataset_size)
    return train_in(RunDirectory(Path(out)), config, model, data, method, progress, join())


def _as_config(model: ModelSpec, data: Dataset, method: Method, settings: Settings, dataset_size: int | None) -> Config:
    views = method.views
    sigma = {} if views.sigma is None else {"sigma": float(views.sigma), "copies": views.copies}
    regulariser = (
        "none" if method.regulariser is None else getattr(method.regulariser, "name", type(method.regulariser).__name__)
    )
    parts = [part for part in (views, method.regulariser, method.clip_rule) if is_dataclass(part)]
    part_settings = {key: getattr(part, field) for part in parts for key, field in settings_of(part).items()}
    tables = {
        "data": {"name": data.name, "size": dataset_size, "classes": data.classes, "validation": data.held_out},
        "model": _stated(model),
        "method": {
            "name": method.name,
            "views": views.name,
            "regulariser": regulariser,
            "clip": method.clip_rule.name,
            "keep_original": getattr(views, "keep_original", True),
            **sigma,
            **{key: value for key, value in part_settings.items() if key in MethodConfig.model_fields},
        },
        "train": settings.train,
        "privacy": settings.privacy,
        "gradients": settings.gradients,
        "head": settings.head,
    }
    return parse(tables, "train()")


def _stated(model: ModelSpec) -> dict[str, Any]:
    """Return a spec as a config states it: numbers with commas, and the noise that the model has."""
    weights = model.noise_weights
    numbers = weights if weights is None or isinstance(weights, str) else ",".join(repr(float(r)) for r in weights)
    return {**asdict(model), "noise_weights": numbers, "noise": None if model.system is None else model.noise_inside}
