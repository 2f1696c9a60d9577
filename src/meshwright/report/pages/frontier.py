"""A plan of `mw plan serve` as a page: the frontier as a figure, the chosen point, the table, and why."""

from collections.abc import Callable
from pathlib import Path

from markupsafe import Markup

from meshwright.report.answer import answer_of_plan
from meshwright.report.cards import Card
from meshwright.report.draw.chart import Chart, ChartAxis, ChartPoint, Curve, draw_curves, padded_ends
from meshwright.report.draw.figure import HALF, PHONE, Figure, Panel, at_widths
from meshwright.report.draw.marks import disc
from meshwright.report.palette import CURVES
from meshwright.report.plan_table import explanation
from meshwright.report.run_documents import JsonDocument, read_json
from meshwright.report.serving_points import (
    PAGE,
    point_cells,
    point_layout,
    price_text,
    ranges_text,
    requests_text,
)
from meshwright.report.table import Row, Table
from meshwright.report.templating import render
from meshwright.units import format_bytes, format_count, format_seconds

_RIGHT = 70  # pixels for the names of chips
_MOST_POINTS = 14  # rows of the table


def read_serving_plan(path: Path) -> JsonDocument | None:
    """The document of a plan of `mw plan serve`, given it or its TOML file; None for any other file."""
    document = read_json(path.with_suffix(".json")) if path.suffix in (".toml", ".json") else None
    return document if document and "frontier" in document else None


def frontier_figure(document: JsonDocument) -> Figure:
    """Throughput against time per token for each kind of chip; and price, if every point has one."""
    points = [*(point for kind in document["by_chip"].values() for point in kind), document["best"]]
    panels = [
        _panel(
            document, points, "tokens_per_second_per_chip", "Throughput", "tokens/s per chip", format_count
        )
    ]
    if all(point["price_per_million_tokens"] is not None for point in points):
        unit = f"{document['best']['currency']} per million tokens"
        panels.append(_panel(document, points, "price_per_million_tokens", "Price", unit, "{:,g}".format))
    return Figure.of(
        "frontier",
        "Frontier of serving",
        "Each mark is a layout and batch. No other on that kind of chip has both less time per token and "
        f"more tokens per second per chip. The ring is the chosen point{_off_the_curve(document)}.",
        *panels,
    )


def _off_the_curve(document: JsonDocument) -> str:
    """The reason why no curve passes the chosen point; empty if one does."""
    best = document["best"]

    def place(point: JsonDocument) -> tuple[float, float]:
        return point["tpot_seconds"], point["tokens_per_second_per_chip"]

    if any(place(point) == place(best) for points in document["by_chip"].values() for point in points):
        return ""
    return ": points of the curve that are as fast miss a target, or their tokens cost more"


def _panel(
    document: JsonDocument,
    points: list[JsonDocument],
    key: str,
    heading: str,
    unit: str,
    text: Callable[[float], str],
) -> Panel:
    """One quantity of every point against its time per token. A price has a logarithmic axis."""
    best, values, is_price = document["best"], [point[key] for point in points], "price" in key
    x = ChartAxis(
        "time per token", format_seconds, padded_ends([point["tpot_seconds"] for point in points], 0.03), True
    )
    y = ChartAxis(unit, text, padded_ends(values, 0.03) if is_price else (0, 1.08 * max(values)), is_price)
    curves = [
        Curve(
            kind, colour, [ChartPoint(point["tpot_seconds"], point[key], _title(point)) for point in points]
        )
        for (kind, points), colour in zip(document["by_chip"].items(), CURVES * 9, strict=False)
    ]
    target: float | None = (document.get("targets") or {}).get("tpot_seconds")

    def draw(width: float) -> Panel:
        chart = Chart(x, y, width, 372, right=_RIGHT)
        at = chart.place(best["tpot_seconds"], best[key])
        chosen = disc(*at, 7, "ink", hollow=True) + disc(*at, 3.2, "ink", title=_title(best))
        limit = Markup()
        if target is not None and chart.x.low < target < chart.x.high:
            limit = chart.upright(target, "--tpot")
        return chart.panel(heading, limit, draw_curves(chart, curves), chosen)

    return at_widths(draw, HALF, PHONE)


def _title(point: JsonDocument) -> str:
    """A point in two lines."""
    price = price_text(point)
    return (
        f"{point['hardware']}, {point_layout(point)}; batch {point['batch']:,}\n"
        f"{format_seconds(point['tpot_seconds'])} per token, first token after "
        f"{format_seconds(point['ttft_seconds'])}, "
        f"{point['tokens_per_second_per_chip']:,.1f} tokens/s per chip"
        + (f", {price} per million tokens" if price else "")
    )


def point_cards(best: JsonDocument) -> list[Card]:
    """The headlines of the chosen point."""
    cards = [
        Card("Hardware", best["hardware"], point_layout(best)),
        Card("Time per token", format_seconds(best["tpot_seconds"]), f"bound by {best['bound_name']}"),
        Card("First token", format_seconds(best["ttft_seconds"]), "of one prompt, on idle chips"),
        Card(
            "Throughput",
            f"{format_count(best['tokens_per_second'])} tokens/s",
            f"{best['tokens_per_second_per_chip']:,.1f} per chip",
        ),
        Card("Batch", f"{best['batch']:,}", f"at most {best['max_batch']:,} sequences fit"),
        Card(
            "Memory per chip",
            format_bytes(best["bytes_per_chip"]["total"]),
            f"weights in {best['weights_dtype']}",
        ),
    ]
    price = price_text(best)
    return [*cards, Card("Price", price, "per million generated tokens")] if price else cards


def serving_plan_html(document: JsonDocument, plan_text: str | None = None) -> str:
    """The document of `mw plan serve` as one HTML page that loads nothing. plan_text: its plan.toml."""
    best, points = document["best"], document["frontier"]
    step = -(-len(points) // _MOST_POINTS) or 1
    shown = sorted(
        [best, *(point for point in points[::step] if point != best)], key=lambda point: point["tpot_seconds"]
    )
    rows = [Row(point_cells(one, "chosen" * (one == best)), "chosen" if one == best else "") for one in shown]
    return render(
        "frontier.html.jinja",
        title=f"Serving {document['model']['name']}",
        written=". ".join(
            [requests_text(document["requests"])]
            + ([ranges_text(document["ranges"])] if "ranges" in document else [])
        ),
        cards=point_cards(best),
        answer=answer_of_plan(document),
        figure=frontier_figure(document),
        points=Table.of(
            "", PAGE, rows, f"{len(rows)} of {len(points):,} points; price per million generated tokens."
        ),
        document=document,
        explanation=explanation(document),
        plan_text=plan_text,
    )
