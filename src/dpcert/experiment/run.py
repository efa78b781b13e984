"""From a request to a run directory: train, certify, measure. Joins the parts and holds no maths."""

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from ..certification.metrics import average_certified_radius, certified_accuracy, even_subset, radii_to_show
from ..certification.sweep import certify_to_file, check_request, require_subset
from ..certification.votes import evaluating
from ..data.dataset import Dataset, read_npz
from ..data.registry import load_dataset
from ..errors import LedgerError, RunError
from ..models.registry import build_model
from ..privacy.ledger import Ledger
from ..privacy.statement import Statement, state
from ..progress import Progress, silent
from ..rng import key_from_seed, secret_key
from ..store.durable import read_json, sha256_hex, write_atomically, write_json
from ..store.records import CertificateRow
from ..store.runs import RunDirectory
from ..training.loop import Run, fit, is_finished
from ..training.state import load_tensors, load_weights
from . import presets
from .config import Config, differences, override, parse, read_toml


def resolve(source: str | None, assignments: Mapping[str, Any]) -> Config:
    """A config from a preset's name or a TOML file, with single keys overridden."""
    if source is not None and source.endswith(".toml"):
        tables, origin = read_toml(Path(source)), source
    else:
        origin = presets.DEFAULT if source is None else source
        tables = presets.tables(origin)
    return parse(override(tables, assignments), origin)


def default_out(config: Config) -> Path:
    """``runs/<dataset>-<method>``."""
    return Path("runs") / f"{dataset_name(config)}-{config.method.name}"


def dataset_name(config: Config) -> str:
    """The data set's name: that of its file for a data set of one's own."""
    return Path(config.data.path).stem if config.data.path else config.data.name


def read_config(path: Path) -> Config:
    """The config of a run directory."""
    directory = RunDirectory(path)
    directory.require(directory.config)
    return parse(read_toml(directory.config), str(directory.config))


def load_data(config: Config, progress: Progress = silent) -> Dataset:
    """The data set of a config, with the validation records set aside."""
    size, classes = config.data.size, config.data.classes
    if config.data.path:
        data = read_npz(Path(config.data.path), size=size, classes=classes)
    else:
        data = load_dataset(config.data.name, size=size, classes=classes, progress=progress)
    return data.holding_out(config.data.validation)


def train(config: Config, out: Path, progress: Progress = silent, data_progress: Progress = silent) -> Run:
    """Train in `out`, or go on there; on finished work only load it."""
    method, directory = config.build_method(), RunDirectory(out)
    _refuse_other_request(directory, config)
    data = load_data(config, data_progress)
    seed = config.train.seed if config.train.seed is not None else secrets.randbits(62)
    model = build_model(config.model.name, input_shape=data.input_shape, classes=data.classes or 0, seed=seed)
    return train_in(directory, config, model, data, method, progress)


def train_in(
    directory: RunDirectory, config: Config, model: nn.Module, data: Dataset, method: Any, progress: Progress = silent
) -> Run:
    """`train` for a model, data and method that exist already."""
    _refuse_other_request(directory, config)
    began, finished_before = time.perf_counter(), directory.model.exists()

    def claim() -> str:
        if not directory.config.exists():
            write_atomically(directory.config, config.to_toml().encode())
        return sha256_hex(directory.config.read_bytes())

    run = fit(
        model,
        data,
        method,
        config.settings(),
        directory=directory,
        claim=claim,
        labels={"method": config.method.name, "dataset": data.name},
        progress=progress,
    )
    if not (finished_before and directory.metrics.exists()):
        _write_training_metrics(directory, config, run, data, time.perf_counter() - began)
    return run


def _refuse_other_request(directory: RunDirectory, config: Config) -> None:
    if not directory.config.exists():
        for file in (directory.model, directory.ledger):
            if file.exists():
                raise RunError(f"{directory.path} holds {file.name} but no config.toml; use another --out")
        return
    old = parse(read_toml(directory.config), str(directory.config))
    found = differences(old, config)
    if not found:
        return
    why = "use another --out"
    if directory.model.exists() and is_finished(directory):
        why = (
            "it is finished, its noise key is destroyed and its budget is spent: more steps would be a second release "
            "of the same records; train anew with another --out"
        )
    raise RunError(f"{directory.path} holds a run of another request ({'; '.join(found)}); {why}")


def accuracy(model: nn.Module, x: Tensor, y: Tensor, rows: int = 1000) -> float:
    """Share of inputs the model classifies rightly, without smoothing."""
    device = next(model.parameters()).device
    right = 0
    with evaluating(model) as voter:
        for start in range(0, len(x), rows):
            predicted = voter(x[start : start + rows].to(device)).argmax(dim=1).cpu()
            right += int((predicted == y[start : start + rows]).sum())
    return right / len(x)


