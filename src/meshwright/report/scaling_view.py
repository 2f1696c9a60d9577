"""Communication, compute and MFU against the batch for each strategy, with a slider over chips."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from markupsafe import Markup

from meshwright.hardware.topology import Hardware
from meshwright.plan.study.scaling import BEST, STRATEGIES, ScalingPoint, ScalingSweep
from meshwright.plan.study.split import split_step
from meshwright.report.bars_view import layout_lines
from meshwright.report.chart import SMALL, ChartAxes, Scale, dot, kept_apart, label, line, padded_ends
from meshwright.report.figure import Figure, Frame, Panel
from meshwright.units import format_count, format_seconds

STRATEGY_COLOUR = dict(zip(STRATEGIES, ("dp", "fsdp", "tp", "fsdp_tp"), strict=True)) | {BEST: "best"}
_WIDTH, _HEIGHT = 522, 372
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 102, 48, 42
_BEST_WORDS = "best found"
_DRAWN = (*STRATEGIES, BEST)


def scaling_figure(sweeps: Sequence[ScalingSweep], planned: Hardware) -> Figure:
    """A frame for each machine; planned: the plan's own, which is shown first."""
    points = [point for sweep in sweeps for point in sweep.points]
    tokens = Scale(*padded_ends([_tokens(point) for point in points], 0.02), _LEFT, _WIDTH - _RIGHT, True)
    seconds = [value for point in points for value in _seconds(point)]
    times = Scale(*padded_ends(seconds), _HEIGHT - _BOTTOM, _TOP, True)
    mfu = Scale(0, min(1, max(point.candidate.mfu for point in points) * 1.12), _HEIGHT - _BOTTOM, _TOP)
    frames = tuple(
        Frame(_machine(sweep), (_times(sweep, tokens, times), _mfu(sweep, tokens, mfu))) for sweep in sweeps
    )
    first = next(n for n, sweep in enumerate(sweeps) if sweep.hardware is planned)
    return Figure(
        "strategies",
        "Strategies against the batch",
        "Each mark is the best layout of a strategy at that batch size; the wide band is the best layout "
        "found. "
        "Where a line is above the dashed compute (HBM-bound work included), communication takes longer than "
        "compute; below it, communication may be hidden. Hollow marks do not fit the memory of a chip.",
        frames,
        first,
        "chips",
    )


def _machine(sweep: ScalingSweep) -> str:
    return f"{sweep.hardware.num_chips:,} chips, {sweep.hardware.spec}"


def _tokens(point: ScalingPoint) -> float:
    return point.candidate.num_tokens


def _seconds(point: ScalingPoint) -> list[float]:
    split = split_step(point.candidate)
    return [value for value in (split.work_seconds, split.communication_seconds) if value > 0]


def _times(sweep: ScalingSweep, x: Scale, y: Scale) -> Panel:
    """Seconds per step that the links are busy, by strategy; dashed what the best layout computes."""
    axes = ChartAxes(x, y, "tokens per batch", "time per step", format_count, format_seconds)
    body = [label("Communication, all of it", 0, 10, weight=600), axes.svg()]
    drawn = [
        (STRATEGY_COLOUR[name], _name(name), _communication_points(sweep.of(name)))
        for name in _DRAWN
        if sweep.of(name)
    ]
    compute = [(point, split_step(point.candidate).work_seconds) for point in sweep.of(BEST)]
    body.append(_curve(compute, x, y, "ink", dashes="5 4"))
    ends = [("ink", "compute", compute), *drawn]
    body += [_planned_batch(sweep, x, y), *_curves(drawn, x, y, format_seconds), _end_labels(ends, x, y)]
    return Panel(_WIDTH, _HEIGHT, Markup().join(body))


def _communication_points(points: Sequence[ScalingPoint]) -> list[tuple[ScalingPoint, float]]:
    found = [(point, split_step(point.candidate).communication_seconds) for point in points]
    return [(point, value) for point, value in found if value > 0]


