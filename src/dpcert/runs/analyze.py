"""From a certified run to samples.tsv: per-sample metrics joined with each certificate. Glue code without math."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._validate import integer_in
from ..analysis.correlate import correlation, split_at
from ..analysis.examples import Analyst, Metrics
from ..analysis.input_hessian import Lanczos
from ..analysis.lipschitz import BallSearch
from ..certification.metrics import earned_radius, even_subset
from ..certification.sweep import require_subset
from ..certification.votes import device_of
from ..errors import ModelError, RunError
from ..progress import Progress, silent
from ..rng import key_from_seed
from ..scale.shards import SharedPass, Wire, leading, tell, told
from ..scale.world import ALONE, World
from ..store.growing import append_missing_rows, rows_so_far
from ..store.records import METRICS, SampleRow
from ..store.runs import SAMPLES
from ..workers import worker_count
from .certified import Certification, main_certification
from .identity import images_sha256
from .loaded import LoadedRun
from .sidecar import check_or_write_sidecar

HEADINGS = ("metric", "25 %", "median", "75 %", "rank correlation", "correlation of its log")
_RESIDUAL_DIGITS = 9  # smaller values are rounding errors, which depend on the batch
_ROWS_ON_CPU, _ROWS_ELSEWHERE = 64, 512


@dataclass(frozen=True)
class AnalyzeRequest:
    """What to measure; `examples` None or "all" means every certified image."""

    examples: int | str | None = None
    seed: int = 0
    layer: str | None = None
    batch: int | None = None
    lanczos: Lanczos = field(default_factory=Lanczos)
    search: BallSearch = field(default_factory=BallSearch)

    def chosen(self, certified: Sequence[int], size: int, path: Path) -> list[int]:
        """Evenly spaced indices among the certified images of a test set of `size` images."""
        if self.examples is None or isinstance(self.examples, str):
            return list(certified)
        require_subset(size, self.examples)
        if not 1 <= self.examples <= len(certified):
            more = f"dpcert certify {path} --examples {self.examples}"
            raise RunError(
                f"--examples is {self.examples}, only {len(certified)} images are certified; certify more with: {more}"
            )
        return [certified[place] for place in even_subset(len(certified), self.examples)]

    def rows_at_once(self, device: torch.device) -> int:
        """Images in a batch."""
        size = self.batch or (_ROWS_ON_CPU if device.type == "cpu" else _ROWS_ELSEWHERE)
        return integer_in("--batch", size, 1)


@dataclass(frozen=True)
class Analysis:
    """The rows of a request as written to disk, and the layer the features were taken from."""

    file: Path
    rows: list[SampleRow]
    layer: str


def analyze(run: LoadedRun, request: AnalyzeRequest, progress: Progress = silent, world: World = ALONE) -> Analysis:
    """Compute the three metrics of the certified test images, one row per image in samples.tsv; existing rows are reused.

    All ranks call this and share the images, batch by batch. Rank 0 locks the run and writes the file.
    """
    data = run.read_data(world)
    x, y = data.x_test, data.y_test
    images = images_sha256(x, y)
    run.agree(world, images, request)
    analysts = _analysts(run, request, x[0])

    def work(analyst: Analyst, part: list[int]) -> tuple[list[int], Metrics]:
        return part, analyst(x[part], y[part], part)

    shared = SharedPass(world, lambda: contextlib.nullcontext(analysts), work, _METRICS)
    file, layer = run.path / SAMPLES, analysts[0].layer
    if not world.is_first:
        shared.serve()
        return Analysis(file, [SampleRow(*values) for values in told(world)], layer)
    with leading(world):
        certified = main_certification(run.directory, run.model_sha256, x, y)
        indices = request.chosen(sorted(certified.rows), len(x), run.path)
        rows_at_once = request.rows_at_once(analysts[0].device)
        with run.directory.locked():
            check_or_write_sidecar(file, _facts(run, request, certified, layer, images))
            _refuse_other_certificates(file, certified)
            rows = append_missing_rows(
                SampleRow, file, indices, lambda todo: _measured(shared, todo, rows_at_once, y, certified), progress
            )
        shared.end()
        tell(world, [astuple(row) for row in rows])
    return Analysis(file, rows, layer)


def _measured(
    shared: SharedPass[Analyst, list[int], tuple[list[int], Metrics]],
    indices: list[int],
    size: int,
    y: Tensor,
    certified: Certification,
) -> Iterator[SampleRow]:
    parts = [indices[first : first + size] for first in range(0, len(indices), size)]
    for part, metrics in shared.results(parts):
        for place, index in enumerate(part):
            yield _row(metrics, place, index, int(y[index]), certified)


_METRICS: Wire[list[int], tuple[list[int], Metrics]] = Wire(
    item=list,
    pack=lambda found: (found[0], [column.tolist() for column in found[1].columns]),
    unpack=lambda sent: (sent[0], Metrics(*(torch.tensor(column, dtype=torch.float64) for column in sent[1]))),
)


def _analysts(run: LoadedRun, request: AnalyzeRequest, example: Tensor) -> list[Analyst]:
    key = key_from_seed(request.seed, "analyze")
    workers = worker_count(device_of(run.model))
    return [Analyst(run.model, example, key, request.layer, request.lanczos, request.search) for _ in range(workers)]


def _facts(run: LoadedRun, request: AnalyzeRequest, certified: Certification, layer: str, images: str) -> dict[str, object]:
    return {
        "layer": layer,
        "seed": request.seed,
        "hessian": asdict(request.lanczos),
        "lipschitz": asdict(request.search),
        "certificates": certified.file,
        "certificates_sha256": certified.request_sha256,
        "model_sha256": run.model_sha256,
        "images_sha256": images,
    }


def _refuse_other_certificates(file: Path, certified: Certification) -> None:
    """Compare the rows: the sidecar matches whenever the settings do, even if the certificates were computed again."""
    for row in rows_so_far(SampleRow, file).values():
        certificate = certified.rows.get(row.idx)
        if certificate is not None and (row.radius, row.correct) != (certificate.radius, certificate.correct):
            raise RunError(f"{file} has a different radius for image {row.idx} than {certified.file}; delete it to start over")


def _row(metrics: Metrics, place: int, index: int, label: int, certified: Certification) -> SampleRow:
    columns = (metrics.gradient_norm, metrics.hessian_norm, metrics.hessian_residual, metrics.lipschitz)
    gradient, hessian, residual, lipschitz = values = [float(column[place]) for column in columns]
    if not np.isfinite(values).all():
        raise ModelError(f"the model's loss or features at test image {index} are not finite; check the weights of the model")
    certificate, predict = certified.rows[index], int(metrics.predict[place])
    figures = (gradient, hessian, round(residual, _RESIDUAL_DIGITS), lipschitz)
    return SampleRow(index, label, predict, *figures, certified.sigma, certificate.radius, certificate.correct)


def summary(rows: Sequence[SampleRow]) -> list[tuple[str, ...]]:
    """One line per metric: quartiles, and correlations with the certified radius of the true label (by rank, of its log)."""
    radius = _radii(rows)
    table = []
    for name in METRICS:
        values = np.array([getattr(row, name) for row in rows])
        with_radius = correlation(values, radius)
        quartiles = (f"{value:.4g}" for value in np.percentile(values, (25, 50, 75)))
        table.append((name, *quartiles, _signed(with_radius.rank), _signed(with_radius.pearson)))
    return table


def splits(rows: Sequence[SampleRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and lines: the mean of each metric below and above each radius threshold of the paper."""
    radius, table = _radii(rows), []
    for name in METRICS:
        parts = split_at(np.array([getattr(row, name) for row in rows]), radius)
        table.append((name, *(_means(part.below, part.above) for part in parts)))
    headings = (f"below | above {p.threshold:g} ({p.below_count} | {p.above_count} images)" for p in split_at(radius, radius))
    return ("mean of", *headings), table


def _radii(rows: Sequence[SampleRow]) -> np.ndarray:
    return earned_radius(np.array([row.radius for row in rows]), np.array([row.correct for row in rows]))


def _signed(value: float | None) -> str:
    return "none" if value is None else f"{value:+.3f}"


def _means(below: float | None, above: float | None) -> str:
    return " | ".join("none" if mean is None else f"{mean:.4g}" for mean in (below, above))
