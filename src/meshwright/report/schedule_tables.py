"""What an audited program does at once, for the terminal: what hides its collectives, what makes its peak."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from meshwright.report.audit_view import NOTHING_BESIDE, beside, largest_buffers
from meshwright.report.run_files import JsonDocument


def schedule_tables(audit: JsonDocument) -> list[Table | Text]:
    """Tables of overlap and of the largest buffers; a line where the program does not tell."""
    overlap = [_beside(audit)] if audit.get("emitted") else []
    return [*overlap, *([_largest(audit)] if "peak" in (audit.get("memory") or {}) else [])]


def _beside(audit: JsonDocument) -> Table | Text:
    found = beside(audit)
    if found is None:
        return Text("what runs beside collectives: unavailable, none is asynchronous", style="dim")
    table = _table("What runs beside the largest collectives", "collective", "products meanwhile")
    for name, products in found:
        table.add_row(Text(name), Text(products, style="magenta" if products == NOTHING_BESIDE else ""))
    return table


def _largest(audit: JsonDocument) -> Table | Text:
    found = largest_buffers(audit)
    if found is None:
        return Text("what makes the peak: unavailable, the program has no schedule", style="dim")
    rows, caption = found
    table = _table("Largest buffers at the peak", "tensor", "shape")
    table.add_column("bytes", justify="right", no_wrap=True)
    for tensor, shape, size in rows:
        table.add_row(Text(tensor), Text(shape), size)
    table.caption = caption
    return table


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
