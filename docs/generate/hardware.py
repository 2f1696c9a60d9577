"""For reference/hardware-sources.md: every figure of every chip and network with its source."""

from io import StringIO

from rich.console import Console

from meshwright.cli.hardware_tables import figures_table, network_table
from meshwright.hardware import catalog
from meshwright.hardware.network import NETWORKS

_WIDTH = 144  # characters, as many as a page shows at 1280 px


def text() -> str:
    """A table for each chip and network, as `mw hardware NAME` prints it."""
    tables = {name: figures_table(catalog.chip(name)) for name in catalog.names()}
    tables |= {name: network_table(NETWORKS[name]) for name in NETWORKS.names}
    parts = []
    for name, table in tables.items():
        printed = StringIO()
        Console(file=printed, width=_WIDTH, highlight=False).print(table)
        lines = "\n".join(line.rstrip() for line in printed.getvalue().splitlines()).strip("\n")
        parts += [f"## {name}", "", "```text", lines, "```", ""]
    return "\n".join(parts)
