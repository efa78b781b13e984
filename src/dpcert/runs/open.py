"""Open a finished run: check its files, load its model and data, and offer the operations on them.

The input shape and the number of classes come from recorded facts. They must not be inferred from the order of the tensors in
a weights file, which differs between processes.
"""

import contextlib
import math
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .._validate import integer_in
from ..certification.request import Request
from ..certification.sweep import Certificates
from ..data.dataset import LARGEST_IMAGE, Dataset, exists
from ..data.registry import SOURCES
from ..errors import LedgerError, ModelError, RunError
from ..models.architectures import MODELS
from ..models.factory import HOW_TO_NAME, Factory, Shape, build_custom, is_factory_name
from ..models.parts import ALL, HEAD, selected
from ..privacy.ledger import Ledger
from ..privacy.statement import recorded_versions, state
from ..progress import Progress, silent
from ..store.durable import read_file, sha256_hex
from ..store.runs import RunDirectory
from ..training.loop import choose_device
from ..training.provenance import remember_loaded
from ..training.state import load_weights, parse_model, require_made_with
from .analyze import Analysis, AnalyzeRequest, analyze
from .attack import Attacked, request_for, run_attacks
from .certify import CertifyRequest, certificates_of, certify
from .config import Config
from .identity import require_same_model
from .loaded import LoadedRun
from .page import write_page
from .resolve import read_config
from .sources import data_for


def open_run(
    path: Path | str,
    model: nn.Module | Factory | None = None,
    data: Dataset | Path | str | None = None,
    *,
    device: str = "cpu",
    input_shape: Shape | None = None,
    data_progress: Progress = silent,
) -> "OpenRun":
    """Open a finished run. Checks the ledger, and that the model was trained with that ledger.

    `model` and `data` are needed only if the run was trained with custom ones. `model` is a module, which receives the weights
    of the run, or a function ``factory(input_shape, classes)`` that returns one. `data` is a `Dataset` or a path to one; it is
    read on first use. `input_shape` is for runs of older versions that do not record it.
    """
    directory = RunDirectory(Path(path))
    directory.require(directory.config, directory.ledger, directory.model)
    config = read_config(directory.path)
    ledger = Ledger.load(directory.ledger)
    if not ledger.is_closed:
        raise LedgerError(f"{path} is not finished; resume it with: {directory.command_to_resume}")
    stored = read_file(directory.model)  # once: the digest is of the bytes that are loaded, whatever replaces the file
    weights, facts = parse_model(stored, str(directory.model))
    require_made_with(directory, facts, ledger, sha256_hex(read_file(directory.config)))
    classes = recorded_classes(ledger)
    shape = recorded_shape(config, ledger) or input_shape
    if shape is None:
        shape = data_for(config, data).input_shape
    module = _module(config, model, shape, classes, directory.path)
    load_weights(module, weights, directory.model)
    remember_loaded(
        module, ledger, _frozen(module, config)
    )  # before anything can fail: a user's module already has these weights
    module.to(choose_device(device))
    require_same_model(module, shape, facts, str(directory.path))
    statement = state(ledger, recorded_versions(facts))
    return OpenRun(directory, config, module, statement, sha256_hex(stored), shape, classes, facts, data, data_progress)


def _module(config: Config, model: nn.Module | Factory | None, shape: Shape, classes: int, path: Path) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if model is not None:
        if not callable(model):
            raise ModelError(f"model is a {type(model).__name__}, must be an nn.Module or a function of (input_shape, classes)")
        return build_custom(model, shape, classes)
    if config.model.name not in MODELS:
        name = config.model.name if is_factory_name(config.model.name) else HOW_TO_NAME
        raise RunError(
            f"{path} has a custom model ({config.model.name}); pass it again: --model {name}, or open_run(..., model=...)"
        )
    return config.model_spec().bare(shape, classes)  # the file of the run has all weights, the public ones too


def _frozen(module: nn.Module, config: Config) -> set[str]:
    """The parameters that the run did not train. The header of its weights names the SHA-256 of this config."""
    everything = {name for name, _ in module.named_parameters()}
    if config.model.train == ALL:
        return set()
    with contextlib.suppress(ModelError):  # a module of another kind is refused later; nothing of it counts as frozen
        head = selected(module, HEAD) if config.head.steps else set()
        return everything - selected(module, config.model.train) - head
    return set()


class OpenRun(LoadedRun):
    """A finished run with its operations: certify, predict, analyze, attack, report."""

    def predict(self, x: Tensor, *, sigma: float | None = None, n: int = 10_000, alpha: float = 0.001) -> Tensor:
        """The smoothed class of each input, -1 = abstain; always with fresh noise. For radii: ``run.smoothed().certify(x)``."""
        return self.smoothed(sigma).predict(x, n=n, alpha=alpha)

    def certify(
        self,
        examples: int | str | None = None,
        *,
        sigma: float | None = None,
        n0: int = 100,
        n: int = 10_000,
        alpha: float = 0.001,
        seed: int | None = None,
        split: str = "test",
        progress: Progress = silent,
    ) -> Certificates:
        """Certify evenly spaced test images and store the rows in the run directory (500, or all if fewer); resumable.

        The result covers all images that the certificates file contains for this request.
        """
        request = CertifyRequest(Request.under(self.smoothing(sigma), n0, n, alpha), examples, seed, split)
        return certificates_of(self, certify(self, request, progress))

    def analyze(self, examples: int | str | None = None, *, seed: int = 0, progress: Progress = silent) -> Analysis:
        """Gradient norm, Hessian norm and local Lipschitz constant of the certified images, in samples.tsv."""
        return analyze(self, AnalyzeRequest(examples, seed), progress)

    def attack(
        self,
        attacks: str | tuple[str, ...] = "fgsm",
        strengths: tuple[float, ...] | None = None,
        *,
        smoothed: bool = False,
        examples: int | str | None = None,
        seed: int = 0,
        progress: Progress = silent,
    ) -> Attacked:
        """Accuracy of evenly spaced test images under attack (fgsm, pgd-linf, pgd-l2), in attacks.tsv."""
        names = (attacks,) if isinstance(attacks, str) else tuple(attacks)
        return run_attacks(
            self, request_for(self.config, names, strengths, smoothed=smoothed, examples=examples, seed=seed), progress
        )

    def report(self, html: Path | str | None = None) -> Path:
        """Write the report of this run (default: RUN/report.html) and return its path."""
        return write_page([self.path], Path(html) if html is not None else self.directory.report, data=self._given_data)


def recorded_classes(ledger: Ledger) -> int:
    """The number of classes, from the opening line of the ledger."""
    stated: Any = ledger.opening.get("classes")
    return integer_in("the ledger's classes", stated, 2, 10**6, error=LedgerError, remedy="restore the ledger from a copy")


def recorded_shape(config: Config, ledger: Ledger) -> Shape | None:
    """Channels, height and width of the images the run was trained on.

    Runs of older versions do not record it: the shape then comes from their data set, or is None if that is not available.
    """
    stated = ledger.opening.get("input_shape")
    if stated is not None:
        return _checked(stated)
    if config.data.path:
        return data_for(config, None).input_shape if exists(Path(config.data.path)) else None
    source = SOURCES.get(config.data.name)
    return None if source is None else source.input_shape


def _checked(stated: Any) -> Shape:
    whole = isinstance(stated, list) and len(stated) == 3 and all(type(size) is int and size >= 1 for size in stated)
    if not whole or math.prod(stated) > LARGEST_IMAGE:
        raise LedgerError("the ledger's first line has no valid 'input_shape'; restore the ledger from a copy")
    channels, height, width = stated
    return channels, height, width
