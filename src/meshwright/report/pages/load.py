"""A load test of a server: its facts in lines, its times as a table, and a page of charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.errors import DataError
from meshwright.report.answer import answer_of_load
from meshwright.report.draw.chart import Chart, ChartAxis, ChartPoint, Curve, draw_curves, padded_ends
from meshwright.report.draw.figure import HALF, PHONE, Figure, Panel, at_widths
from meshwright.report.draw.marks import key
from meshwright.report.run_documents import JsonDocument, read_json
from meshwright.report.table import Table
from meshwright.report.templating import render
from meshwright.report.terminal.charts import histogram
from meshwright.report.text import seconds_text
from meshwright.units import format_seconds

_ROWS = {
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
    "itl_seconds": "between tokens",
    "request_seconds": "whole request",
}
_PARTS = ("traffic", "requests", "errors", "seconds", "targets", "answers", "results", "goodput")


def read_load_test(path: Path) -> JsonDocument | None:
    """The document of `mw bench serve -o PATH`; None for any other file.

    Raises DataError if a part of it is missing.
    """
    if path.suffix != ".json" or not path.is_file():
        return None
    document = read_json(path)
    if document is None or document.get("kind") != "serving":
        return None
    for part in (*_ROWS, *_PARTS):
        if part not in document:
            raise DataError(
                f"{path} is a load test without {part!r}; write it again with `mw bench serve -o {path}`"
            )
    return document


def times_table(document: JsonDocument, title: str = "") -> Table:
    """Percentiles, mean and maximum of each measured time."""
    keys = ("p50", "p95", "p99", "mean", "max")  # a phone shows the first columns only
    rows = [(words, *(seconds_text(document[row][key]) for key in keys)) for row, words in _ROWS.items()]
    return Table.of(title, ("", *(f"{key}|number" for key in keys)), rows)


def modes_table(documents: Mapping[str, JsonDocument]) -> Table:
    """The engines of `mw bench serve --mode all`, a row each."""
    rows = [
        (
            mode,
            *(seconds_text(document["ttft_seconds"][key]) for key in ("mean", "p95")),
            *(seconds_text(document["itl_seconds"][key]) for key in ("mean", "max")),
            f"{document['new_tokens_per_second']:,.0f}",
            f"{document['simulated']['busy_share']:.0%}",
            str(document["simulated"]["chips"]),
        )
        for mode, document in documents.items()
    ]
    columns = ("first token, mean", "p95", "between tokens, mean", "longest", "tokens/s", "busy", "chips")
    return Table.of("Engines", ("engine", *(f"{column}|number" for column in columns)), rows)


def facts(document: JsonDocument) -> list[str]:
    """Everything but the times, in lines."""
    requests, errors, seconds = document["requests"], document["errors"], format_seconds(document["seconds"])
    targets = {"ttft_seconds": "first token", "tpot_seconds": "per token"}
    asked = [
        f"{targets[key]} within {format_seconds(value)}"
        for key, value in document["targets"].items()
        if value is not None
    ]
    lines = [
        f"{requests:,} requests ({_arrivals(document['traffic'])}), {errors} errors, in {seconds}",
        f"{document['new_tokens_per_second']:,.1f} new tokens/s, "
        f"{document['requests_per_second']:.2f} requests/s, "
        f"goodput {document['goodput']:.2f} requests/s ({', '.join(asked) or 'no target'})",
    ]
    lines += [f"  {count} x {message}" for message, count in document["error_messages"].items()]
    result = document["results"][0]
    if "simulated" in document:
        lines.append(_simulated(document["simulated"]))
    elif result["predicted_seconds"]:
        planned = format_seconds(result["predicted_seconds"])
        lines.append(f"planned step {planned}: measured {result['ratio']:.2f} times")
    if drafts := document.get("drafts"):
        share = drafts["accepted"] / drafts["verified"]
        lines.append(f"{drafts['accepted']} of {drafts['verified']} draft tokens accepted ({share:.0%})")
    return [*lines, *map(_beside, document["results"][1:])]


def _beside(row: JsonDocument) -> str:
    """A measured figure and the planned one."""
    is_time = "seconds" in row
    unit = "seconds" if is_time else "new_tokens_per_second"
    texts = [
        "unknown" if value is None else format_seconds(value) if is_time else f"{value:.1f}"
        for value in (row[unit], row[f"predicted_{unit}"])
    ]
    times = "" if row["ratio"] is None else f", {row['ratio']:.2f} times"
    return f"{row['name'].replace('_', ' ')}: measured {texts[0]}, planned {texts[1]}{times}"


def _simulated(load: JsonDocument) -> str:
    """The replicas of a simulated load test."""
    replicas, more = load["replicas"], load["prefill_replicas"]
    servers = f"{replicas} replica{'s' * (replicas > 1)}" + (f" and {more} that prefill" if more else "")
    return (
        f"simulated on {servers} of {load['hardware']} (chips: {load['chips']}), {load['mode']}: devices "
        f"busy {load['busy_share']:.0%}, {load['prefix_hit_rate']:.0%} of prompt tokens from cached pages, "
        f"{load['preempted']} preempted"
    )


def _arrivals(traffic: JsonDocument) -> str:
    if traffic["arrivals"] == "closed":
        return f"{traffic['concurrency']} at once"
    if traffic["arrivals"] == "trace":
        return f"as in {traffic['lengths']}"
    bursts = f", {traffic['burst']} together" if traffic["burst"] > 1 else ""
    return f"{traffic['rate_per_second']:g}/s{bursts}"


def terminal_histograms(document: JsonDocument) -> str:
    """Histograms of time to first token and time per output token, as text."""
    plots = [histogram(_ROWS[row], _values(document, row)) for row in ("ttft_seconds", "tpot_seconds")]
    return "\n\n".join(filter(None, plots))


def _values(document: JsonDocument, row: str) -> list[float]:
    return [one[row] for one in document["answers"] if one["error"] is None and one[row] is not None]


def load_test_html(document: JsonDocument) -> str:
    """The document of `mw bench serve` as one HTML page that loads nothing."""
    figures = (_distributions(document), _requests(document))
    return render(
        "load.html.jinja",
        title=f"{document['model']} at {document['url']}",
        written="load test",
        answer=answer_of_load(document),
        facts=facts(document),
        times=times_table(document),
        figures=[figure for figure in figures if figure],
    )


def _distributions(document: JsonDocument) -> Figure | None:
    """The share of answers within a time, for times of a whole answer; None if none was measured."""
    curves = []
    for row, colour in (("ttft_seconds", "compute"), ("tpot_seconds", "waiting")):
        values = sorted(_values(document, row))
        points = [ChartPoint(values[0], 0)] if values else []
        for rank, value in enumerate(values, start=1):
            share = rank / len(values)
            title = f"{_ROWS[row]}\n{share:.0%} within {format_seconds(value)}"
            points += [
                ChartPoint(value, points[-1].y),
                ChartPoint(value, share, title if _is_shown(rank, len(values)) else ""),
            ]
        curves.append(
            Curve({"ttft_seconds": "first token", "tpot_seconds": "per token"}[row], colour, points)
        )
    times = [point.x for curve in curves for point in curve.points]
    if not times:
        return None
    x = ChartAxis("time", format_seconds, padded_ends(times, 0.02), True)
    panel = _curves(x, ChartAxis("share of answers", "{:.0%}".format, (0, 1)), curves, right=76)
    return Figure.of("distributions", "Distributions", "The share of answers within a time.", panel)


def _is_shown(rank: int, number: int) -> bool:
    """Whether a point has a mark: every twentieth part of the answers has."""
    return rank * 20 // number != (rank - 1) * 20 // number


def _requests(document: JsonDocument) -> Figure | None:
    """Time to first token of each request by the time it was sent; failed ones are on the axis."""
    rows = [one for one in document["answers"] if one["error"] or one["ttft_seconds"] is not None]
    points: tuple[list[ChartPoint], list[ChartPoint]] = [], []
    for row in rows:
        error, start = row["error"], row["start_seconds"]
        seconds, words = (0.0, error) if error else (row["ttft_seconds"], format_seconds(row["ttft_seconds"]))
        points[bool(error)].append(ChartPoint(start, seconds, f"sent after {format_seconds(start)}\n{words}"))
    if not rows:
        return None
    curves = [
        Curve(_ROWS["ttft_seconds"], "compute", points[0], joined=False),
        Curve("failed", "waiting", points[1], joined=False),
    ]
    x = ChartAxis(
        "seconds since the start", "{:g}".format, (0, max(p.x for side in points for p in side) or 1)
    )
    most = max((point.y for point in points[0]), default=0) or 1
    y = ChartAxis("time to the first token", lambda s: format_seconds(s) if s else "0", (0, 1.05 * most))
    panel = _curves(x, y, curves, keyed=[curve for curve in curves if curve.points])
    return Figure.of("requests", "Requests", "Each request by the time it was sent.", panel)


def _curves(
    x: ChartAxis, y: ChartAxis, curves: Sequence[Curve], right: float = 16, keyed: Sequence[Curve] = ()
) -> Panel:
    def draw(width: float) -> Panel:
        chart = Chart(x, y, width, right=right)
        words, _ = key([(curve.colour, curve.name) for curve in keyed], width, 12)
        return chart.panel("", draw_curves(chart, curves), words)

    return at_widths(draw, HALF, PHONE)
