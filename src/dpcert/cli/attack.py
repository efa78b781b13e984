"""``dpcert attack``."""

from typing import Annotated

import typer

from . import _options as o


def attack(
    run: o.RunPath,
    attacks: Annotated[
        list[str] | None, typer.Option("--attack", help="fgsm, pgd-linf or pgd-l2 (repeatable).", show_default="fgsm")
    ] = None,
    strengths: Annotated[str | None, typer.Option(metavar="S,S,...", help="Radii of the ball.", show_default="usual")] = None,
    smoothed: Annotated[bool, typer.Option("--smoothed", help="Attack the smoothed classifier, not the base model.")] = False,
    sigma: Annotated[float | None, typer.Option(help="Its smoothing noise.", show_default="the run's")] = None,
    n: Annotated[int, typer.Option(help="Votes that say the smoothed class under attack.")] = 1000,
    examples: Annotated[
        str | None,
        typer.Option(
            metavar="N|all", help="Test images to attack, evenly spread over the test set.", show_default="500, or all if fewer"
        ),
    ] = None,
    starts: Annotated[int | None, typer.Option(help="Random starts of PGD.", show_default="2")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of PGD.", show_default="20")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of starts and noise.")] = 0,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at a time.", show_default="128 on a CPU")] = None,
    device: o.Device = None,
    again: Annotated[bool, typer.Option("--again", help="Replace rows of other steps, starts or examples.")] = False,
) -> None:
    """Accuracy under attack, on evenly spread test images: an upper bound on robustness, where certificates are a lower one.

    Example:  dpcert attack runs/mnist-dp-gaussian --attack pgd-l2 --smoothed
    """
    from ..runs import attack as own
    from ._show import print_table, progress_bar

    names = tuple(attacks or ("fgsm",))
    request = own.request_of(run, names, strengths, steps, starts, smoothed, sigma, n, o.examples_of(examples), seed, batch)
    with progress_bar("data", "bytes") as fetching, progress_bar("attack", "images") as attacking:
        found = own.run_attacks(run, request, device or "cpu", attacking, fetching, again=again)
    print_table(own.HEADINGS, own.summary(found))
    for line in found.contradictions:
        typer.echo(f"warning: {line}", err=True)
    typer.echo(f"rows: {found.file}")
