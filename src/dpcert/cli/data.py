"""``dpcert data``."""

from typing import Annotated

import typer

from ._options import show_help_without_command

app = typer.Typer(help="List, download and verify data sets.")
app.callback(invoke_without_command=True)(show_help_without_command)
Name = Annotated[str | None, typer.Argument(help="Name of a data set.", show_default="all")]


@app.command("list")
def list_() -> None:
    """List the data sets and where their files are.

    Example:  dpcert data list
    """
    from ..data.registry import SOURCES, locate
    from ._show import print_table

    rows = []
    for source in SOURCES.values():
        places = sorted({str(path.parent) if path else "not downloaded" for path in locate(source).values()})
        rows.append((source.name, ", ".join(places), source.mirror, source.licence))
    print_table(("data set", "folder", "official mirror", "license"), rows)


@app.command()
def fetch(name: Name = None) -> None:
    """Download missing files from the official mirror and check their SHA-256.

    Example:  dpcert data fetch fashion-mnist
    """
    _load(name, "ready")


@app.command()
def verify(name: Name = None) -> None:
    """Check the SHA-256, sizes and value ranges of all local files. Downloads nothing.

    Example:  dpcert data verify mnist
    """
    from ..data.registry import SOURCES, missing_files

    for each in [name] if name else list(SOURCES):
        if each in SOURCES and missing_files(SOURCES[each]):
            typer.echo(f"{each}: not downloaded; get it with: dpcert data fetch {each}")
        else:
            _load(each, "every file has its published SHA-256")


def _load(name: str | None, word: str) -> None:
    from ..data.registry import SOURCES, load_dataset
    from ._show import progress_bar

    for each in [name] if name else list(SOURCES):
        with progress_bar(each, "bytes") as progress:
            data = load_dataset(each, progress=progress)
        typer.echo(f"{each}: {len(data.x_train)} training and {len(data.x_test)} test images, {word}")
