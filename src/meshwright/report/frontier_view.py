"""A plan of `mw plan serve` as a page: the frontier as a figure, the chosen point, the table, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from meshwright import __version__
from meshwright.report import templating
from meshwright.report.chart import ChartAxes, Scale, dot, kept_apart, label, line, padded_ends
from meshwright.report.figure import Figure, Panel
from meshwright.report.plan_view import explanation
from meshwright.report.run_files import JsonDocument, read_json
from meshwright.report.serve_tables import requests_text
from meshwright.report.summary import Card
from meshwright.units import format_bytes, format_count, format_seconds

_WIDTH, _HEIGHT = 522, 372
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 92, 48, 42
_CURVES = ("fsdp", "tp", "dp", "fsdp_tp", "compute", "waiting", "exposed", "bubble")
_ABOVE = 1.08  # the top of an axis over its largest value


@dataclass(frozen=True)
class _Quantity:
    """What a panel shows of each point, against its time per token."""

    key: str
    heading: str
    unit: str
    text: Callable[[float], str]
    logarithmic: bool = False


def read_serving_plan(path: Path) -> JsonDocument | None:
    """The document of a plan of `mw plan serve`, beside it or itself; None where `path` is something else."""
    document = read_json(path.with_suffix(".json")) if path.suffix in (".toml", ".json") else None
    return document if document and "frontier" in document else None


def frontier_figure(document: JsonDocument) -> Figure:
    """Throughput per chip against time per token of each kind of chip; prices too, where all have one."""
    currency = document["best"]["currency"]
    quantities = [
        _Quantity("tokens_per_second_per_chip", "Throughput", "tokens/s per chip", format_count),
        _Quantity(
            "price_per_million_tokens",
            "Price",
            f"{currency} per million tokens",
            "{:,g}".format,  # there is room for five characters
            logarithmic=True,
        ),
    ]
    points = [*(point for kind in document["by_chip"].values() for point in kind), document["best"]]
    told = [one for one in quantities if all(point[one.key] is not None for point in points)]
    return Figure.of(
        "frontier",
        "Frontier of serving",
        "Each mark is a layout and batch of which no other on that kind of chip has both less time per token "
        "and more tokens per second per chip. The ring is the point that was chosen.",
        *(_panel(document, one) for one in told),
    )


def _panel(document: JsonDocument, quantity: _Quantity) -> Panel:
    curves, best = document["by_chip"], document["best"]
    points = [*(point for kind in curves.values() for point in kind), best]
    across = padded_ends([point["tpot_seconds"] for point in points], 0.03)
    x = Scale(*across, _LEFT, _WIDTH - _RIGHT, logarithmic=True)
    values = [point[quantity.key] for point in points]
    up = padded_ends(values, 0.03) if quantity.logarithmic else (0, _ABOVE * max(values))
    y = Scale(*up, _HEIGHT - _BOTTOM, _TOP, quantity.logarithmic)
    body = [
        label(quantity.heading, 0, 10, weight=600),
        ChartAxes(x, y, "time per token", quantity.unit, format_seconds, quantity.text).svg(),
    ]
    target = (document.get("targets") or {}).get("tpot_seconds")
    if target and x.low < target < x.high:
        place = x.place(target)
        body.append(line([(place, y.end), (place, y.start)], "hidden", dashes="2 3"))
        body.append(label("--tpot", place, y.end - 4, "muted", anchor="middle"))
    ends: list[tuple[str, str, float, float]] = []
    for number, (kind, found) in enumerate(curves.items()):
        colour = _CURVES[number % len(_CURVES)]
        places = [(x.place(point["tpot_seconds"]), y.place(point[quantity.key])) for point in found]
        body.append(line(places, colour, width=1.6))
        body += [dot(*at, 3.2, colour, title=_words(point)) for at, point in zip(places, found, strict=True)]
        ends.append((kind, colour, *places[-1]))
    body += [
        dot(x.place(best["tpot_seconds"]), y.place(best[quantity.key]), 7, "best", hollow=True),
        dot(x.place(best["tpot_seconds"]), y.place(best[quantity.key]), 3.2, "best", title=_words(best)),
        _names(ends, x),
    ]
    return Panel(_WIDTH, _HEIGHT, Markup().join(body))


def _names(ends: list[tuple[str, str, float, float]], x: Scale) -> Markup:
    """Each kind of chip's name at the right, led to from the last point of its curve."""
    places = kept_apart([end[3] for end in ends], 15, _TOP + 2, _HEIGHT - _BOTTOM)
    parts = []
    for (kind, colour, left, top), place in zip(ends, places, strict=True):
        parts.append(line([(left + 5, top), (max(left + 5, x.end + 4), place), (x.end + 8, place)], "line"))
        parts.append(label(kind, x.end + 11, place + 4, colour))
    return Markup().join(parts)


def _words(point: JsonDocument) -> str:
    """A point in two lines, for who points at its mark."""
    price = point["price_per_million_tokens"]
    paid = "" if price is None else f", {price:,.2f} {point['currency']} per million tokens"
    return (
        f"{point['hardware']}, {_layout(point)}; batch {point['batch']:,}\n"
        f"{format_seconds(point['tpot_seconds'])} per token, first token after "
        f"{format_seconds(point['ttft_seconds'])}, "
        f"{point['tokens_per_second_per_chip']:,.1f} tokens/s per chip{paid}"
    )


def _layout(point: JsonDocument) -> str:
    return point["layout"].removesuffix(",remat=none")


def _cards(document: JsonDocument) -> list[Card]:
    """The chosen point in large."""
    best = document["best"]
    price = best["price_per_million_tokens"]
    cards = [
        Card("Hardware", best["hardware"], _layout(best)),
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
    if price is not None:
        cards.append(Card("Price", f"{price:,.2f} {best['currency']}", "per million generated tokens"))
    return cards


def serving_plan_html(document: JsonDocument, plan_text: str | None = None) -> str:
    """The document of `mw plan serve` as one HTML page that loads nothing. plan_text: its plan.toml."""
    environment = templating.environment()
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    return environment.get_template("frontier.html.jinja").render(
        title=f"Serving {document['model']['name']}",
        version=__version__,
        work=requests_text(document["requests"]),
        cards=_cards(document),
        figure=frontier_figure(document),
        document=document,
        explanation=explanation(document),
        plan_text=plan_text,
    )
