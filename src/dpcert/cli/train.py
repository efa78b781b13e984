"""``dpcert train``."""

import typer

from . import _options as o


def train(
    source: o.Source = None,
    sigma: o.Sigma = None,
    epsilon: o.Epsilon = None,
    delta: o.Delta = None,
    seed: o.Seed = None,
    out: o.Out = None,
    device: o.Device = None,
    set_: o.Set = None,
) -> None:
    """Train privately; go on where an interrupted run of the same request stopped.

    Example:  dpcert train mnist/dp-gaussian --epsilon 3 --out runs/mine
    """
    from ..experiment import run as experiment
    from ._show import progress_bar

    chosen = o.assignments(set_, sigma=sigma, epsilon=epsilon, delta=delta, seed=seed, device=device)
    config = experiment.resolve(source, chosen)
    folder = out or experiment.default_out(config)
    with progress_bar("data", "bytes") as fetching, progress_bar("train", "steps") as training:
        run = experiment.train(config, folder, training, fetching)
    typer.echo(run.statement)
    typer.echo(f"trained: {folder}")
