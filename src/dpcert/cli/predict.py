"""``dpcert predict``."""

from pathlib import Path
from typing import Annotated

import typer

from . import _options as o


def predict(
    run: o.RunPath,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE.npy|FILE.png ...", help="Images in [0, 1], or 8 bit.", show_default=False)
    ],
    sigma: Annotated[float | None, typer.Option(help="Smoothing noise.", show_default="the run's")] = None,
    n: Annotated[int, typer.Option(help="Votes that bound the probability.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Probability that an answer is wrong.")] = 0.001,
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
) -> None:
    """The smoothed class and certified L2 radius of your own images, or "abstain"; always with fresh noise.

    Example:  dpcert predict runs/mnist-dp-gaussian digit.png
    """
    from ..runs import predict as own
    from ._show import print_table, progress_bar

    with progress_bar("predict", "images") as progress:
        rows = own.predict_files(
            run,
            files,
            sigma=sigma,
            n=n,
            alpha=alpha,
            device=device or "cpu",
            model=o.factory_of(model),
            data=data,
            progress=progress,
        )
    print_table(("file", "class", "certified radius (L2)", "probability at least"), rows)
