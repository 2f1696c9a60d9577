"""The audit of a program without a plan, for the terminal."""

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.report.figures import bytes_text, seconds_text
from meshwright.report.run_files import JsonDocument
from meshwright.report.schedule_tables import schedule_tables

UNAVAILABLE = "unavailable"


def program_table(audit: JsonDocument) -> Group:
    """One row for each collective, the longest first; then accidents, gaps and the verdict."""
    table = Table(
        title="Collectives of a step", title_justify="left", title_style="bold", box=None, padding=(0, 2)
    )
    for heading in ("tensor", "direction", "collective", "over"):
        table.add_column(heading)
    for heading in ("bytes", "times", "seconds per step"):
        table.add_column(heading, justify="right")
    for row in sorted(_alike(audit["emitted"]), key=_cost, reverse=True):
        table.add_row(*_cells(row))
    gaps = [Text(f"not understood: {line}", style="magenta") for line in audit["not_understood"]]
    said = [*_compiler_lines(audit), *(Text(line, style="dim") for line in audit.get("branches", []))]
    at_once = schedule_tables(audit)
    return Group(table, *at_once, *map(_warning, audit["warnings"]), *said, *gaps, _verdict(audit))


def _compiler_lines(audit: JsonDocument) -> list[Text]:
    """What the compiler warned of while it partitioned the program, with its cures."""
    found = audit.get("compiler_warnings", [])
    if found is None:
        return [Text(f"compiler's warnings: {UNAVAILABLE}", style="dim")]
    return [_line("the compiler", one["what"], one) for one in found]


def _alike(rows: Iterable[JsonDocument]) -> list[JsonDocument]:
    """Rows that differ only in how often they run, as one each."""
    found: dict[tuple[object, ...], JsonDocument] = {}
    for row in rows:
        same = ("tensor", "direction", "op", "bytes", "group_size")
        key = (*(row[name] for name in same), *row["axes"], row["count"] is None)
        first = found.get(key)
        found[key] = dict(row) if first is None else _together(first, row)
    return list(found.values())


def _together(first: JsonDocument, other: JsonDocument) -> JsonDocument:
    return dict(first) | {name: _sum(first[name], other[name]) for name in ("count", "seconds")}


def _sum(first: float | None, other: float | None) -> float | None:
    return None if first is None or other is None else first + other


def _cost(row: JsonDocument) -> tuple[float, int]:
    return row["seconds"] or 0.0, row["bytes"] * (row["count"] or 1)


def _cells(row: JsonDocument) -> list[Text]:
    over = "·".join(row["axes"]) or f"groups of {row['group_size']}"
    count = UNAVAILABLE if row["count"] is None else f"{row['count']:,}"
    cells = (
        row["tensor"],
        row["direction"],
        row["op"],
        over,
        bytes_text(row["bytes"]),
        count,
        _time(row["seconds"]),
    )
    return [Text(cell) for cell in cells]


def _time(seconds: float | None) -> str:
    return UNAVAILABLE if seconds is None else seconds_text(seconds)


def _warning(warning: JsonDocument) -> Text:
    """One accident: its name, what it is and costs, where, and the cure."""
    cost = f"{bytes_text(warning['bytes'])} per device and step, time {_time(warning['seconds'])}"
    return _line(warning["kind"], f"{warning['what']} ({cost})", warning)


def _line(title: str, what: str, warning: JsonDocument) -> Text:
    text = Text(f"{title}: ", style="bold magenta").append(what, style="not bold default")
    for label in ("where", "change"):
        if warning[label]:
            text.append(f"\n  {label}: ", style="not bold dim")
            text.append(warning[label], style="not bold default")
    return text


def _verdict(audit: JsonDocument) -> Text:
    good = audit["verdict"] == "match"
    text = Text("verdict: ").append(audit["verdict"], style=f"bold {'green' if good else 'yellow'}")
    number, gaps = len(audit["warnings"]), len(audit["not_understood"])
    text.append(f" ({len(audit['emitted'])} collectives, {number} warnings, {gaps} not understood)")
    priced = audit["hardware"] and audit["seconds"] is not None
    return text.append(
        f", {_time(audit['seconds'])} of communication per step on {audit['hardware']}" if priced else ""
    )
