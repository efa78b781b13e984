"""dpcert: image classifiers that are provably private and provably robust.

data = dpcert.load_dataset("mnist")
run = dpcert.train("cnn", data, dpcert.method("dp-gaussian", sigma=0.5), epsilon=3.0, delta=1e-5)
certificates = dpcert.certify(run.model, data.x_test[:500], data.y_test[:500], sigma=0.5)
print(run.statement, certificates.acr)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .certification.sweep import Certificates, SmoothedClassifier, certify, predict
    from .data.dataset import Dataset
    from .data.registry import load_dataset
    from .methods import Method, method
    from .models.registry import build_model
    from .privacy.accounting import calibrate, epsilon
    from .runs.api import train
    from .runs.open import open_run
    from .training.loop import Run

__version__ = "0.1.0"

# Imported on first use, so that `dpcert --help` does not wait for torch.
_MODULES = {
    "Certificates": "certification.sweep",
    "SmoothedClassifier": "certification.sweep",
    "certify": "certification.sweep",
    "predict": "certification.sweep",
    "Dataset": "data.dataset",
    "load_dataset": "data.registry",
    "train": "runs.api",
    "Method": "methods",
    "method": "methods",
    "build_model": "models.registry",
    "calibrate": "privacy.accounting",
    "epsilon": "privacy.accounting",
    "Run": "training.loop",
    "open_run": "runs.open",
}
__all__ = [
    "Certificates",
    "Dataset",
    "Method",
    "Run",
    "SmoothedClassifier",
    "build_model",
    "calibrate",
    "certify",
    "epsilon",
    "load_dataset",
    "method",
    "open_run",
    "predict",
    "train",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module 'dpcert' has no attribute {name!r}")