def _write_training_metrics(directory: RunDirectory, config: Config, run: Run, data: Dataset, seconds: float) -> None:
    views = config.build_method().views if config.method.name != "custom" or config.method.views else None
    metrics: dict[str, Any] = {
        "dataset": data.name,
        "method": config.method.name,
        "sigma_train": views.sigma if views is not None else None,
        "clean_accuracy": None,
        "privacy": run.statement.as_metrics(),
        "certification": [],
        "timing": {"train_seconds": round(seconds, 1)},
    }
    if data.held_out:  # who tunes looks at the held-out records; the test set is left alone until certification
        metrics["validation_accuracy"] = accuracy(run.model, data.x_validation, data.y_validation)
    else:
        metrics["clean_accuracy"] = accuracy(run.model, data.x_test, data.y_test)
    write_json(directory.metrics, metrics)


@dataclass(frozen=True)
class Finished:
    """A finished run, loaded and checked."""

    directory: RunDirectory
    config: Config
    model: nn.Module
    statement: Statement
    model_sha256: str


def load_run(path: Path, input_shape: tuple[int, int, int], classes: int, device: str = "cpu") -> Finished:
    """A finished run: its ledger is checked, and its model must have been made by that ledger."""
    directory = RunDirectory(path)
    directory.require(directory.config, directory.ledger, directory.model)
    config = read_config(path)
    ledger = Ledger.load(directory.ledger)
    if not ledger.is_closed:
        raise LedgerError(f"{path} is not finished; go on with: dpcert train --out {path}")
    model = build_model(config.model.name, input_shape=input_shape, classes=classes)
    load_weights(model, load_tensors(directory.model), directory.model)
    if _metadata(directory.model).get("ledger_head") != ledger.head:
        raise LedgerError(f"{directory.ledger} is not the ledger {directory.model.name} was made with; restore both")
    model.to(device)
    return Finished(directory, config, model, state(ledger), sha256_hex(directory.model.read_bytes()))


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@dataclass(frozen=True)
class CertifyRequest:
    """What to certify; `examples` None means 500, or all where there are fewer."""

    sigma: float
    n0: int
    n: int
    alpha: float
    examples: int | str | None
    seed: int | None
    split: str = "test"

    def count(self, size: int) -> int:
        """The number of examples out of `size`."""
        if self.examples is None:
            return min(DEFAULT_EXAMPLES, size)
        return size if isinstance(self.examples, str) else self.examples


DEFAULT_EXAMPLES = 500


def request_of(config: Config) -> CertifyRequest:
    """What a config wants certified."""
    wanted = config.certify
    return CertifyRequest(config.certification_sigma, wanted.n0, wanted.n, wanted.alpha, wanted.examples, wanted.seed)


def certify(
    path: Path, request: CertifyRequest, device: str = "cpu", progress: Progress = silent, data_progress: Progress = silent
) -> dict[str, Any]:
    """Certificates for a run's test set (or validation split), and their figures in metrics.json."""
    check_request(sigma=request.sigma, n0=request.n0, n=request.n, alpha=request.alpha)
    directory = RunDirectory(path)
    directory.require(directory.config, directory.ledger, directory.model)
    data = load_data(read_config(path), data_progress)
    if request.split == "validation" and not data.held_out:
        raise RunError(f"{path} has no validation split; train with --set data.validation=10000")
    x, y = (data.x_validation, data.y_validation) if request.split == "validation" else (data.x_test, data.y_test)
    run = load_run(path, data.input_shape, data.classes or 0, device)
    examples = request.count(len(x))
    require_subset(len(x), examples)
    with directory.locked():
        file, key = _certificate_file(run, request)
        began = time.perf_counter()
        indices = even_subset(len(x), examples)
        rows = certify_to_file(
            run.model,
            x,
            y,
            indices,
            file,
            sigma=request.sigma,
            n0=request.n0,
            n=request.n,
            alpha=request.alpha,
            key=key,
            progress=progress,
        )
        seconds = time.perf_counter() - began
        entry = _figures(rows, request, file, len(x))
        _add_to_metrics(run, entry, seconds, data if request.split == "test" else None)
    return entry


