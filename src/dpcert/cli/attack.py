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
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
    again: Annotated[bool, typer.Option("--again", help="Replace rows of other steps, starts or examples.")] = False,
) -> None:
    """Accuracy under attack, on evenly spread test images: an upper bound on robustness, where certificates are a lower one.

    Example:  dpcert attack runs/mnist-dp-gaussian --attack pgd-l2 --smoothed
    """
    from ..runs import attack as own
    from ..runs.resolve import read_config
    from ._show import print_table, progress_bar

    request = own.request_for(
        read_config(run),
        tuple(attacks or ("fgsm",)),
        None if strengths is None else own.numbers(strengths),
        steps=steps,
        starts=starts,
        smoothed=smoothed,
        sigma=sigma,
        votes=n,
        examples=o.examples_of(examples),
        seed=seed,
        batch=batch,
    )
    with o.opened(run, model, data, device) as loaded, progress_bar("attack", "images") as attacking:
        found = own.run_attacks(loaded, request, attacking, again=again)
    print_table(own.HEADINGS, own.summary(found))
    for line in found.contradictions:
        typer.echo(f"warning: {line}", err=True)
    typer.echo(f"rows: {found.file}")
