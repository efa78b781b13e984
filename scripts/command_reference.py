"""Generate the command reference as Markdown from the commands: ``python scripts/command_reference.py > commands.md``."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from dpcert.cli.app import app

INTRODUCTION = """\
# Commands

This page is generated from the command line. `dpcert COMMAND --help` prints the same text.

Call the program as `.venv/bin/dpcert`, or as `dpcert` after `source .venv/bin/activate`.
Exit codes: 0 done; 2 a wrong request, with one line on stderr; 130 interrupted, with the state saved.
"""


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name; a group yields its members."""
    yield from _members(typer.main.get_command(app), "dpcert")


def _members(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _members(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _cell(text: str) -> str:
    """A help text as a table cell: the default as a sentence, without numeric limits."""
    text = re.sub(r"; [\d<=]*x[<>]=\d+", "", " ".join(text.split()))
    text = re.sub(r"\[default: \(?(.*?)\)?\]$", r"Default: \1.", text).replace("[required]", "Required.")
    return text.replace("|", "\\|").replace("<", "&lt;")


def _names(names: str) -> str:
    """Option names as code; a bar inside code does not end the cell."""
    return names.replace(" range>", ">")


def _paragraph(text: str) -> str:
    if text.startswith("Example:"):
        return f"```console\n$ {text.removeprefix('Example:').strip()}\n```"
    return text.replace("<", "&lt;")


def _section(name: str, command: Any) -> str:
    """Heading, help text, usage line, and a table of arguments and options."""
    context = command.make_context(name, [], resilient_parsing=True)
    described = [parameter.get_help_record(context) for parameter in command.params if not parameter.hidden]
    paragraphs = [_paragraph(" ".join(text.split())) for text in (command.help or "").split("\n\n")]
    usage = context.get_usage().removeprefix("Usage: ")
    rows = [f"| `{_names(names)}` | {_cell(text)} |" for names, text in described]
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows]) if rows else ""
    return "\n\n".join([f"## {name}", *paragraphs, f"```text\n{usage}\n```", table]).strip()


def command_reference() -> str:
    """The whole page."""
    return "\n\n".join([INTRODUCTION.strip(), *(_section(name, command) for name, command in all_commands())]) + "\n"


if __name__ == "__main__":
    print(command_reference(), end="")
