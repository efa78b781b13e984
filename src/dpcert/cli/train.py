"""``dpcert train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import _options as o

if TYPE_CHECKING:
    from ..models.factory import Factory
    from ..runs.config import Config


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
            metavar="N|all", help="Recorded for dpcert run; training certifies nothing.", show_default="500, or all if fewer"
        ),
    ] = None,
    device: o.Device = None,
    set_: o.Set = None,
) -> None:
    """Train privately, or resume an interrupted run of the same request.

    Example:  dpcert train mnist/dp-gaussian --epsilon 3 --out runs/mine
    """
    from ..runs.resolve import default_out, resolve

    chosen = o.assignments(
        set_, model=model, data=data, sigma=sigma, epsilon=epsilon, delta=delta, seed=seed, device=device, examples=examples
    )
    config = resolve(source, chosen)
    train_and_tell(config, out or default_out(config), o.factory_of(model))


def train_and_tell(config: Config, folder: Path, factory: Factory | None) -> None:
    """Train with a progress bar and print the privacy statement."""
    from ..runs import training as runs
    from ..store.runs import RunDirectory
    from ..training.loop import is_finished
    from ._show import progress_bar

    done_before = is_finished(RunDirectory(folder))
    with progress_bar("data", "bytes") as fetching, progress_bar("train", "steps") as training:
        run = runs.train(config, folder, training, fetching, factory=factory)
    typer.echo(run.statement)
    typer.echo(f"already trained, nothing to do: {folder}" if done_before else f"trained: {folder}")
