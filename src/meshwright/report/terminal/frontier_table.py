"""`mw plan serve` on a terminal: the frontier as a table and as a plot."""

from collections.abc import Sequence

from rich.table import Table as RichTable

from meshwright.engines.serving_engine import ServingEngine
from meshwright.report.run_documents import JsonDocument
from meshwright.report.serving_points import TERMINAL, point_cells, point_layout
from meshwright.report.table import Row, Table
from meshwright.report.terminal.charts import text_plot
from meshwright.report.terminal.tables import rich_table
from meshwright.units import format_bytes, format_number_of, format_seconds

# Rows of a frontier on a terminal, evenly spread over its points; fewer in an answer that fits a screen.
_MOST_ROWS, _FEW_ROWS = 14, 7
# The columns of such an answer; the verdict has the others of the chosen point.
_FEW_COLUMNS = ("hardware", "layout", "batch", "TPOT", "TTFT", "per chip", "memory", "price")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def frontier_table(document: JsonDocument, *, few: bool = False) -> RichTable:
    """The frontier by time per token, the chosen point in bold; it is added if it is not on the frontier.

    few: fewer points and columns, for 100 characters.
    """
    best, points = document["best"], document["frontier"]
    shown = _spread(points, _FEW_ROWS if few else _MOST_ROWS)
    if best not in shown:
        shown = sorted([*shown, best], key=lambda point: point["tpot_seconds"])
    names = [column.partition("|")[0] for column in TERMINAL]
    several_types = len({(point["weights_dtype"], point["kv_dtype"]) for point in shown}) > 1
    kept = [
        place
        for place, name in enumerate(names)
        if not few or name in _FEW_COLUMNS or (name == "dtypes" and several_types)
    ]
    rows = [
        Row([point_cells(point)[place] for place in kept], "chosen" if point == best else "")
        for point in shown
    ]
    more = f"{len(shown)} of {len(points):,} points; price per million generated tokens"
    caption = more if len(points) > len(shown) else ""
    table = rich_table(
        Table.of(
            "Throughput per chip against time per token", [TERMINAL[place] for place in kept], rows, caption
        )
    )
    for number, column in enumerate(table.columns):
        column.no_wrap = number != 1  # the layout
    return table


def _spread(points: Sequence[JsonDocument], most: int) -> list[JsonDocument]:
    if len(points) <= most:
        return list(points)
    last = len(points) - 1
    return [points[place] for place in dict.fromkeys(round(n * last / (most - 1)) for n in range(most))]


def frontier_plot(document: JsonDocument) -> str:
    """Each kind of chip's frontier, one letter per point: time per token across, tokens/s per chip up."""
    kinds = dict(zip(document["by_chip"], _LETTERS, strict=False))
    points = [
        (1e3 * point["tpot_seconds"], point["tokens_per_second_per_chip"], kinds[kind])
        for kind, points in document["by_chip"].items()
        for point in points
    ]
    left, right = min(x for x, _, _ in points), max(x for x, _, _ in points)
    top = max(y for _, y, _ in points)
    width, height = 90, 16
    named = ", ".join(f"{letter} {kind}" for kind, letter in kinds.items())
    axis, end = f"{left:.3g} ms per token", f"{right:.3g} ms (log scale)"
    rows = text_plot(points, width, height, (left, right), (0, top), log_y=False)
    lines = [f"{top:>9,.0f} |" if n == 0 else " " * 10 + "|" for n in range(height)]
    return "\n".join(
        [
            f"tokens/s per chip: {named}",
            *(start + row for start, row in zip(lines, rows, strict=True)),
            " " * 10 + "+" + "-" * width,
            " " * 11 + axis + end.rjust(width - len(axis)),
        ]
    )


def phase_lines(document: JsonDocument, engine: ServingEngine | None) -> str:
    """The headlines of one step of one phase. engine: whose steps they are; None for a roofline."""
    memory = document["bytes_per_chip"]
    fits = "fits" if document["fits"] else "does not fit"
    return (
        f"{document['phase']} of {format_number_of(document['batch'], 'sequence')} at "
        f"{document['context']:,} positions on {document['hardware']} as {point_layout(document)}: "
        f"{format_seconds(document['step_seconds'])} per step, {document['tokens_per_second']:,.0f} "
        f"tokens/s, bound by {document['bound_name']}\n"
        f"{format_bytes(memory['total'])} per chip ({fits}): weights {format_bytes(memory['weights'])}, "
        f"cache {format_bytes(memory['cache'])}, buffers {format_bytes(memory['buffers'])}; at most "
        f"{format_number_of(document['max_batch'], 'sequence')} fit\n{_software(engine)}"
    )


def _software(engine: ServingEngine | None) -> str:
    """The software whose step is priced, and its releases if its figures are from load tests of some.

    >>> from meshwright.engines.serving_engine import ENGINES
    >>> _software(ENGINES["sglang"])
    'a step of SGLang, releases 0.5.1 to 0.5.9'
    """
    if engine is None:
        return "a roofline, of no software"
    if engine.name == "meshwright":
        return "a step of mw serve; --engine vllm, sglang or tensorrt-llm prices another server's"
    releases = f", releases {' to '.join(engine.versions)}" if engine.versions else ""
    return f"a step of {engine.about}{releases}"
