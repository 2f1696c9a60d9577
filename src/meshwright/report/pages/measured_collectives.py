"""Measured collectives and their model: a page of charts, and a plot for the terminal."""

from collections.abc import Sequence
from string import ascii_uppercase

from meshwright.report.draw.chart import Chart, ChartAxis, ChartPoint, Curve, draw_curves, padded_ends
from meshwright.report.draw.figure import PHONE, TABLET, WIDE, Figure, Panel, at_widths
from meshwright.report.palette import CURVES
from meshwright.report.run_documents import JsonDocument
from meshwright.report.templating import render
from meshwright.report.terminal.charts import text_plot
from meshwright.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 84, 20  # characters of a plot


def collectives_html(document: JsonDocument) -> str:
    """The document of `mw bench collectives` as one HTML page that loads nothing."""
    mesh = " ".join(f"{axis}={size}" for axis, size in document["mesh"].items())
    return render(
        "collectives.html.jinja",
        title=f"Collectives of {document['hardware']}",
        written=f"mesh {mesh} · points are measured, lines are the calibrated model",
        figures=[collective_figure(document["results"], op) for op in measured_ops(document)],
    )


def measured_ops(document: JsonDocument) -> list[str]:
    """The collectives that were measured, in order."""
    return list(dict.fromkeys(result["op"] for result in document["results"]))


def collective_figure(results: Sequence[JsonDocument], op: str) -> Figure:
    """Seconds over V for one collective, both logarithmic."""
    curves = collective_curves(results, op)
    points = [point for curve in curves for point in curve.points]
    x = ChartAxis(
        "V, bytes of the gathered array", format_bytes, padded_ends([p.x for p in points], 0.02), True
    )
    y = ChartAxis("time", format_seconds, padded_ends([p.y for p in points], 0.04), True)

    def draw(width: float) -> Panel:
        chart = Chart(x, y, width, 300, right=76, top=30)
        return chart.panel("", draw_curves(chart, curves))

    return Figure.of(op, op, "", at_widths(draw, WIDE, TABLET, PHONE))


def collective_curves(results: Sequence[JsonDocument], op: str) -> list[Curve]:
    """For each choice of axes the measured points and the line of the model."""
    curves = []
    for (axes, group), colour in zip(_by_axes(results, op).items(), CURVES * 9, strict=False):
        curves.append(Curve(axes, colour, [ChartPoint(p["bytes"], p["predicted_seconds"]) for p in group]))
        measured = [ChartPoint(p["bytes"], p["seconds"], _title(axes, p)) for p in group]
        curves.append(Curve(f"{axes}, measured", colour, measured, joined=False))
    return curves


def _title(axes: str, point: JsonDocument) -> str:
    seconds, model = format_seconds(point["seconds"]), format_seconds(point["predicted_seconds"])
    return f"{axes}, {format_bytes(point['bytes'])}\n{seconds}, model {model}"


def terminal_plot(document: JsonDocument, op: str) -> str:
    """Seconds over V of one collective as text: letters are measured, dots are the model.

    Each letter is a choice of axes, named below the plot.
    """
    by_axes = _by_axes(document["results"], op)
    points = [point for found in by_axes.values() for point in found]
    sizes = [point["bytes"] for point in points]
    seconds = [point[key] for point in points for key in ("seconds", "predicted_seconds")]
    marks = [(point["bytes"], point["predicted_seconds"], "·") for point in points]
    for letter, group in zip(ascii_uppercase, by_axes.values(), strict=False):
        marks += [(point["bytes"], point["seconds"], letter) for point in group]
    rows = text_plot(marks, _WIDTH, _HEIGHT, (min(sizes), max(sizes)), (min(seconds), max(seconds)))
    labels = [format_seconds(max(seconds)), *[""] * (_HEIGHT - 2), format_seconds(min(seconds))]
    lines = [f"{label:>10} |{row}" for label, row in zip(labels, rows, strict=True)]
    ends = f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}, gathered"
    names = ", ".join(f"{letter} {axes}" for letter, axes in zip(ascii_uppercase, by_axes, strict=False))
    return "\n".join([op, *lines, f"{'':>11}+{'-' * _WIDTH}", f"{'':>12}{ends}; {names}; · model"])


def _by_axes(results: Sequence[JsonDocument], op: str) -> dict[str, list[JsonDocument]]:
    by_axes: dict[str, list[JsonDocument]] = {}
    for result in results:
        if result["op"] == op:
            by_axes.setdefault("".join(result["axes"]), []).append(result)
    return by_axes
