"""``dpcert certify``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import _options as o

if TYPE_CHECKING:
    from ..runs.certify import CertifyRequest
    from ..runs.loaded import LoadedRun
    from ..scale.world import World


def certify(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directories written by dpcert run or dpcert train. Runs with the same frozen layers share one pass.",
            show_default=False,
        ),
    ],
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the smoothing noise.", show_default="from the run")
    ] = None,
    n0: Annotated[int, typer.Option(help="Votes per image that select the class.")] = 100,
    n: Annotated[int, typer.Option(help="Votes per image that bound the probability of that class.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Each certificate is wrong with at most this probability.")] = 0.001,
    examples: o.Examples = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the smoothing noise.", show_default="random")
    ] = None,
    radius: Annotated[
        float | None,
        typer.Option(
            help="Only decide whether each image is robust at this L2 radius. Needs far fewer votes.", show_default=False
        ),
    ] = None,
    fresh_noise: Annotated[
        bool, typer.Option("--fresh-noise", help="Draw new noise for each image. Slower; by default all images share it.")
    ] = False,
    skip_misclassified: Annotated[
        bool | None,
        typer.Option(
            "--skip-misclassified/--no-skip-misclassified",
            help="Compute no radius for images that the model misclassifies.",
            show_default="from the run",
        ),
    ] = None,
    simultaneous: Annotated[
        bool,
        typer.Option(
            "--simultaneous", help="Divide alpha by the number of images. Then alpha covers all certificates at once."
        ),
    ] = False,
    split: Annotated[
        Literal["test", "validation"], typer.Option(help="Images to certify; validation needs a run with data.validation.")
    ] = "test",
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
    processes: o.Processes = None,
) -> None:
    """Compute certified L2 radii for test images.

    The smoothed model votes over noisy copies of an image. No change of the image within the radius changes its class.

    A model with noise inside (PixelDP and its kin) votes with that noise; omit --sigma. The file also has PixelDP's own bound.

    Several runs that differ only in their last layer, e.g. heads on one frozen backbone, are certified in one pass.

    Rerun the same command to resume. A larger --examples adds images; a smaller one changes nothing.

    With --processes, several processes share the images. Their number does not change the rows, and may change on resume.

    Example:  dpcert certify runs/mnist-dp-gaussian --examples all
    """
    world = o.joined(processes)
    from ..certification.request import Request
    from ..runs.certify import CertifyRequest

    def request_for(run: LoadedRun) -> CertifyRequest:
        skips = run.config.certify.skip_misclassified if skip_misclassified is None else skip_misclassified
        how = Request.under(run.smoothing(sigma), n0, n, alpha, fresh_noise, skips)
        return CertifyRequest(how, o.examples_of(examples), seed, split, simultaneous)

    with o.all_opened(runs, model, data, o.own_device(world, device)) as loaded:
        asked = [(run, request_for(run)) for run in loaded]
        if radius is None:
            certify_all_and_print(asked, world)
            return
        for run, request in asked:
            decide_and_print(run, request, radius, world)


def certify_and_print(run: LoadedRun, request: CertifyRequest, world: World) -> None:
    """Certify with a progress bar and print the average certified radius."""
    certify_all_and_print([(run, request)], world)


def certify_all_and_print(asked: Sequence[tuple[LoadedRun, CertifyRequest]], world: World) -> None:
    """Certify runs with one progress bar and print the average certified radius of each."""
    from ..runs import certify as runs
    from ._show import progress_bar

    with progress_bar("certify", "images") as certifying:
        found = runs.certify_runs(asked, certifying, typer.echo, world)
    for (run, request), figures in zip(asked, found, strict=True):
        low, high = figures["acr_interval"]
        interval = "" if high is None else f" (95 % interval {low:.3f} to {high:.3f})"
        name = f"{run.path}: " if len(asked) > 1 else ""
        typer.echo(
            f"{name}{request.how.law.in_words}: ACR {figures['acr']:.3f}{interval}, "
            f"{figures['abstained']} of {figures['examples']} abstained, {figures['subset']}"
        )
        _print_what_is_kept(request, figures)
        if len(asked) == 1:
            typer.echo(_what_alpha_is(figures, request.how.alpha, "certificate"))
            typer.echo(f"certificates: {run.path / figures['file']}")
    if len(asked) > 1:
        typer.echo(_what_alpha_is(found[0], asked[0][1].how.alpha, "certificate"))


def _print_what_is_kept(request: CertifyRequest, figures: dict[str, Any]) -> None:
    """Say so if more images are stored than were requested: the printed figures cover all of them."""
    if request.is_for_fewer_than(figures["examples"]):
        typer.echo(f"{figures['file']} already has {figures['examples']:,} certified images; keeping them")


def _what_alpha_is(figures: dict[str, Any], alpha: float, thing: str) -> str:
    if figures["alpha_is"] == "simultaneous":
        return f"all {figures['examples']} {thing}s hold together with probability at least 1 - {alpha:g}"
    return f"each {thing} holds on its own with probability at least 1 - {alpha:g}"


def decide_and_print(run: LoadedRun, request: CertifyRequest, radius: float, world: World) -> None:
    """Decide robustness at one radius with a progress bar and print the share and the votes saved."""
    from ..runs import certify as runs
    from ._show import progress_bar

    with progress_bar("decide", "images") as deciding:
        figures = runs.decide(run, request, radius, deciding, world)
    low, high = figures["certified_accuracy_interval"]
    share = figures["votes"] / figures["votes_of_certify"]
    typer.echo(
        f"certified accuracy at radius {radius:g}: {100 * figures['certified_accuracy']:.2f} % "
        f"(95 % interval {100 * low:.2f} to {100 * high:.2f}) of {figures['examples']} images, {figures['undecided']} undecided"
    )
    _print_what_is_kept(request, figures)
    typer.echo(
        f"{figures['votes']} votes, {100 * share:.2f} % of CERTIFY's {figures['votes_of_certify']}; "
        f"{_what_alpha_is(figures, request.how.alpha, 'answer')}, early stopping included"
    )
    typer.echo(f"rows: {run.path / figures['file']}")
