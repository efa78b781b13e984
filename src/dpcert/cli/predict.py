"""``dpcert predict``."""

from pathlib import Path
from typing import Annotated

import typer

from . import _options as o


def predict(
    run: o.RunPath,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE.npy|FILE.png ...",
            help="Images of the size used in training: 8-bit, or floats in [0, 1].",
            show_default=False,
        ),
    ],
    sigma: Annotated[
        float | None, typer.Option(help="Standard deviation of the smoothing noise.", show_default="from the run")
    ] = None,
    n: Annotated[int, typer.Option(help="Votes per image that bound the probability of the class.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="Each answer is wrong with at most this probability.")] = 0.001,
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
) -> None:
    """Predict the class and certified L2 radius of your images, or "abstain".

    The class is a vote over noisy copies of the image; "abstain" means that the vote is too close.

    Every call draws new noise, so the radius varies slightly between calls.

    Example:  dpcert predict runs/mnist-dp-gaussian digit.png
    """
    from ..runs.predict import predict_files
    from ._show import print_table, progress_bar

    with progress_bar("predict", "images") as progress:
        rows = predict_files(
            run,
            files,
            sigma=sigma,
            n=n,
            alpha=alpha,
            device=device or "cpu",
            model=o.factory_for(run, model),
            data=data,
            progress=progress,
        )
    print_table(("file", "class", "certified radius (L2)", "probability at least"), rows)
