"""Communication, compute and MFU against the batch for each usual strategy, with a slider over chips."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from meshwright.hardware.topology import Hardware
from meshwright.plan.study.scaling import BEST, STRATEGIES, ScalingPoint, ScalingSweep
from meshwright.plan.study.split import split_step
from meshwright.report.draw.chart import Chart, ChartAxis, ChartPoint, Curve, draw_curves, padded_ends
from meshwright.report.draw.figure import HALF, PHONE, Figure, Frame, Panel, at_widths
from meshwright.report.pictures.bars import layout_lines
from meshwright.units import format_count, format_seconds

STRATEGY_COLOUR = dict(zip(STRATEGIES, ("dp", "fsdp", "tp", "fsdp_tp"), strict=True)) | {BEST: "ink"}
_RIGHT = 84  # pixels for the names of curves


def strategies_figure(sweeps: Sequence[ScalingSweep], planned: Hardware) -> Figure:
    """A frame for each machine. planned: the machine of the plan, shown first."""
    points = [point for sweep in sweeps for point in sweep.points]
    tokens = ChartAxis(
        "tokens per batch", format_count, padded_ends([p.candidate.num_tokens for p in points], 0.02), True
    )
    splits = [split_step(point.candidate) for point in points]
    times = [t for split in splits for t in (split.work_seconds, split.communication_seconds) if t > 0]
    seconds = ChartAxis("time per step", format_seconds, padded_ends(times), True)
    most = min(1, max(point.candidate.mfu for point in points) * 1.12)
    mfu = ChartAxis("MFU", "{:.0%}".format, (0, most))
    frames = tuple(
        Frame(
            f"{sweep.hardware.num_chips:,} chips, {sweep.hardware.spec}",
            (
                at_widths(partial(_times, sweep, tokens, seconds), HALF, PHONE),
                at_widths(partial(_mfu, sweep, tokens, mfu), HALF, PHONE),
            ),
        )
        for sweep in sweeps
    )
    return Figure(
        "strategies",
        "Strategies against the batch",
        "Each mark is the best layout of a strategy at that batch size; the wide band is the best layout "
        "found. If a line is above the dashed compute (HBM-bound work included), communication takes longer "
        "than compute; below it, communication may be hidden. Hollow marks do not fit the memory of a chip.",
        frames,
        first=next(n for n, sweep in enumerate(sweeps) if sweep.hardware is planned),
        slider="chips",
    )


def _times(sweep: ScalingSweep, x: ChartAxis, y: ChartAxis, width: float) -> Panel:
    """Seconds of communication per step by strategy, and a dashed curve of the best layout's compute."""
    compute = [
        ChartPoint(p.candidate.num_tokens, split_step(p.candidate).work_seconds) for p in sweep.of(BEST)
    ]
    curves = _curves(sweep, lambda p: split_step(p.candidate).communication_seconds, format_seconds)
    curves = [*curves, Curve("compute", "ink", compute, dashes="5 4")]
    return _panel(sweep, "All communication", Chart(x, y, width, right=_RIGHT), curves)


def _mfu(sweep: ScalingSweep, x: ChartAxis, y: ChartAxis, width: float) -> Panel:
    """Model FLOPs utilisation by strategy."""
    curves = _curves(sweep, lambda p: p.candidate.mfu, "{:.1%}".format)
    return _panel(sweep, "Model FLOPs utilisation", Chart(x, y, width, right=_RIGHT), curves)


def _panel(sweep: ScalingSweep, heading: str, chart: Chart, curves: Iterable[Curve]) -> Panel:
    planned = chart.upright(sweep.planned_tokens, "planned")
    return chart.panel(heading, planned, draw_curves(chart, list(curves)))


def _curves(
    sweep: ScalingSweep, value: Callable[[ScalingPoint], float], text: Callable[[float], str]
) -> Iterable[Curve]:
    """A curve for each strategy that can run, and a wide band below them for the best layout."""
    for strategy in (*STRATEGIES, BEST):
        name = "best found" if strategy == BEST else strategy
        points = [
            ChartPoint(
                p.candidate.num_tokens, value(p), _title(p, name, text(value(p))), not p.candidate.fits
            )
            for p in sweep.of(strategy)
            if value(p) > 0
        ]
        yield Curve(name, STRATEGY_COLOUR[strategy], points, band=strategy == BEST)


def _title(point: ScalingPoint, name: str, value: str) -> str:
    layout = "; ".join(filter(None, layout_lines(point.candidate.layout)))
    fits = "" if point.candidate.fits else "; does not fit"
    return f"{name}, {format_count(point.candidate.num_tokens)} tokens: {value}\n{layout}{fits}"
