"""``dpcert train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import _options as o

if TYPE_CHECKING:
    from ..models.factory import Factory
    from ..runs.config import Config
    from ..scale.world import World


def train(
    source: o.Source = None,
    sigma: o.Sigma = None,
    epsilon: o.Epsilon = None,
    delta: o.Delta = None,
    seed: o.Seed = None,
    out: o.Out = None,
    model: o.Model = None,
    data: o.Data = None,
    examples: Annotated[
        str | None,
        typer.Option(
            metavar="N|all",
            help="Not used in training. Stored in the config: the number of test images that dpcert run certifies.",
            show_default="500, or all if fewer",
        ),
    ] = None,
    device: o.Device = None,
    processes: o.Processes = None,
    set_: o.Set = None,
) -> None:
    """Train a model with differential privacy and print its privacy statement.

    Rerun the same command to resume an interrupted training. Rerunning a finished one changes nothing.

    Example:  dpcert train mnist/dp-gaussian --epsilon 3 --out runs/mine
    """
    world = o.joined(processes)
    from ..runs.resolve import default_out, resolve

    chosen = o.assignments(
        set_, model=model, data=data, sigma=sigma, epsilon=epsilon, delta=delta, seed=seed, device=device, examples=examples
    )
    config = resolve(source, chosen, typer.echo)
    train_and_print(config, out or default_out(config, source), o.factory_of(model), world)


def train_and_print(config: Config, folder: Path, factory: Factory | None, world: World) -> None:
    """Train with a progress bar and print the privacy statement."""
    from ..runs import training as runs
    from ..store.runs import RunDirectory
    from ..training.lifecycle import is_finished
    from ._show import progress_bar

    done_before = world.is_first and is_finished(RunDirectory(folder))
    with progress_bar("data", "bytes") as fetching, progress_bar("train", "steps") as training:
        run = runs.train(config, folder, training, fetching, factory=factory, world=world)
    typer.echo(run.statement)
    typer.echo(f"already trained, nothing to do: {folder}" if done_before else f"trained: {folder}")
