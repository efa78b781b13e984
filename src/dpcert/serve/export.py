"""The static demo: the page and the model as files for any web host. Votes are computed in the reader's browser."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

from ..certification.compiled import whole_graph
from ..certification.heads import each_vote_alone
from ..certification.votes import voting_copy
from ..errors import ModelError, RunError
from ..runs.open import OpenRun
from ..store.durable import cannot_write
from .gallery import Gallery, gallery_of
from .model import served
from .pages import INDEX, page_files
from .runtime import runtime_files
from .settings import Asked

IMAGES = 24  # of the gallery
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
_SERVER, _BROWSER = '<meta name="dpcert-votes" content="server">', '<meta name="dpcert-votes" content="browser">'


def write_demo(
    run: OpenRun, directory: Path, sigma: float | None, n0: int, n: int, alpha: float, gallery: bool | None = None
) -> Path:
    """Write the demo to a new or empty `directory` and return that. It appears at once and complete, or not at all.

    Its files are the page, the released model and what the run says about itself; nothing secret. Test images of custom
    data are left out unless `gallery` is true: epsilon does not cover them.
    """
    _refuse_full(directory)
    model = served(run, sigma, n0, Asked(n, alpha), gallery=True)
    runtime = runtime_files()  # what may be missing comes before the work
    files = {
        "model.json": _json(model.card.content()),
        "gallery.json": _json(_images(gallery_of(run, gallery))),
        "model.onnx": graph_of(run.model, run.input_shape, model.sigma),
        **demo_page(),
        **runtime,
    }
    _write(directory, files)
    return directory


def demo_page() -> dict[str, bytes]:
    """Return the page by URL, as it works without a server: it computes the votes, and its head sets the policy."""
    files = {f"page/{name}": file.content for name, file in page_files().items() if name != "server.js"}
    index = files.pop(f"page/{INDEX}").decode()
    if index.count(_SERVER) != 1:
        raise RuntimeError("index.html does not say where the votes are computed")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    referrer = '<meta name="referrer" content="no-referrer">'
    return {INDEX: index.replace(_SERVER, f"{policy}\n{referrer}\n{_BROWSER}").encode(), **files}


def graph_of(model: nn.Module, shape: tuple[int, int, int], sigma: float) -> bytes:
    """Return the model as an ONNX graph for batches of noisy copies."""
    whole = each_vote_alone(voting_copy(model).cpu(), shape)
    if not isinstance(whole, nn.Module):
        raise ModelError("the model cannot run on several images at a time without mixing them; a demo cannot be written")
    return whole_graph(whole, torch.full((1, *shape), 0.5), sigma)


def _images(gallery: Gallery | str) -> list[dict[str, object]]:
    if isinstance(gallery, str):
        return []
    shown = (gallery.image(index) for index in range(min(IMAGES, len(gallery))))
    return [{"index": image.index, "label": image.label, "image": _rounded(image.image)} for image in shown]


def _rounded(image: list[list[list[float]]]) -> list[list[list[float]]]:
    """Six digits: a third of the size, and eight bits of a pixel have three."""
    return [[[round(value, 6) for value in row] for row in plane] for plane in image]


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _refuse_full(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RunError(f"{directory} exists and is not an empty folder; pass a new folder to --export")


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Write all files to a folder next to the new one, which then takes its name."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            for name, content in files.items():
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_bytes(content)
            made.chmod(0o755)
            made.rename(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                shutil.rmtree(made)
            raise
    except OSError as error:
        raise cannot_write(directory, error) from error
