"""The figures of `mw plot`: curves over one variable, with a slider if a plot has several frames."""

from collections.abc import Callable, Iterator
from functools import partial

from meshwright.plan.curves import CurvePanel, Plot, Unit
from meshwright.report.draw.chart import Chart, ChartAxis, ChartPoint, Curve, draw_curves, padded_ends
from meshwright.report.draw.figure import HALF, PHONE, TABLET, Figure, Frame, Panel, at_widths
from meshwright.report.draw.marks import text_width
from meshwright.report.palette import CURVES
from meshwright.report.table import Table
from meshwright.units import format_bytes, format_count, format_seconds

TEXT: dict[Unit, Callable[[float], str]] = {
    "seconds": format_seconds,
    "bytes": format_bytes,
    "bytes/s": lambda value: f"{format_bytes(value)}/s",
    "FLOP/s": format_count,
    "number": lambda value: format_count(value) if value >= 1 else f"{value:g}",
    "count": "{:,.0f}".format,
    "share": "{:.1%}".format,
    "tokens/s": lambda value: f"{value:,.5g}",
    "ratio": lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}",
}
_LINEAR: tuple[Unit, ...] = ("share", "ratio")
_BEFORE_NAMES = 28  # pixels between a curve's end and the edge, without its name


def curves_figure(plot: Plot) -> Figure:
    """A chart for each panel, with the same axes in every frame."""
    frames = tuple(
        Frame(frame.label, tuple(_drawn(plot, number, panel) for number, panel in enumerate(frame.panels)))
        for frame in plot.frames
    )
    return Figure(plot.name, plot.title, plot.caption, frames, plot.first, plot.slider)


def _drawn(plot: Plot, number: int, panel: CurvePanel) -> Panel:
    # A curve has one colour in all panels.
    names = dict.fromkeys(name for each in plot.frames[0].panels for name in each.curves)
    colours = dict(zip(names, CURVES * 4, strict=False))
    values = [
        value
        for frame in plot.frames
        for curve in frame.panels[number].curves.values()
        for value in curve
        if value is not None
    ]
    is_log = panel.unit not in _LINEAR or (min(values) > 0 and max(values) > 50 * min(values))
    ends = padded_ends(values) if is_log else (min(0.0, *values), max(values) * 1.08)
    y = ChartAxis("", TEXT[panel.unit], ends, is_log)
    is_log_x = min(plot.x) > 0
    ends = padded_ends(plot.x, 0.02) if is_log_x else (plot.x[0], plot.x[-1])
    x = ChartAxis(plot.x_title, TEXT[plot.x_unit], ends, is_log_x)
    curves = [
        Curve(
            name,
            colours[name],
            [
                ChartPoint(at, value, f"{name}, {TEXT[plot.x_unit](at)}: {TEXT[panel.unit](value)}")
                for at, value in zip(plot.x, curve, strict=True)
                if value is not None
            ],
            dashes="5 4" if name in ("step", "closed form") else "",
        )
        for name, curve in panel.curves.items()
    ]
    widths = (TABLET, PHONE) if len(plot.frames[0].panels) == 1 else (HALF, PHONE)
    return at_widths(partial(_panel, panel.title, x, y, curves), *widths)


def _panel(title: str, x: ChartAxis, y: ChartAxis, curves: list[Curve], width: float) -> Panel:
    names = max(text_width(curve.name) for curve in curves)
    chart = Chart(x, y, width, left=64, right=names + _BEFORE_NAMES)
    return chart.panel(title, draw_curves(chart, curves))


def curves_tables(plot: Plot) -> Iterator[Table]:
    """The values of the frame shown first, a table for each panel."""
    frame = plot.frames[plot.first]
    for panel in frame.panels:
        rows = [
            (TEXT[plot.x_unit](at), *("" if value is None else TEXT[panel.unit](value) for value in values))
            for at, *values in zip(plot.x, *panel.curves.values(), strict=True)
        ]
        title = ", ".join(filter(None, (panel.title, frame.label)))
        headings = (f"{plot.x_title}|number", *(f"{name}|number" for name in panel.curves))
        yield Table.of(title, headings, rows)
