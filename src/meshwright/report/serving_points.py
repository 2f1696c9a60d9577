"""A way to serve as a row of a table, and the requests in words."""

from meshwright.report.run_documents import JsonDocument
from meshwright.report.table import Cell
from meshwright.units import format_bytes, format_count, format_seconds

# Columns on a terminal and on a page.
TERMINAL = ("hardware|code", "layout|layout", "dtypes", "batch|number", "TPOT|number", "TTFT|number",
    "tok/s|number", "per chip|number", "memory|number", "price|number", "bound")  # fmt: skip
PAGE = ("hardware|code", "layout|layout", "weights/cache", "batch|number", "time per token|number",
    "first token|number", "tokens/s|number", "per chip|number", "memory/chip|number", "price|number",
    "bound")  # fmt: skip


def point_cells(point: JsonDocument, badge: str = "") -> list[Cell]:
    """The cells of one point."""
    return [
        Cell(point["hardware"]),
        Cell(point_layout(point), badge=badge),
        Cell(f"{point['weights_dtype']}/{point['kv_dtype']}"),
        Cell(f"{point['batch']:,}"),
        Cell(format_seconds(point["tpot_seconds"])),
        Cell(format_seconds(point["ttft_seconds"])),
        Cell(f"{point['tokens_per_second']:,.0f}"),
        Cell(f"{point['tokens_per_second_per_chip']:,.1f}"),
        Cell(format_bytes(point["bytes_per_chip"]["total"])),
        Cell(price_text(point)),
        Cell(str(point["bound_name"])),
    ]


def point_layout(point: JsonDocument) -> str:
    """The layout of a point; serving never recomputes."""
    return point["layout"].removesuffix(",remat=none")


def price_text(point: JsonDocument) -> str:
    """The price per million generated tokens, empty if it is unknown."""
    price = point["price_per_million_tokens"]
    return "" if price is None else f"{price:,.2f} {point['currency']}"


def requests_text(requests: JsonDocument) -> str:
    """The served requests in words."""
    text = f"prompts of {requests['prompt_tokens']:,} tokens, answers of {requests['output_tokens']:,}"
    longest = requests["longest"]
    return f"{text} on average, together at most {longest:,}" if longest else text


def drafts_text(point: JsonDocument) -> str:
    """The step with drafts against the one without, and the acceptance at which drafts pay."""
    text = f"a step that makes and verifies drafts takes {point['draft_step_ratio']:.3g} times one without"
    least = point["paying_acceptance"]
    if least is None:
        return f"{text}; at this batch they never pay"
    return f"{text}; drafts pay from an acceptance of {least:.2g} on"


def ranges_text(ranges: JsonDocument) -> str:
    """The ranges of `serving_ranges` in a sentence."""
    parts = [
        f"{name} {format_seconds(low)} to {format_seconds(high)}"
        for name, (low, high) in (
            ("time per token", ranges["tpot_seconds"]),
            ("first token", ranges["ttft_seconds"]),
        )
    ]
    if "tokens_per_second" in ranges:
        low, high = ranges["tokens_per_second"]
        parts.append(f"{format_count(low)} to {format_count(high)} tokens/s")
    return f"{', '.join(parts)} in 8 of 10 cases (by {ranges['group']})"
