"""``dpcert export``."""

from pathlib import Path
from typing import Annotated

import typer

from . import _options as o


def export(
    run: o.RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to write, e.g. model.zip.", show_default=False)],
) -> None:
    """Write a bundle that may be shared: weights, statement, config, ledger, metrics, certificates, report; nothing secret.

    The run is checked first, as dpcert verify would. The same run gives the same bytes; an existing FILE is never replaced.

    Example:  dpcert export runs/mnist-dp-gaussian mnist-dp-gaussian.zip
    """
    from ..paper.comparison import figures_of
    from ..release.export import export as write_bundle
    from ..store.runs import CONFIG

    done = write_bundle(run, file, figures_of)
    typer.echo(done.statement)
    typer.echo(f"in the bundle: {', '.join(done.members)}")
    for name, reason in done.left_out.items():
        typer.echo(f"left out: {name} ({reason})")
    if done.data_path:
        typer.echo(f"note: {CONFIG}, which the weights are bound to, names your data as {done.data_path}")
    typer.echo(f"exported: {file}" if done.is_new else f"nothing to do: {file} holds this bundle already")
    typer.echo(f"anyone can check it with: dpcert verify {file}")
