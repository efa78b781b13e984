"""``dpcert analyze``."""

from typing import Annotated

import typer

from . import _options as o


def analyze(
    run: o.RunPath,
    examples: Annotated[
        str | None, typer.Option(metavar="N|all", help="Certified images to measure, evenly spread.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random starts.")] = 0,
    layer: Annotated[
        str | None, typer.Option(help="Layer whose features are looked at.", show_default="what feeds the last linear one")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at a time.", show_default="64 on a CPU")] = None,
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
) -> None:
    """Input-gradient norm, input-Hessian norm and local Lipschitz constant of each certified image, beside its radius.

    Example:  dpcert analyze runs/mnist-dp-gaussian
    """
    from ..runs import analyze as own
    from ._show import print_table, progress_bar

    request = own.AnalyzeRequest(o.examples_of(examples), seed, layer, batch)
    with o.opened(run, model, data, device) as loaded, progress_bar("analyze", "images") as analyzing:
        found = own.analyze(loaded, request, analyzing)
    print_table(own.HEADINGS, own.summary(found.rows), f"{len(found.rows)} images; correlation with the certified radius (L2)")
    print_table(*own.splits(found.rows))
    typer.echo(f"Hessian residual at most {max(row.hessian_residual for row in found.rows):.2g}; features: {found.layer}")
    typer.echo(f"rows: {found.file}")
