"""Loaded once by the server that the victims are forked from: imports and calibration are not paid for at every kill.

A training in one thread leaves no thread behind, so the server may be forked; a certification could (ONNX Runtime).
"""

import contextlib
import importlib
import tempfile
from pathlib import Path

import torch

from tests.faults import scene
from tests.faults.victim import settle

for name in ("onnx", "onnxruntime"):  # loaded only when a model is compiled, if they are there
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
torch.set_num_threads(1)
settle()
with tempfile.TemporaryDirectory() as folder:
    scene.train(scene.write_data(Path(folder)), Path(folder) / "run")
