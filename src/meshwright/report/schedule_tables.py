"""What an audited program does at once, for the terminal: what hides its collectives, what makes its peak."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from meshwright.report.documents import Document
from meshwright.report.figures import bytes_text

# Collectives that move less than this share of a step's bytes are left out; so are buffers of a peak.
_SHARE = 0.01
_SHOWN = 8


def schedule_tables(audit: Document) -> list[Table | Text]:
    """Tables of overlap and of the largest buffers; a line where the program does not tell."""
    return [*_beside(audit), *_largest(audit)]


def beside(audit: Document) -> list[tuple[str, str]] | None:
    """The collectives that move most, and the products that run meanwhile; None where unavailable."""
    emitted = [one for one in audit.get("emitted") or [] if one.get("overlaps") is not None]
    if not emitted:
        return None
    moved: dict[str, int] = {}
    products: dict[str, dict[str, None]] = {}
    for one in emitted:
        name = f"{one['tensor']} {one['direction']} {one['op']}"
        moved[name] = moved.get(name, 0) + one["bytes"] * (one["count"] or 1)
        products.setdefault(name, {}).update(dict.fromkeys(one["overlaps"]))
    least = _SHARE * sum(moved.values())
    names = sorted((name for name in moved if moved[name] >= least), key=lambda name: -moved[name])
    return [(name, _short(list(products[name]))) for name in names]


def _short(products: list[str]) -> str:
    more = f" and {len(products) - 2} more" if len(products) > 2 else ""
    return ", ".join(products[:2]) + more if products else "nothing"


def _beside(audit: Document) -> list[Table | Text]:
    found = beside(audit)
    if not audit.get("emitted"):
        return []
    if found is None:
        return [Text("what runs beside collectives: unavailable, none is asynchronous", style="dim")]
    table = _table("What runs beside the largest collectives", "collective", "products meanwhile")
    for name, products in found:
        table.add_row(Text(name), Text(products, style="" if products != "nothing" else "yellow"))
    return [table]


def _largest(audit: Document) -> list[Table | Text]:
    """The largest buffers at the peak, and how much of the compiler's own figure the schedule explains."""
    memory = audit.get("memory") or {}
    if "peak" not in memory:
        return []
    found = memory["peak"]
    if found is None:
        return [Text("what makes the peak: unavailable, the program has no schedule", style="dim")]
    table = _table("Largest buffers at the peak", "tensor", "shape")
    table.add_column("bytes", justify="right", no_wrap=True)
    shown = [one for one in found["buffers"][:_SHOWN] if one["bytes"] >= _SHARE * found["bytes"]]
    for one in shown:
        table.add_row(Text(one["tensor"] or one["instruction"]), Text(one["shape"]), bytes_text(one["bytes"]))
    rest = found["bytes"] - sum(one["bytes"] for one in shown)
    table.add_row(Text("all others", style="dim"), "", bytes_text(rest))
    given = memory.get("compiled_by_cause")
    known = f" of {bytes_text(given['temporaries'])} that the compiler counts" if given else ""
    table.caption = f"{bytes_text(found['bytes'])} of temporaries by the order of the schedule{known}"
    return [table]


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
