"""``dpcert analyze``."""

from typing import Annotated

import typer

from . import _options as o


def analyze(
    run: o.RunPath,
    examples: Annotated[
        str | None,
        typer.Option(
            metavar="N|all", help="Number of certified images to measure, evenly spaced over them.", show_default="all"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random starting points of the measurements.")
    ] = 0,
    layer: Annotated[
        str | None,
        typer.Option(help="Name of the layer whose features are measured.", show_default="the input of the last linear layer"),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Images per batch.", show_default="64 on a CPU")] = None,
    model: o.Model = None,
    data: o.Data = None,
    device: o.Device = None,
    processes: o.Processes = None,
) -> None:
    """Measure the input-gradient norm, input-Hessian norm and local Lipschitz constant at each certified image.

    Prints how each of them correlates with the certified radius. Run dpcert certify first.

    With --processes, several processes share the images. Their number does not change the rows, and may change on resume.

    Example:  dpcert analyze runs/mnist-dp-gaussian
    """
    world = o.joined(processes)
    from ..runs import analyze as analysis
    from ._show import print_table, progress_bar

    request = analysis.AnalyzeRequest(o.examples_of(examples), seed, layer, batch)
    with o.opened(run, model, data, o.own_device(world, device)) as loaded, progress_bar("analyze", "images") as analyzing:
        result = analysis.analyze(loaded, request, analyzing, world)
    title = f"{len(result.rows)} images; correlation with the certified radius (L2)"
    print_table(analysis.HEADINGS, analysis.summary(result.rows), title)
    print_table(*analysis.splits(result.rows))
    typer.echo(f"Hessian residual at most {max(row.hessian_residual for row in result.rows):.2g}; features: {result.layer}")
    typer.echo(f"rows: {result.file}")
