"""``dpcert export``."""

from pathlib import Path
from typing import Annotated

import typer

from . import _options as o


def export(
    run: o.RunPath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Bundle to write, e.g. model.zip.", show_default=False)],
) -> None:
    """Write a bundle to share: weights, certificates, report and the evidence that dpcert verify checks; nothing secret.

    Verifies the run first, like dpcert verify. The same run always gives the same bytes. Never overwrites an existing FILE.

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
        typer.echo(
            f"note: {CONFIG} contains the path of your data, {done.data_path}; the weights are bound to it, so it is kept"
        )
    typer.echo(f"exported: {file}" if done.is_new else f"nothing to do: {file} already contains this bundle")
    typer.echo(f"anyone can check it with: dpcert verify {file}")
