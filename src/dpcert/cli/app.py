"""The commands, and one voice for everything that goes wrong."""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import typer

from ..errors import DpcertError, DpcertWarning
from . import (
    account,
    analyze,
    attack,
    audit,
    certify,
    data,
    export,
    methods,
    predict,
    presets,
    pretrain,
    report,
    reproduce,
    run,
    train,
    verify,
)
from ._options import show_help_without_command

INTERRUPTED = 130
app = typer.Typer(
    name="dpcert",
    help="Train image classifiers that are provably private and provably robust, and check both claims.\n\n"
    "Start with:  dpcert run mnist/dp-gaussian",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DO, LOOK, SHARE, LIST = "Do the work", "Ask and look", "Share and check", "What there is"
app.command("run", rich_help_panel=DO)(run.run)
app.command("train", rich_help_panel=DO)(train.train)
app.command("certify", rich_help_panel=DO)(certify.certify)
app.command("pretrain", rich_help_panel=DO)(pretrain.pretrain)
app.command("predict", rich_help_panel=LOOK)(predict.predict)
app.command("attack", rich_help_panel=LOOK)(attack.attack)
app.command("analyze", rich_help_panel=LOOK)(analyze.analyze)
app.command("report", rich_help_panel=LOOK)(report.report)
app.command("reproduce", rich_help_panel=LOOK)(reproduce.reproduce)
app.command("account", rich_help_panel=LOOK)(account.account)
app.command("audit", rich_help_panel=LOOK)(audit.audit)
app.command("verify", rich_help_panel=SHARE)(verify.verify)
app.command("export", rich_help_panel=SHARE)(export.export)
app.command("methods", rich_help_panel=LIST)(methods.methods)
app.command("presets", rich_help_panel=LIST)(presets.presets)
app.add_typer(data.app, name="data", rich_help_panel=LIST)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    if version:
        from .. import __version__

        typer.echo(f"dpcert {__version__}")
        raise typer.Exit
    show_help_without_command(context)


def main(arguments: list[str] | None = None) -> None:
    """Run one command. Exit codes: 0 done, 2 a wrong request (one line on stderr), 130 interrupted with the state saved."""
    warnings.showwarning = _warn
    with _terminating_cleanly():
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt, without a word
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except typer.TyperException as error:
        _fail(error.format_message() + _given(error, sys.argv[1:] if arguments is None else arguments))
    except DpcertError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'input/output'}: {error.strerror or error}; check the path, its rights and free space")
    except (KeyboardInterrupt, typer.Abort) as error:
        again = _as_typed(sys.argv[1:] if arguments is None else arguments)
        typer.echo(f"interrupted{f': {error}' if str(error) else ''}; resume with: {again}", err=True)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # at once: worker threads of numerical libraries may still be busy


@contextlib.contextmanager
def _terminating_cleanly() -> Iterator[None]:
    """SIGTERM is Ctrl-C from a machine (a job queue, a container): the same clean end, not a kill."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _as_typed(arguments: list[str]) -> str:
    """The command line of this process, quoted so that a shell reads it back."""
    called = Path(sys.argv[0])
    found = shutil.which("dpcert")
    how = [sys.argv[0]]
    if called.name == "__main__.py":  # python -m dpcert
        how = [sys.executable, "-m", "dpcert"]
    elif found is not None and called.exists() and called.samefile(found):
        how = ["dpcert"]
    return shlex.join([*how, *arguments])


def _given(error: typer.TyperException, arguments: list[str]) -> str:
    """The value behind a refused option: the parser's own words leave it out."""
    names = getattr(getattr(error, "param", None), "opts", [])
    for place, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option in names:
            return f" (given: {value if equals else ' '.join(arguments[place + 1 : place + 2])})"
    return "; see --help"


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings are one line for the user; others (a library's) keep their place of origin."""
    ours = issubclass(category, DpcertWarning)
    typer.echo(f"warning: {message}" if ours else f"{filename}:{lineno}: {category.__name__}: {message}", err=True)


def _fail(message: str) -> None:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
