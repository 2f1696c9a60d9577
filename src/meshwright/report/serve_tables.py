"""`mw plan serve` and `mw compare` on a terminal: tables of ways to serve, and the frontier as a plot."""

from collections.abc import Sequence
from math import log

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meshwright.report.fitted import AtCommas
from meshwright.report.run_files import JsonDocument
from meshwright.units import format_bytes, format_number_of, format_seconds

# Rows of a frontier that a terminal shows, evenly spread over its points.
_MOST_ROWS = 14
_PLOT_SIZE = (90, 16)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def frontier_table(document: JsonDocument) -> Table:
    """The frontier by time per token, the chosen point in bold (added if it is not on the frontier)."""
    best, points = document["best"], document["frontier"]
    shown = _spread(points)
    if best not in shown:
        shown = sorted([*shown, best], key=lambda point: point["tpot_seconds"])
    table = Table(title="Throughput per chip against time per token", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("hardware", no_wrap=True)
    table.add_column("layout")
    table.add_column("dtypes", no_wrap=True)
    for heading in ("batch", "TPOT", "TTFT", "tok/s", "per chip", "memory", "price"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for point in shown:
        table.add_row(*_cells(point), style="bold" if point == best else "")
    if len(points) > len(shown):
        table.caption = f"{len(shown)} of {len(points):,} points; price per million generated tokens"
    return table


def requests_text(requests: JsonDocument) -> str:
    """What is served, in words."""
    text = f"prompts of {requests['prompt_tokens']:,} tokens, answers of {requests['output_tokens']:,}"
    longest = requests["longest"]
    return f"{text} on average, together at most {longest:,}" if longest else text


def _cells(point: JsonDocument) -> list[str | AtCommas]:
    price = point["price_per_million_tokens"]
    return [
        point["hardware"],
        AtCommas(point["layout"].removesuffix(",remat=none")),
        f"{point['weights_dtype']}/{point['kv_dtype']}",
        f"{point['batch']:,}",
        format_seconds(point["tpot_seconds"]),
        format_seconds(point["ttft_seconds"]),
        f"{point['tokens_per_second']:,.0f}",
        f"{point['tokens_per_second_per_chip']:,.1f}",
        format_bytes(point["bytes_per_chip"]["total"]),
        "" if price is None else f"{price:,.2f} {point['currency']}",
        str(point["bound_name"]),
    ]


def _spread(points: Sequence[JsonDocument]) -> list[JsonDocument]:
    if len(points) <= _MOST_ROWS:
        return list(points)
    last = len(points) - 1
    places = dict.fromkeys(round(row * last / (_MOST_ROWS - 1)) for row in range(_MOST_ROWS))
    return [points[place] for place in places]


def frontier_plot(document: JsonDocument) -> str:
    """Each kind of chip's frontier, one letter per point: time per token across, tokens/s per chip up."""
    kinds = dict(zip(document["by_chip"], _LETTERS, strict=False))
    points = [
        (1e3 * point["tpot_seconds"], point["tokens_per_second_per_chip"], kinds[kind])
        for kind, found in document["by_chip"].items()
        for point in found
    ]
    left, right = min(x for x, _, _ in points), max(x for x, _, _ in points)
    top = max(y for _, y, _ in points)
    width, height = _PLOT_SIZE
    rows = [[" "] * width for _ in range(height)]
    for x, y, letter in points:
        across = log(x / left) / log(right / left) if right > left else 0.0
        rows[height - 1 - round(y / top * (height - 1))][round(across * (width - 1))] = letter
    lines = [f"{top:>9,.0f} |" if row == 0 else " " * 10 + "|" for row in range(height)]
    axis = f"{left:.3g} ms per token"
    end = f"{right:.3g} ms (log scale)"
    named = ", ".join(f"{letter} {kind}" for kind, letter in kinds.items())
    return "\n".join(
        [
            f"tokens/s per chip: {named}",
            *(start + "".join(row) for start, row in zip(lines, rows, strict=True)),
            " " * 10 + "+" + "-" * width,
            " " * 11 + axis + end.rjust(width - len(axis)),
        ]
    )


def phase_lines(document: JsonDocument) -> str:
    """One step of one phase: its headlines."""
    memory = document["bytes_per_chip"]
    fits = "fits" if document["fits"] else "does not fit"
    return (
        f"{document['phase']} of {format_number_of(document['batch'], 'sequence')} at "
        f"{document['context']:,} positions on "
        f"{document['hardware']} as {document['layout'].removesuffix(',remat=none')}: "
        f"{format_seconds(document['step_seconds'])} per step, {document['tokens_per_second']:,.0f} "
        "tokens/s, "
        f"bound by {document['bound_name']}\n"
        f"{format_bytes(memory['total'])} per chip ({fits}): weights {format_bytes(memory['weights'])}, "
        "cache "
        f"{format_bytes(memory['cache'])}, buffers {format_bytes(memory['buffers'])}; at most "
        f"{format_number_of(document['max_batch'], 'sequence')} fit"
    )
