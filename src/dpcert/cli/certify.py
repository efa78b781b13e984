"""``dpcert certify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import _options as o

if TYPE_CHECKING:
    from ..runs.certify import CertifyRequest
    from ..runs.loaded import LoadedRun


def certify(
    run: o.RunPath,
    sigma: Annotated[float | None, typer.Option(help="Smoothing noise.", show_default="the run's")] = None,
    n0: Annotated[int, typer.Option(help="Votes that select the class.")] = 100,
    n: Annotated[int, typer.Option(help="Votes that bound its probability.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Each certificate fails with at most this probability.")] = 0.001,
    examples: o.Examples = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the noise.", show_default="fresh")] = None,
    radius: Annotated[
        float | None, typer.Option(help="Only ask: robust at this L2 radius? Far fewer votes.", show_default=False)
    ] = None,
    fresh_noise: Annotated[
        bool, typer.Option("--fresh-noise", help="Noise of its own for each image, not a shared bank.")
    ] = False,
    skip_misclassified: Annotated[
        bool, typer.Option("--skip-misclassified", help="No radius where the class is wrong.")
    ] = False,
    simultaneous: Annotated[
        bool, typer.Option("--simultaneous", help="Divide alpha by the number of images: all certificates hold together.")
    ] = False,
    split: Annotated[Literal["test", "validation"], typer.Option(help="Which images.")] = "test",
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
) -> None:
    """Certify evenly spread test images; more --examples extend what is there, fewer change nothing.

    An interrupted call resumes.

    Example:  dpcert certify runs/mnist-dp-gaussian --examples all
    """
    from ..certification.sweep import Request
    from ..runs.certify import CertifyRequest
    from ..runs.resolve import read_config

    chosen = read_config(run).certification_sigma if sigma is None else sigma
    how = Request(chosen, n0, n, alpha, fresh_noise, skip_misclassified)
    request = CertifyRequest(how, o.examples_of(examples), seed, split, simultaneous)
    with o.opened(run, model, data, device) as loaded:
        if radius is None:
            certify_and_tell(loaded, request)
        else:
            decide_and_tell(loaded, request, radius)


def certify_and_tell(run: LoadedRun, request: CertifyRequest) -> None:
    """Certify with a progress bar and print the average certified radius."""
    from ..runs import certify as runs
    from ._show import progress_bar

    with progress_bar("certify", "images") as certifying:
        figures = runs.certify(run, request, certifying)
    low, high = figures["acr_interval"]
    interval = "" if high is None else f" (95 % interval {low:.3f} to {high:.3f})"
    typer.echo(
        f"sigma {figures['sigma']:g}: ACR {figures['acr']:.3f}{interval}, "
        f"{figures['abstained']} of {figures['examples']} abstained, {figures['subset']}"
    )
    _tell_what_is_kept(request, figures)
    typer.echo(_what_alpha_is(figures, request.how.alpha, "certificate"))
    typer.echo(f"certificates: {run.path / figures['file']}")


def _tell_what_is_kept(request: CertifyRequest, figures: dict[str, Any]) -> None:
    """More examples extend a file, fewer change nothing: said, so that nobody takes the figures for those of fewer images."""
    if request.is_for_fewer_than(figures["examples"]):
        typer.echo(f"{figures['file']} already has {figures['examples']:,} certified images; keeping them")


def _what_alpha_is(figures: dict[str, Any], alpha: float, thing: str) -> str:
    if figures["alpha_is"] == "simultaneous":
        return f"all {figures['examples']} {thing}s hold together with probability at least 1 - {alpha:g}"
    return f"each {thing} holds on its own with probability at least 1 - {alpha:g}"


def decide_and_tell(run: LoadedRun, request: CertifyRequest, radius: float) -> None:
    """Decide robustness at one radius with a progress bar and print the share and the votes saved."""
    from ..runs import certify as runs
    from ._show import progress_bar

    with progress_bar("decide", "images") as deciding:
        found = runs.decide(run, request, radius, deciding)
    low, high = found["certified_accuracy_interval"]
    share = found["votes"] / found["votes_of_certify"]
    typer.echo(
        f"certified accuracy at radius {radius:g}: {100 * found['certified_accuracy']:.2f} % (95 % interval {100 * low:.2f} to "
        f"{100 * high:.2f}) of {found['examples']} images, {found['undecided']} undecided"
    )
    _tell_what_is_kept(request, found)
    typer.echo(
        f"{found['votes']} votes, {100 * share:.2f} % of CERTIFY's {found['votes_of_certify']}; "
        f"{_what_alpha_is(found, request.how.alpha, 'answer')}, whenever it stopped"
    )
    typer.echo(f"rows: {run.path / found['file']}")
