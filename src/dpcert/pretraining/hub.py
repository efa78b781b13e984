"""Download published weights that are too large or not licensed to ship with the package."""

from pathlib import Path

from ..data.fetch import cache_folder, download
from ..errors import DataError, ModelError
from ..models.checkpoint import parse_tensors
from ..progress import Progress, silent

CROSSVIT_PAGE = "https://huggingface.co/timm/crossvit_tiny_240.in1k"
CROSSVIT_URL = f"{CROSSVIT_PAGE}/resolve/main/model.safetensors"


def crossvit_weights(progress: Progress = silent) -> Path:
    """The published CrossViT-Tiny checkpoint, 28 MB: from the cache, or downloaded to it.

    Raises `ModelError` with the manual steps if the hub cannot be reached. What is downloaded must be a safetensors file; its
    names and shapes are checked when it is loaded, and its SHA-256 is recorded with the run.
    """
    target = cache_folder() / "weights" / "crossvit_tiny_240.in1k.safetensors"
    if not target.is_file():
        try:
            download(CROSSVIT_URL, target, lambda data: parse_tensors(data, CROSSVIT_URL), progress)
        except (DataError, OSError) as error:
            raise ModelError(
                f"{error}; download model.safetensors from {CROSSVIT_PAGE} where there is a network "
                "and pass it with model.weights=FILE.safetensors"
            ) from error
    return target
