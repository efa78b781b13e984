"""``dpcert attack``."""

from typing import Annotated

import typer

from . import _options as o


def attack(
    run: o.RunPath,
    attacks: Annotated[
        list[str] | None, typer.Option("--attack", help="fgsm, pgd-linf or pgd-l2. Repeatable.", show_default="fgsm")
    ] = None,
    strengths: Annotated[
        str | None,
        typer.Option(
            metavar="S,S,...",
            help="Strengths to try: the largest allowed change of the image, in the norm of the attack (pixels in [0, 1]).",
            show_default="a list for each attack",
        ),
    ] = None,
    smoothed: Annotated[
        bool, typer.Option("--smoothed", help="Attack the smoothed model (a vote over noisy copies), not the base model.")
    ] = False,
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of its noise (--smoothed).", show_default="from the run")
    ] = None,
    n: Annotated[int, typer.Option(help="Votes that decide the class (--smoothed).")] = 1000,
    examples: Annotated[
        str | None,
        typer.Option(
            metavar="N|all",
            help="Number of test images to attack, evenly spaced over the test set.",
            show_default="500, or all if fewer",
        ),
    ] = None,
    starts: Annotated[int | None, typer.Option(help="Number of random starts of PGD.", show_default="2")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps of PGD.", show_default="20")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random starts and of the smoothing noise.")] = 0,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per batch.", show_default="128 on a CPU")] = None,
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
    again: Annotated[
        bool, typer.Option("--again", help="Replace stored results that used other steps, starts or examples.")
    ] = False,
) -> None:
    """Attack test images and measure the accuracy that remains.

    A stronger attack may lower it further, so it is an upper bound on the robust accuracy. Certificates give a lower bound.

    Example:  dpcert attack runs/mnist-dp-gaussian --attack pgd-l2 --smoothed
    """
    from ..runs import attack as attacks_on_runs
    from ..runs.resolve import read_config
    from ._show import print_table, progress_bar

    request = attacks_on_runs.request_for(
        read_config(run),
        tuple(attacks or ("fgsm",)),
        None if strengths is None else attacks_on_runs.numbers(strengths),
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
        result = attacks_on_runs.run_attacks(loaded, request, attacking, again=again)
    print_table(attacks_on_runs.HEADINGS, attacks_on_runs.summary(result))
    for line in result.contradictions:
        typer.echo(f"warning: {line}", err=True)
    typer.echo(f"rows: {result.file}")
