"""``dpcert data``."""

from typing import Annotated

import typer

from ._options import show_help_without_command

app = typer.Typer(help="Data sets: list, fetch, verify.")
app.callback(invoke_without_command=True)(show_help_without_command)
Name = Annotated[str | None, typer.Argument(help="A data set.", show_default="all")]


@app.command("list")
def list_() -> None:
    """The data sets and where their files are.

    Example:  dpcert data list
    """
    from ..data.registry import SOURCES, locate
    from ._show import print_table

    rows = []
    for source in SOURCES.values():
        places = sorted({str(path.parent) if path else "not here" for path in locate(source).values()})
        rows.append((source.name, ", ".join(places), source.mirror, source.licence))
    print_table(("data set", "found in", "official mirror", "licence"), rows)


@app.command()
def fetch(name: Name = None) -> None:
    """Fetch what is missing from the official mirror, with its SHA-256 checked.

    Example:  dpcert data fetch fashion-mnist
    """
    _load(name, "ready")


@app.command()
def verify(name: Name = None) -> None:
    """Check SHA-256, sizes and ranges of every file that is here; nothing is fetched.

    Example:  dpcert data verify mnist
    """
    from ..data.registry import SOURCES, missing_files

    for each in [name] if name else list(SOURCES):
        if each in SOURCES and missing_files(SOURCES[each]):
            typer.echo(f"{each}: not here; dpcert data fetch {each} gets it")
        else:
            _load(each, "every file has its published SHA-256")


def _load(name: str | None, word: str) -> None:
    from ..data.registry import SOURCES, load_dataset
    from ._show import progress_bar

    for each in [name] if name else list(SOURCES):
        with progress_bar(each, "bytes") as progress:
            data = load_dataset(each, progress=progress)
        typer.echo(f"{each}: {len(data.x_train)} training and {len(data.x_test)} test images, {word}")
