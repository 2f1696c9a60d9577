"""The roofline of a step: operations by arithmetic intensity, under the roofs of HBM and of the links."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import atan2, degrees

from markupsafe import Markup

from meshwright.cost.passes import Dtypes
from meshwright.plan.candidate import Candidate
from meshwright.plan.study.roofline import StepOperation, link_roofs, operations
from meshwright.report.draw.chart import Chart, ChartAxis, padded_ends
from meshwright.report.draw.figure import HALF, PHONE, Figure, Panel, at_widths
from meshwright.report.draw.marks import disc, label, line, text_width
from meshwright.units import format_bytes, format_count, format_seconds

_HEIGHT = 380
_MAX_LABELS = 12
_LEAST_SHARE_OF_TRAFFIC = 0.05
_COLOUR = {"matmul": "compute", "attention": "tp"}

_Roof = tuple[str, float]  # words, bytes per second
_Measure = Callable[[StepOperation], tuple[float, float]]  # FLOPs per byte, FLOP/s


def roofline_figure(candidate: Candidate) -> Figure:
    """HBM at the left, links at the right."""
    shown, rate = operations(candidate), candidate.hardware.chip.hbm_bytes_per_second
    other = [operation for operation in shown if not operation.flops]
    seconds, step = sum(operation.seconds for operation in other), candidate.step_seconds
    note = f"operations without FLOPs: {format_seconds(seconds)} ({seconds / step:.1%})" if seconds else ""
    hbm = _Plane(
        "Against HBM",
        "FLOPs per byte of HBM",
        [operation for operation in shown if operation.flops and operation.hbm_bytes],
        lambda operation: (operation.intensity, operation.flops_per_second),
        [(f"HBM {format_bytes(rate)}/s", rate)],
        candidate,
        note,
    )
    links = _Plane(
        "Against the links",
        "FLOPs per byte between chips",
        [operation for operation in shown if operation.flops and operation.link_bytes],
        lambda operation: (operation.link_intensity, operation.linked_flops_per_second),
        _roofs(candidate),
        candidate,
    )
    caption = (
        "Operations of the planned step on one chip; an area is a share of the step. Left: achieved FLOP/s "
        "against FLOPs per byte of HBM traffic. Right: achieved FLOP/s, with exposed transfers counted, "
        "against FLOPs per byte that the operation's collectives move. An operation on a roof is bound by it."
    )
    panels = [at_widths(plane.panel, HALF, PHONE) for plane in (hbm, links)]
    return Figure.of("roofline", "Roofline of the step", caption, *panels)


def _roofs(candidate: Candidate) -> list[_Roof]:
    """The axes that carry most of the traffic, the slowest first; for a few bytes latency is no roof."""
    roofs = link_roofs(candidate)
    least = _LEAST_SHARE_OF_TRAFFIC * sum(roof.seconds for roof in roofs)
    kept = sorted((roof for roof in roofs if roof.seconds > least), key=lambda roof: roof.bytes_per_second)
    return [
        (f"{'·'.join(roof.axes)} {format_bytes(roof.bytes_per_second)}/s", roof.bytes_per_second)
        for roof in kept
    ]


@dataclass(frozen=True)
class _Plane:
    """Operations against one kind of traffic. note: words below the plot."""

    heading: str
    unit: str
    shown: Sequence[StepOperation]
    measure: _Measure
    roofs: Sequence[_Roof]
    candidate: Candidate
    note: str = ""

    def panel(self, width: float) -> Panel:
        if not self.shown:
            words = label("No operation of this step communicates.", 0, 34, "muted")
            return Panel(width, 40, label(self.heading, 0, 12, weight=600) + words)
        dtype, chip = Dtypes.of(self.candidate.layout).matmul, self.candidate.hardware.chip
        # A calibrated chip has been measured to be faster than its peak at some sizes.
        peak = max([chip.flops(dtype), *(rate for _, rate in chip.matmul_rates.get(dtype, ()))])
        chart = self._chart(peak, width)
        height = chart.y.place(peak)
        ceiling = line([(chart.x.start, height), (chart.x.end, height)], "muted", width=1.3)
        words = label(f"{dtype} peak, {_rate(peak)}FLOP/s", chart.x.start + 4, height - 8, "muted", halo=True)
        roofs = [
            # The words of the slowest links are below their line, clear of the others.
            _roof(chart, rate, peak, words, below=number == 0 and len(self.roofs) > 1)
            for number, (words, rate) in enumerate(self.roofs)
        ]
        note = label(self.note, 0, _HEIGHT - 4, "muted")
        return chart.panel(self.heading, *roofs, ceiling, words, self._names(chart), self._dots(chart), note)

    def _chart(self, peak: float, width: float) -> Chart:
        """Axes that hold the points, the knee of every roof, and the rise before it."""
        places = [self.measure(operation) for operation in self.shown]
        knees = [peak / rate for _, rate in self.roofs]
        _, high = padded_ends([*(x for x, _ in places), *knees], 0.1)
        low = min(min(x for x, _ in places) / 2, min(knees) / 8)
        bottom = min(min(y for _, y in places) / 8, peak / 12)
        x = ChartAxis(self.unit, format_count, (low, high), True)
        y = ChartAxis("FLOP/s of a chip", _rate, (bottom, peak * 1.7), True)
        return Chart(x, y, width, _HEIGHT, bottom=62)

    def _dots(self, chart: Chart) -> Markup:
        """A disc for each operation, the largest first so that small ones stay visible."""
        parts = []
        for operation in self.shown:
            intensity, rate = self.measure(operation)
            share = operation.seconds / self.candidate.step_seconds
            title = (
                f"{operation.name} ({operation.direction}): "
                f"{format_seconds(operation.seconds)} per step, {share:.1%}\n"
                f"{format_count(intensity)} FLOPs per byte, {_rate(rate)}FLOP/s"
            )
            colour = _COLOUR.get(operation.kind, "fsdp")
            parts.append(disc(*chart.place(intensity, rate), self._radius(operation), colour, title=title))
        return Markup().join(parts)

    def _radius(self, operation: StepOperation) -> float:
        return max(2.5, 26 * (operation.seconds / self.candidate.step_seconds) ** 0.5)

    def _names(self, chart: Chart) -> Markup:
        """Names next to the points: one label for points in one place, clear of other marks."""
        groups: list[_Group] = []
        for operation in self.shown:
            x, y = chart.place(*self.measure(operation))
            near = next((g for g in groups if abs(g.x - x) < 14 and abs(g.y - y) < 10), None)
            if near:
                near.members.append(operation)
            else:
                groups.append(_Group(x, y, self._radius(operation), [operation]))
        plot = chart.x.start, chart.x.end, chart.y.end, chart.y.start
        taken = [(g.x - g.radius, g.x + g.radius, g.y - g.radius, g.y + g.radius) for g in groups]
        lines, names = [], []
        for group in groups[:_MAX_LABELS]:
            words = group.words(groups, 0.55 * (plot[1] - plot[0]))
            for x, y, anchor, box in group.places(words):
                inside = plot[0] < box[0] and box[1] < plot[1] and plot[2] < box[2] and box[3] < plot[3]
                if inside and not any(_meet(box, other) for other in taken):
                    taken.append(box)
                    if y > group.y + 8:
                        lines.append(line([(group.x, group.y), (group.x, y - 9)], "hidden", width=0.8))
                    names.append(label(words, x, y, anchor=anchor, halo=True))
                    break
        return Markup().join(lines + names)


_Box = tuple[float, float, float, float]  # left, right, top, bottom


def _meet(first: _Box, other: _Box) -> bool:
    return first[0] < other[1] and other[0] < first[1] and first[2] < other[3] and other[2] < first[3]


@dataclass(frozen=True)
class _Group:
    """Points so close together that they have one label."""

    x: float
    y: float
    radius: float
    members: list[StepOperation]

    def places(self, words: str) -> Iterator[tuple[float, float, str, _Box]]:
        """Places for its words, the best first: at its right, its left, then further and further below."""
        width, reach = text_width(words), self.radius + 5
        tried = [(self.x + reach, self.y + 4, "start"), (self.x - reach, self.y + 4, "end")]
        for row in range(_MAX_LABELS + 6):
            height = self.y + 30 + 15 * row
            tried += [(self.x + 3, height, "end"), (self.x - 3, height, "start")]
        for x, y, anchor in tried:
            left = x - (width if anchor == "end" else 0)
            yield x, y, anchor, (left - 6, left + width + 6, y - 12, y + 4)

    def words(self, groups: Sequence["_Group"], width: float) -> str:
        """The names of its members that fit `width` pixels, and the number of the others.

        A name that another group has too is followed by its direction.
        """
        elsewhere = {o.name for group in groups if group is not self for o in group.members}
        named = [f"{o.name} {o.direction}" if o.name in elsewhere else o.name for o in self.members]
        names = list(dict.fromkeys(named))
        words, shown = ", ".join(names), len(names)
        while shown > 1 and text_width(words) > width:
            shown -= 1
            words = f"{', '.join(names[:shown])} and {len(names) - shown} more"
        return words


def _roof(chart: Chart, rate: float, peak: float, words: str, *, below: bool) -> Markup:
    """The slope that a bandwidth allows up to the peak, with its words along the lower part."""
    first, last = max(chart.x.low, chart.y.low / rate), min(chart.x.high, peak / rate)
    if first >= last:
        return Markup()
    start, end = chart.place(first, first * rate), chart.place(last, last * rate)
    turned = degrees(atan2(end[1] - start[1], end[0] - start[0]))
    text = Markup('<g transform="translate({:.1f} {:.1f}) rotate({:.2f})">{}</g>').format(
        *start, turned, label(words, 14, 14 if below else -6, "muted")
    )
    return line([start, end], "muted", width=1.3) + text


def _rate(flops_per_second: float) -> str:
    """FLOP/s without the unit: `459 T`, `1 P`."""
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops_per_second >= unit:
            return f"{flops_per_second / unit:.3g} {letter}"
    return f"{flops_per_second / 1e6:.3g} M"
