"""From a config to a trained run directory. Glue code without math."""

import secrets
import time
from pathlib import Path
from typing import Any

from torch import nn

from ..certification.sweep import require_subset
from ..data.dataset import Dataset
from ..errors import ModelError, RunError
from ..methods import Method
from ..models.factory import Factory, is_factory_name
from ..progress import Progress, silent
from ..scale.world import ALONE, World
from ..store.durable import read_file, sha256_hex, write_atomically, write_checked_json
from ..store.runs import RunDirectory
from ..training.curve import accuracy
from ..training.lifecycle import is_finished
from ..training.loop import Run, fit
from .certify import request_of
from .config import Config, differences
from .identity import facts_of
from .resolve import stored_config
from .sources import load_data


def train(
    config: Config,
    out: Path,
    progress: Progress = silent,
    data_progress: Progress = silent,
    *,
    factory: Factory | None = None,
    world: World = ALONE,
    is_trial: bool = False,
) -> Run:
    """Train in `out`, or resume there; a finished run is only loaded. `factory` builds a custom model.

    Only a search (`is_trial`) may train with a config that says it is a trial of a charged search.
    All ranks of `world` call this; only rank 0 uses `out`.
    """
    method, directory = config.build_method(), RunDirectory(out)
    if world.is_first:
        _refuse_other_request(directory, config)
    if config.search.law is not None and not (is_trial or directory.model.exists()):
        raise RunError(
            "the config is that of a trial of a charged search ([search]), and the search has released its best trial: a model "
            "trained again is not that trial; remove the section [search]"
        )
    if factory is None and is_factory_name(config.model.name):
        raise ModelError(
            f"model.name is {config.model.name!r}, a custom model; pass it on the command line: --model {config.model.name}"
        )
    with world.one_at_a_time_per_machine():  # the first rank may have to download the data
        data = load_data(config, data_progress)
    require_subset(len(data.x_test), request_of(config).count(len(data.x_test)))  # fail before hours of training, not after
    seed = config.train.seed if config.train.seed is not None else secrets.randbits(62)
    model = config.model_spec().build(data.input_shape, data.classes or 0, seed=seed, factory=factory)
    return train_in(directory, config, model, data, method, progress, world)


def train_in(
    directory: RunDirectory,
    config: Config,
    model: nn.Module,
    data: Dataset,
    method: Method,
    progress: Progress = silent,
    world: World = ALONE,
) -> Run:
    """`train` for a model, data and method that exist already."""
    config = config.for_images(data.input_shape)
    if world.is_first:
        _refuse_other_request(directory, config)
    began, finished_before = time.perf_counter(), directory.model.exists()

    def claim() -> str:
        if not directory.config.exists():
            write_atomically(directory.config, config.to_toml().encode())
        return sha256_hex(read_file(directory.config))

    run = fit(
        model,
        data,
        method,
        config.settings(),
        directory=directory,
        claim=claim,
        labels={"method": config.method.name, "dataset": data.name},
        identify=lambda trained: facts_of(trained, data),
        progress=progress,
        world=world,
    )
    if world.is_first and not (finished_before and directory.metrics.exists()):
        _write_training_metrics(directory, method, run, data, time.perf_counter() - began)
    world.wait()  # the files are complete when any rank returns
    return run


def _refuse_other_request(directory: RunDirectory, config: Config) -> None:
    directory.refuse_links()
    if not directory.config.exists():
        for file in (directory.model, directory.ledger):
            if file.exists():
                raise RunError(f"{directory.path} has {file.name} but no config.toml; use another --out")
        return
    old = stored_config(directory)
    changed = differences(old, config)
    if not changed:
        return
    remedy = "use another --out"
    if directory.model.exists() and is_finished(directory):
        remedy = (
            "the run is finished, its noise key is destroyed and its budget is spent: more steps would be a second release "
            "of the same records; use another --out for a new training"
        )
    raise RunError(f"{directory.path} contains a run with other settings ({'; '.join(changed)}); {remedy}")


def _write_training_metrics(directory: RunDirectory, method: Method, run: Run, data: Dataset, seconds: float) -> None:
    metrics: dict[str, Any] = {
        "dataset": data.name,
        "method": method.name,
        "sigma_train": method.views.sigma,
        "clean_accuracy": None,
        "privacy": run.statement.as_metrics(),
        "certification": [],
        "timing": {"train_seconds": round(seconds, 1)},
    }
    if data.held_out:  # tuning uses the held-out records; the test set is not used until certification
        metrics["validation_accuracy"] = accuracy(run.model, data.x_validation, data.y_validation)
    else:
        metrics["clean_accuracy"] = accuracy(run.model, data.x_test, data.y_test)
    metrics["config_sha256"] = sha256_hex(read_file(directory.config))
    write_checked_json(directory.metrics, metrics)