def _mfu(sweep: ScalingSweep, x: Scale, y: Scale) -> Panel:
    """Model FLOPs utilisation by strategy."""
    axes = ChartAxes(x, y, "tokens per batch", "MFU", format_count, "{:.0%}".format)
    body = [label("What the step makes of it", 0, 10, weight=600), axes.svg()]
    drawn = [
        (STRATEGY_COLOUR[name], _name(name), [(point, point.candidate.mfu) for point in sweep.of(name)])
        for name in _DRAWN
        if sweep.of(name)
    ]
    body += [
        _planned_batch(sweep, x, y),
        *_curves(drawn, x, y, "{:.1%}".format),
        _end_labels(drawn, x, y),
    ]
    return Panel(_WIDTH, _HEIGHT, Markup().join(body))


def _name(strategy: str) -> str:
    return _BEST_WORDS if strategy == BEST else strategy


_Curve = Sequence[tuple[ScalingPoint, float]]
_Drawn = Sequence[tuple[str, str, _Curve]]  # colour, name, points


def _curves(drawn: _Drawn, x: Scale, y: Scale, write: Callable[[float], str]) -> list[Markup]:
    """The best as a broad pale band, the strategies upon it, so that one seen on it is the best."""
    parts = [_curve(points, x, y, "best_band", width=9) for colour, _, points in drawn if colour == "best"]
    rest = [(colour, name, points) for colour, name, points in drawn if colour != "best"]
    parts += [_curve(points, x, y, colour) for colour, _, points in rest]
    for colour, name, points in rest:
        parts += [_mark(point, value, x, y, colour, name, write) for point, value in points]
    for colour, name, points in drawn:
        if colour == "best":
            own = [(point, value) for point, value in points if not _is_drawn(point, rest)]
            parts += [_mark(point, value, x, y, colour, name, write) for point, value in own]
    return parts


def _is_drawn(point: ScalingPoint, drawn: _Drawn) -> bool:
    """Whether one of these curves has a mark for the same candidate."""
    return any(other.candidate is point.candidate for *_, points in drawn for other, _ in points)


def _planned_batch(sweep: ScalingSweep, x: Scale, y: Scale) -> Markup:
    """A thin upright line at the batch that was planned."""
    place = x.place(sweep.planned_tokens)
    return line([(place, y.end), (place, y.start)], "hidden", dashes="2 3") + label(
        "planned", place, y.end - 4, "muted", anchor="middle", size=SMALL
    )


def _curve(
    points: _Curve, x: Scale, y: Scale, colour: str, *, width: float = 1.6, dashes: str = ""
) -> Markup:
    """The line through the points; dotted between those that do not fit."""
    parts = []
    for (first, low), (second, high) in pairwise(points):
        fits = first.candidate.fits and second.candidate.fits
        ends = [(x.place(_tokens(first)), y.place(low)), (x.place(_tokens(second)), y.place(high))]
        parts.append(line(ends, colour, width=width, dashes=dashes or ("" if fits else "1.5 3")))
    return Markup().join(parts)


def _mark(
    point: ScalingPoint,
    value: float,
    x: Scale,
    y: Scale,
    colour: str,
    name: str,
    write: Callable[[float], str],
) -> Markup:
    degrees, schedule = layout_lines(point.candidate.layout)
    fits = "" if point.candidate.fits else "; does not fit"
    words = f"{name}, {format_count(_tokens(point))} tokens: {write(value)}\n{degrees}"
    title = words + (f"; {schedule}" if schedule else "") + fits
    place = (x.place(_tokens(point)), y.place(value))
    return dot(*place, 3.2, colour, hollow=not point.candidate.fits, title=title)


def _end_labels(curves: _Drawn, x: Scale, y: Scale) -> Markup:
    """Each curve's name at the right of the plot, at the height of its last point, none on another."""
    shown = [(colour, name, points[-1]) for colour, name, points in curves if points]
    ends = [y.place(value) for _, _, (_, value) in shown]
    places = kept_apart(ends, 15, _TOP + 2, _HEIGHT - _BOTTOM)
    parts = []
    for (colour, name, (point, _)), end, place in zip(shown, ends, places, strict=True):
        left = x.place(_tokens(point)) + 5
        parts.append(line([(left, end), (max(left, x.end + 4), place), (x.end + 8, place)], "line"))
        parts.append(label(name, x.end + 11, place + 4, colour, weight=600 if colour == "best" else 400))
    return Markup().join(parts)
