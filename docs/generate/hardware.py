"""For reference/hardware-sources.md: every figure of every chip of the catalog with its source."""

from io import StringIO

from rich.console import Console

from meshwright.cli.hardware_tables import figures_table
from meshwright.hardware import catalog

_WIDTH = 150


def text() -> str:
    """A table for each chip, as `mw hardware NAME` prints it."""
    parts = []
    for name in catalog.names():
        printed = StringIO()
        Console(file=printed, width=_WIDTH, highlight=False).print(figures_table(catalog.chip(name)))
        lines = "\n".join(line.rstrip() for line in printed.getvalue().splitlines()).strip("\n")
        parts += [f"## {name}", "", "```text", lines, "```", ""]
    return "\n".join(parts)
