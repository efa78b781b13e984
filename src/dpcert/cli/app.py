"""The command-line application: register the commands and print every error as one line."""

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
from typing import Any, NoReturn, TextIO

import typer

from ..errors import DpcertError, DpcertWarning
from ..scale.child import die_with_parent
from ..scale.environment import RENDEZVOUS, is_one_of_several, report_through_file, writes_output
from ..scale.launch import stop_with_launcher
from ..scale.tasks import INTERRUPTED, OutcomeFile
from . import (
    _options,
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
    serve,
    train,
    trial,
    tune,
    verify,
)
from ._options import show_help_without_command

app = typer.Typer(
    name="dpcert",
    help="Train image classifiers that are provably private and provably robust, and check both claims.\n\n"
    "Start with:  dpcert run mnist/dp-gaussian",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
TRAIN, INSPECT, SHARE, LIST = "Train and certify", "Inspect and evaluate", "Share and verify", "List what is available"
app.command("run", rich_help_panel=TRAIN)(run.run)
app.command("train", rich_help_panel=TRAIN)(train.train)
app.command("certify", rich_help_panel=TRAIN)(certify.certify)
app.command("pretrain", rich_help_panel=TRAIN)(pretrain.pretrain)
app.command("tune", rich_help_panel=TRAIN)(tune.tune)
app.command("trial", hidden=True)(trial.trial)
app.command("predict", rich_help_panel=INSPECT)(predict.predict)
app.command("attack", rich_help_panel=INSPECT)(attack.attack)
app.command("analyze", rich_help_panel=INSPECT)(analyze.analyze)
app.command("report", rich_help_panel=INSPECT)(report.report)
app.command("reproduce", rich_help_panel=INSPECT)(reproduce.reproduce)
app.command("account", rich_help_panel=INSPECT)(account.account)
app.command("audit", rich_help_panel=INSPECT)(audit.audit)
app.command("verify", rich_help_panel=SHARE)(verify.verify)
app.command("export", rich_help_panel=SHARE)(export.export)
app.command("serve", rich_help_panel=SHARE)(serve.serve)
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
    """Run one command. Exit codes: 0 success, 2 invalid request (one line on stderr), 130 interrupted with the state saved."""
    warnings.showwarning = _warn
    _options.typed[:] = sys.argv[1:] if arguments is None else arguments
    stop_with_launcher()
    die_with_parent()
    with _terminating_cleanly(), _quiet_unless_first():
        _run(_options.typed, OutcomeFile.claim())


def _run(arguments: list[str], outcome: OutcomeFile) -> None:
    """Run one command and print every error as one line; the parent process, if it asked for it, gets the error's class too."""
    try:
        code = app(arguments, standalone_mode=False)
        if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this code and prints nothing
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except typer.TyperException as error:
        _fail(error.format_message() + _given(error, arguments), error, outcome)
    except DpcertError as error:
        _fail(str(error), error, outcome)
    except OSError as error:
        where, why = error.filename or "input/output", error.strerror or error
        _fail(f"{where}: {why}; check the path, its permissions and the free space", error, outcome)
    except (KeyboardInterrupt, typer.Abort) as error:
        if writes_output():  # the ranks of a group stop together
            again = _as_typed(arguments)
            typer.echo(f"interrupted{f': {error}' if str(error) else ''}; resume with: {again}", err=True)
        _exit_now(INTERRUPTED)  # do not wait: worker threads of numerical libraries may still be busy
    except Exception as error:  # a bug: it keeps its traceback
        outcome.record(type(error).__name__, f"{type(error).__name__}: {error}")
        if _is_first_to_report():
            raise
        _exit_now(1)


@contextlib.contextmanager
def _quiet_unless_first() -> Iterator[None]:
    """Let rank 0 alone write output and warnings: the others would repeat them. Errors are written by one rank, any of them."""
    if writes_output():
        yield
        return
    warnings.showwarning = lambda *_, **__: None
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _is_first_to_report() -> bool:
    """Whether to print an error: of several ranks that fail together, one does."""
    if not is_one_of_several():
        return True
    meeting = os.environ.get(RENDEZVOUS)
    if meeting is not None:
        return report_through_file(Path(meeting))
    from ..scale.world import is_first_to_report

    return is_first_to_report()


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def _terminating_cleanly() -> Iterator[None]:
    """Handle SIGTERM, which job queues and containers send, like Ctrl-C: save the state, then exit."""
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
    """The command line of this process, quoted for a shell."""
    program = Path(sys.argv[0])
    installed = shutil.which("dpcert")
    prefix = [sys.argv[0]]
    if program.name == "__main__.py":  # python -m dpcert
        prefix = [sys.executable, "-m", "dpcert"]
    elif installed is not None and program.exists() and program.samefile(installed):
        prefix = ["dpcert"]
    return shlex.join([*prefix, *arguments])


def _given(error: typer.TyperException, arguments: list[str]) -> str:
    """The value of a refused option, which the parser's message leaves out."""
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
    """Print dpcert's warnings as one line; warnings of other libraries keep their file and line number."""
    ours = issubclass(category, DpcertWarning)
    typer.echo(f"warning: {message}" if ours else f"{filename}:{lineno}: {category.__name__}: {message}", err=True)


def _fail(message: str, error: Exception, outcome: OutcomeFile) -> NoReturn:
    line = " ".join(message.split())
    outcome.record(type(error).__name__, line)
    if _is_first_to_report():
        typer.echo(f"error: {line}", err=True)
    if is_one_of_several():
        _exit_now(2)  # do not wait for ranks that may be gone
    sys.exit(2)
