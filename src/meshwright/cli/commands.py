"""The commands of the modules of this package, each made once a process."""

from functools import cache
from importlib import import_module
from typing import Any

from typer.main import get_command


@cache
def command_in(module: str) -> Any:
    """The command, or the group of commands, of a module of this package."""
    return get_command(import_module(f"meshwright.cli.{module}").app)
