"""``dpcert tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import _options as o


def tune(
    source: o.Source = None,
    space: Annotated[
        Path,
        typer.Option(
            metavar="FILE.toml",
            help="The settings to search: config keys with a list of values, or a range { low = 0.5, high = 8.0, log = true }.",
            show_default=False,
        ),
    ] = ...,  # type: ignore[assignment]
    trials: Annotated[
        int, typer.Option(help="Number of settings to try. With --charge, the mean of a random number of trials.")
    ] = ...,  # type: ignore[assignment]
    charge: Annotated[
        bool,
        typer.Option(
            "--charge", help="Make the whole search part of the budget: the winner's epsilon covers all trials. Random search."
        ),
    ] = False,
    law: Annotated[
        Literal["geometric", "logarithmic", "poisson"] | None,
        typer.Option(help="With --charge: the law of the number of trials.", show_default="geometric"),
    ] = None,
    search: Annotated[
        Literal["random", "halving"],
        typer.Option(help="halving: short trainings first, a third of the settings is kept for three times the training."),
    ] = "random",
    seeds: Annotated[
        int | None, typer.Option(help="Seeds with which the best setting is trained.", show_default="3; with --charge 1")
    ] = None,
    sigma: o.Sigma = None,
    epsilon: o.Epsilon = None,
    delta: o.Delta = None,
    seed: o.Seed = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the search, to create or resume.", show_default="runs/<dataset>-tune")
    ] = None,
    model: o.Model = None,
    data: o.Data = None,
    examples: Annotated[
        str | None, typer.Option(metavar="N|all", help="Number of held-out records to certify.", show_default="500")
    ] = None,
    jobs: o.Jobs = None,
    on: o.On = "processes",
    cpus_per_task: o.CpusPerTask = None,
    gpus_per_task: o.GpusPerTask = 0,
    set_: o.Set = None,
) -> None:
    """Search settings on held-out training records (data.validation), scored by the average certified radius.

    Without --charge, the choice is not part of any epsilon, and every statement says so. All trials can be looked at.

    With --charge, the number of trials is random and secret. Only the best model is released, in OUT/winner, with one epsilon.

    Rerun the same command to resume. More --trials extend a search that is not charged.

    Example:  dpcert tune fashion-mnist/dp-gaussian+consistency --space examples/space.toml --trials 12

    Example:  dpcert tune fashion-mnist/dp-gaussian+consistency --space examples/space.toml --trials 10 --charge
    """
    from ..scale.placement import Placement
    from . import _tune as work

    place = Placement.parse(on, jobs, cpus_per_task, gpus_per_task)
    device = "cuda" if gpus_per_task else None
    chosen = o.assignments(
        set_, model=model, data=data, sigma=sigma, epsilon=epsilon, delta=delta, seed=None, device=device, examples=examples
    )
    options = work.Options(space, trials, charge, law, search, seeds, seed)
    work.tune(source, chosen, options, out, place, model)