def _certificate_file(run: Finished, request: CertifyRequest) -> tuple[Path, bytes]:
    """The file for this request and the key of its noise; another (n0, n, alpha) at the same sigma has its own file."""
    sigma = f"{request.sigma:.2f}" if math.isclose(round(request.sigma, 2), request.sigma) else f"{request.sigma:g}"
    stem = "certificates" + ("-validation" if request.split == "validation" else "") + f"-sigma{sigma}"
    facts: dict[str, Any] = {
        "sigma": request.sigma,
        "n0": request.n0,
        "n": request.n,
        "alpha": request.alpha,
        "alpha_is": "per input",
        "split": request.split,
        "dtype": "float32",
        "model_sha256": run.model_sha256,
    }
    plain = run.directory.path / f"{stem}.json"
    other = f"{stem}{'' if request.n0 == 100 else f'-n0{request.n0}'}-n{request.n}-alpha{request.alpha:g}"
    votes = ("n0", "n", "alpha")
    taken = plain.exists() and any(read_json(plain, what="certificate facts").get(k) != facts[k] for k in votes)
    sidecar = run.directory.path / f"{other}.json" if taken else plain
    if sidecar.exists():
        return sidecar.with_suffix(".tsv"), _recorded_key(sidecar, facts, request.seed)
    if sidecar.with_suffix(".tsv").exists():
        raise RunError(f"{sidecar.with_suffix('.tsv')} has no {sidecar.name} beside it, which holds its noise key; delete it")
    key = secret_key() if request.seed is None else key_from_seed(request.seed, "certify")
    write_json(sidecar, {**facts, "seed": request.seed, "noise_key": key.hex()})
    return sidecar.with_suffix(".tsv"), key


def _recorded_key(sidecar: Path, facts: dict[str, Any], seed: int | None) -> bytes:
    recorded = read_json(sidecar, what="certificate facts")
    for name, value in facts.items():
        if recorded.get(name) != value:
            raise RunError(
                f"{sidecar} was made with {name} = {recorded.get(name)}, now it is {value}; delete it and its "
                ".tsv to certify again"
            )
    if seed is not None and recorded.get("seed") != seed:
        raise RunError(
            f"{sidecar} was made with seed {recorded.get('seed')}, --seed {seed} is asked for; leave --seed out "
            "to go on, or delete it and its .tsv"
        )
    try:
        key = bytes.fromhex(recorded["noise_key"])
    except (KeyError, ValueError, TypeError) as error:
        raise RunError(f"{sidecar} holds no noise key; delete it and its .tsv to certify again") from error
    return key


def _figures(rows: list[CertificateRow], request: CertifyRequest, file: Path, size: int) -> dict[str, Any]:
    import numpy as np

    radius = np.array([row.radius for row in rows])
    correct = np.array([bool(row.correct) for row in rows])
    acr = average_certified_radius(radius, correct)
    at = {r: certified_accuracy(radius, correct, r) for r in radii_to_show(request.sigma)}
    return {
        "sigma": request.sigma,
        "n0": request.n0,
        "n": request.n,
        "alpha": request.alpha,
        "examples": len(rows),
        "subset": f"indices 0, {size // len(rows)}, {2 * (size // len(rows))}, ... of the {size} {request.split} images",
        "split": request.split,
        "stride": size // len(rows),
        "acr": acr.value,
        "acr_interval": [acr.low, acr.high],
        "certified_accuracy": {f"{r:.2f}": e.value for r, e in at.items()},
        "certified_accuracy_interval": {f"{r:.2f}": [e.low, e.high] for r, e in at.items()},
        "abstained": sum(row.predict == -1 for row in rows),
        "file": file.name,
    }


def _add_to_metrics(run: Finished, entry: dict[str, Any], seconds: float, test: Dataset | None) -> None:
    metrics = read_json(run.directory.metrics, what="metrics")
    if test is not None and metrics.get("clean_accuracy") is None:
        metrics["clean_accuracy"] = accuracy(run.model, test.x_test, test.y_test)
    metrics["privacy"] = run.statement.as_metrics()
    kept = [other for other in metrics["certification"] if other.get("file") != entry["file"]]
    before = next((other for other in metrics["certification"] if other.get("file") == entry["file"]), None)
    metrics["certification"] = sorted([*kept, entry], key=lambda e: (e["sigma"], e["n"], e["alpha"], e["file"]))
    if before != entry:
        metrics["timing"]["certify_seconds"] = round(seconds, 1)
    write_json(run.directory.metrics, metrics)


def seed_everything_visible(seed: int | None) -> dict[str, Any]:
    """The assignments behind ``--seed``: initialisation and certification noise, never the DP noise."""
    return {} if seed is None else {"train.seed": seed, "certify.seed": seed}
