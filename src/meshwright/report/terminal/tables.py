"""Plans and runs on the terminal: rich tables, and the panel at the end of a demo.

Text from documents is wrapped in `Text`, so that `[D_fsdp]` is never read as rich's markup.
"""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from meshwright.report.cards import cards
from meshwright.report.plan_table import MAX_CANDIDATES, candidates_table
from meshwright.report.run_documents import JsonDocument, Run, bound_text
from meshwright.report.table import Cell, Table
from meshwright.report.terminal.fitted import AtCommas
from meshwright.report.text import percent_text, seconds_text

# Wide enough for the tables if the output is piped and there is no terminal to ask.
PIPED_WIDTH = 140
_MOST_ROWS = 12  # operations of a step
# No yellow, cyan or white, which a light terminal does not show.
STYLE = {
    "good": "green",
    "fine": "blue",
    "warn": "magenta",
    "bad": "red",
    "faint": "dim",
    "chosen": "bold",
    "unfit": "dim",
}


def rich_table(table: Table) -> RichTable:
    """The table as rich prints it: numbers to the right, layouts that break at commas."""
    rich = RichTable(title=table.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    rich.caption = table.caption or None
    for heading, kind in table.columns:
        rich.add_column(heading, justify="right" if kind == "number" else "left", no_wrap=kind == "number")
    kinds = [kind for _, kind in table.columns]
    for row in table.rows:
        rich.add_row(*map(_cell, row.cells, kinds), style=STYLE.get(row.tone, ""))
    return rich


def _cell(cell: Cell, kind: str) -> Text | AtCommas:
    return AtCommas(cell.text) if kind == "layout" else Text(cell.text, style=STYLE.get(cell.tone, ""))


def plan_table(plan: JsonDocument, most: int = MAX_CANDIDATES) -> RichTable:
    """The first `most` candidates of `mw plan train --json`, the chosen layout in bold."""
    table = rich_table(candidates_table(plan, "*", most))
    table.collapse_padding = True
    return table


def breakdown_line(candidate: JsonDocument) -> str:
    """The four operations with the largest shares of a candidate's step, in a line.

    Operations of one name, such as products of large and of small matrices, are told apart by their bounds.
    """
    items = sorted(candidate.get("breakdown") or [], key=lambda item: -item["seconds"])[:4]
    names = [item["name"] for item in items]
    parts = []
    for item in items:
        bound = f" bound by {item['bound_name']}" if names.count(item["name"]) > 1 else ""
        parts.append(f"{item['name']}{bound} {percent_text(item.get('share'))}")
    return f"The step: {', '.join(parts)}." if parts else ""


def breakdown_table(candidate: JsonDocument) -> RichTable:
    """The longest twelve operations of a candidate's step, the longest first."""
    items = sorted(candidate.get("breakdown") or [], key=lambda item: -item["seconds"])
    rows = [
        (str(item["name"]), seconds_text(item["seconds"]), percent_text(item.get("share")), bound_text(item))
        for item in items[:_MOST_ROWS]
    ]
    columns = ("operation", "time|number", "share|number", "bound")
    caption = f"the longest {_MOST_ROWS} of {len(items)}" if len(items) > _MOST_ROWS else ""
    return rich_table(Table.of("Time of a step", columns, rows, caption))


def operations_table(operations: Sequence[JsonDocument]) -> RichTable:
    """Measured and planned time of traced operations, the largest excess over the plan first."""
    rows = [
        (
            str(item["name"]),
            str(item["direction"]),
            "collective" if item["kind"] == "collective" else "",
            seconds_text(item["measured_seconds"]),
            seconds_text(item["planned_seconds"], "not planned"),
        )
        for item in operations[:_MOST_ROWS]
    ]
    columns = ("operation", "pass", "", "measured|number", "planned|number")
    return rich_table(Table.of("Traced operations, a step on the mean device", columns, rows))


def plain_text(*renderables: object) -> str:
    """Tables and text as `mw` prints them without a terminal."""
    console = Console(file=StringIO(), width=PIPED_WIDTH, highlight=False)
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable, markup=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()


def summary_panel(run: Run, places: Mapping[str, str | Path]) -> Panel:
    """The end of a demo: the headlines of the run, then the path of each result. places: path by name."""
    grid = RichTable.grid(padding=(0, 2))
    for card in cards(run):
        value = Text(card.value, style=f"bold {STYLE.get(card.tone, '')}".strip())
        grid.add_row(Text(card.label, style="dim"), value, Text(card.detail, style="dim"))
    parts: list[RichTable | Text] = [grid]
    if run.completion:
        lines = str(run.completion.get("text", "")).splitlines()
        text = Text(str(run.completion.get("prompt", "")), style="bold blue")
        text.append("\n".join(lines[:4]) + ("\n…" if len(lines) > 4 else ""), style="not bold default")
        parts += [Text(), text]
    if places:
        rich = RichTable.grid(padding=(0, 2))
        for name, path in places.items():
            rich.add_row(Text(name, style="dim"), Text(str(path), style="bold", overflow="fold"))
        parts += [Text(), rich]
    return Panel(Group(*parts), title="meshwright", title_align="left", border_style="blue", padding=(1, 2))
