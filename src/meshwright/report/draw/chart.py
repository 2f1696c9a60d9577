"""Charts: scales with round ticks, axes, and curves with their names at their ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil, floor, log10

from markupsafe import Markup

from meshwright.report.draw.figure import Panel
from meshwright.report.draw.marks import PixelPlace, disc, kept_apart, label, line, text_width

_FEWEST_TICKS = 3
_DOT, _SMALL_DOT, _MANY = 3.2, 2, 40  # radius in pixels; of the dots of a curve with many points


@dataclass(frozen=True)
class Scale:
    """Places in pixels, from `start` to `end`, of values from `low` to `high`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (log10(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (value - low) / ((high - low) or 1) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the axis: even steps, or of a logarithmic axis 1, 2, 5 of each decade."""
        ticks = _log_ticks(self.low, self.high, most) if self.logarithmic else []
        if len(ticks) >= min(most, _FEWEST_TICKS):
            return ticks
        step = next(s for s in _steps((self.high - self.low) / most) if (self.high - self.low) / s <= most)
        first = ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, floor(self.high / step + 1e-9) + 1)]


def _steps(least: float) -> list[float]:
    decade = 10 ** floor(log10(least))
    return [factor * decade for factor in (1, 2, 2.5, 5, 10, 20)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks: list[float] = []
    for factors in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [
            value for d in decades for f in factors if low * 0.999 <= (value := f * 10.0**d) <= high * 1.001
        ]
        if len(ticks) <= most:
            return ticks
    return ticks[:: ceil(len(ticks) / most)]


def padded_ends(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """The ends of a logarithmic axis for `values`, with a margin on either side."""
    low, high = log10(min(values)), log10(max(values))
    margin = max((high - low) * share, 0.05)
    return 10 ** (low - margin), 10 ** (high + margin)


@dataclass(frozen=True)
class ChartAxis:
    """One axis: its title with the unit, the words of a tick, and its ends."""

    title: str
    text: Callable[[float], str]
    ends: tuple[float, float]
    logarithmic: bool = False


@dataclass(frozen=True)
class Chart:
    """Two axes and the space around their plot, in pixels."""

    x_axis: ChartAxis
    y_axis: ChartAxis
    width: float
    height: float = 330
    left: float = 56
    right: float = 16
    top: float = 48
    bottom: float = 42

    @cached_property
    def x(self) -> Scale:
        """Places from left to right."""
        return Scale(*self.x_axis.ends, self.left, self.width - self.right, self.x_axis.logarithmic)

    @cached_property
    def y(self) -> Scale:
        """Places from the bottom up."""
        return Scale(*self.y_axis.ends, self.height - self.bottom, self.top, self.y_axis.logarithmic)

    def place(self, x: float, y: float) -> PixelPlace:
        """The pixels of a point."""
        return self.x.place(x), self.y.place(y)

    def panel(self, heading: str, *marks: Markup) -> Panel:
        """The heading, the axes, and the marks on them."""
        parts = [*([label(heading, 0, 12, weight=600)] if heading else []), self._axes(), *marks]
        return Panel(self.width, self.height, Markup().join(parts))

    def level(self, value: float, words: str, colour: str, *, below: bool = False) -> Markup:
        """A dashed line across, with its words above or below the right end."""
        y = self.y.place(value)
        dashed = line([(self.x.start, y), (self.x.end, y)], colour, width=1.4, dashes="6 4")
        return dashed + label(words, self.x.end, y + (15 if below else -5), colour, anchor="end", halo=True)

    def upright(self, value: float, words: str) -> Markup:
        """A thin dotted line upwards, with its words on top."""
        x = self.x.place(value)
        dotted = line([(x, self.y.end), (x, self.y.start)], "hidden", dashes="2 3")
        return dotted + label(words, x, self.y.end - 4, "muted", anchor="middle")

    def _axes(self) -> Markup:
        """Grid lines for y, ticks for x, and the words."""
        x, y = self.x, self.y
        parts = []
        for value in y.ticks(max(3, int((y.start - y.end) / 40))):
            at = y.place(value)
            parts.append(line([(x.start, at), (x.end, at)], "line"))
            parts.append(label(self.y_axis.text(value), x.start - 7, at + 4, "muted", anchor="end"))
        parts.append(level_axis(x, y.start, self.x_axis.text))
        parts.append(label(self.x_axis.title, x.end, y.start + 36, "muted", anchor="end"))
        parts.append(label(self.y_axis.title, 0, y.end - 16, "muted"))
        return Markup().join(parts)


def level_axis(x: Scale, y: float, text: Callable[[float], str]) -> Markup:
    """A line at the bottom of a drawing, with ticks and their words."""
    parts = [line([(x.start, y), (x.end, y)], "muted")]
    for value in x.ticks(max(2, int((x.end - x.start) / 60))):
        at = x.place(value)
        parts.append(line([(at, y), (at, y + 4)], "muted"))
        words = text(value)
        # The leftmost label would otherwise be cut off at the drawing's edge.
        parts.append(label(words, max(at, text_width(words) / 2), y + 18, "muted", anchor="middle"))
    return Markup().join(parts)


@dataclass(frozen=True)
class ChartPoint:
    """A value of a curve. title: the words of its mark, which has none without; hollow: drawn as a ring."""

    x: float
    y: float
    title: str = ""
    hollow: bool = False


@dataclass(frozen=True)
class Curve:
    """Points by x. joined: by a line. band: a broad pale line beneath all others."""

    name: str
    colour: str
    points: Sequence[ChartPoint] = field(repr=False)
    joined: bool = True
    dashes: str = ""
    band: bool = False


def draw_curves(chart: Chart, curves: Sequence[Curve]) -> Markup:
    """Lines, then marks, then each joined curve's name to the right of the plot.

    Between hollow points a line is dotted. Of two marks in one place only the first is drawn.
    """
    drawn = sorted((c for c in curves if c.points), key=lambda c: not c.band)
    parts, marks = [], dict[PixelPlace, Markup]()
    for curve in drawn:
        for point, other in pairwise(curve.points) if curve.joined else ():
            dashes = curve.dashes or ("1.5 3" if point.hollow or other.hollow else "")
            colour, width = ("best_band", 9) if curve.band else (curve.colour, 1.6)
            ends = [chart.place(point.x, point.y), chart.place(other.x, other.y)]
            parts.append(line(ends, colour, width=width, dashes=dashes))
    for curve in sorted(drawn, key=lambda c: c.band):
        radius = _SMALL_DOT if len(curve.points) > _MANY else _DOT
        for p in curve.points:
            at = chart.place(p.x, p.y)
            if p.title and at not in marks:
                marks[at] = disc(*at, radius, curve.colour, hollow=p.hollow, title=p.title)
    names = _names(chart, [curve for curve in drawn if curve.joined])
    return Markup().join([*parts, *reversed(marks.values()), names])


def _names(chart: Chart, curves: Sequence[Curve]) -> Markup:
    """The names of curves, each led to from the last point of its curve and clear of the others."""
    ends = [chart.place(curve.points[-1].x, curve.points[-1].y) for curve in curves]
    heights = kept_apart([y for _, y in ends], 15, chart.y.end + 2, chart.y.start)
    parts, right = [], chart.x.end
    for curve, (x, y), height in zip(curves, ends, heights, strict=True):
        parts.append(line([(x + 5, y), (max(x + 5, right + 4), height), (right + 8, height)], "line"))
        weight = 600 if curve.band else 400
        parts.append(label(curve.name, right + 11, height + 4, curve.colour, weight=weight))
    return Markup().join(parts)
