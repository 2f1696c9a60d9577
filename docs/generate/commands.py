"""For reference/commands.md: the help of every command, as `mw` prints it."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from typer.main import get_command

from meshwright.cli.main import COMMANDS, named_values

_WIDTH = 96


def text() -> str:
    """Every command and subcommand with its help text."""
    parts = []
    for path, command, context in commands():
        level = "#" * (1 + len(path))
        said = command.get_help(context).rstrip()
        parts += [f"{level} `mw {' '.join(path)}`", "", "```text", said, "```", ""]
    return "\n".join(parts)


def commands() -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """(path, command, context) of each command in the order of `mw --help`, a group before what it holds."""
    for name in COMMANDS:
        command = named_values(get_command(import_module(f"meshwright.cli.{name}").app))
        yield from _within((name,), command, None)


def _within(path: tuple[str, ...], command: Any, parent: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    name = f"mw {' '.join(path)}" if parent is None else path[-1]
    context = type(command).context_class(
        command, info_name=name, parent=parent, max_content_width=_WIDTH, terminal_width=_WIDTH
    )
    yield path, command, context
    for inner, within in getattr(command, "commands", {}).items():
        yield from _within((*path, inner), within, context)
