"""``dpcert trial``: one trial of a search, started by ``dpcert tune``. Not listed in the help."""

from pathlib import Path
from typing import Annotated

import typer

from . import _options as o


def trial(
    config: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Config of the trial.")],
    out: Annotated[Path, typer.Option(help="Run directory of the trial.")],
    model: o.Model = None,
) -> None:
    """Train, and certify held-out records. Started by dpcert tune.

    Example:  dpcert tune mnist/dp-gaussian --space space.toml --trials 8
    """
    from ..runs.resolve import resolve
    from ..tuning.trials import run_trial
    from ._show import progress_bar

    with progress_bar("train", "steps") as training, progress_bar("certify", "images") as certifying:
        run_trial(resolve(str(config), {}), out, training, certifying, o.factory_of(model))
