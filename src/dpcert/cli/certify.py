"""``dpcert certify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import _options as o

if TYPE_CHECKING:
    from ..experiment.run import CertifyRequest


def certify(
    run: o.RunPath,
    sigma: Annotated[float | None, typer.Option(help="Smoothing noise.", show_default="the run's")] = None,
    n0: Annotated[int, typer.Option(help="Votes that select the class.")] = 100,
    n: Annotated[int, typer.Option(help="Votes that bound its probability.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Each certificate fails with at most this probability.")] = 0.001,
    examples: o.Examples = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the noise.", show_default="fresh")] = None,
    split: Annotated[Literal["test", "validation"], typer.Option(help="Which images.")] = "test",
    device: o.Device = None,
) -> None:
    """Certify test images 0, k, 2k, ...; more --examples extend what is there, an interrupted call goes on.

    Example:  dpcert certify runs/mnist-dp-gaussian --examples all
    """
    from ..experiment.run import CertifyRequest, read_config

    chosen = read_config(run).certification_sigma if sigma is None else sigma
    request = CertifyRequest(chosen, n0, n, alpha, o.examples_of(examples), seed, split)
    certify_and_tell(run, request, device or "cpu")


def certify_and_tell(run: Path, request: CertifyRequest, device: str) -> None:
    """Certify with a progress bar and print the average certified radius."""
    from ..experiment import run as experiment
    from ._show import progress_bar

    with progress_bar("data", "bytes") as fetching, progress_bar("certify", "images") as certifying:
        figures = experiment.certify(run, request, device, certifying, fetching)
    low, high = figures["acr_interval"]
    typer.echo(
        f"sigma {request.sigma:g}: ACR {figures['acr']:.3f} (95 % interval {low:.3f} to {high:.3f}), "
        f"{figures['abstained']} of {figures['examples']} abstained, {figures['subset']}"
    )
    typer.echo(f"certificates: {run / figures['file']}")
