"""The charts of a run: its loss and its step time, measured and planned."""

from collections.abc import Sequence
from math import isfinite

from meshwright.report.draw.chart import Chart, ChartAxis, ChartPoint, Curve, draw_curves
from meshwright.report.draw.figure import HALF, PHONE, Figure, Panel, at_widths
from meshwright.report.pictures.bars import Bar, BarPart, stacked
from meshwright.report.run_documents import JsonDocument, Run, measured_step_seconds, step_seconds_of_plan
from meshwright.units import format_count, format_seconds

_MOST_POINTS = 400  # of one curve


def run_figures(run: Run) -> list[Figure]:
    """The figures of a run with metrics."""
    entropy = (run.corpus or {}).get("unigram_entropy")
    planned, measured = step_seconds_of_plan(run), measured_step_seconds(run.metrics)
    loss = (
        "Nats per token. The unigram entropy is the loss of a model that knows only how often tokens occur."
    )
    times = "Each logged step."
    figures = [
        Figure.of("loss", "Loss", loss, loss_panel(run.metrics, entropy)),
        Figure.of("step-time", "Step time", times, step_time_panel(run.metrics, planned)),
    ]
    if planned and measured:
        sides = (("planned", planned, "fsdp"), ("measured, median", measured, "compute"))
        rows = [
            Bar(name, "", [BarPart("step", value, format_seconds(value), colour)], format_seconds(value))
            for name, value, colour in sides
        ]
        figures.append(Figure.of("planned-step", "Planned and measured step time", "", stacked(rows)))
    return figures


def loss_panel(metrics: Sequence[JsonDocument], unigram_entropy: float | None) -> Panel:
    """Training and validation loss over the steps, and the unigram entropy that both must beat."""
    curves = [
        Curve("training", "compute", points(metrics, "loss", "training loss {:.3f}")),
        Curve("validation", "waiting", points(metrics, "validation_loss", "validation loss {:.3f}")),
    ]
    values = [point.y for curve in curves for point in curve.points]
    values += [] if unigram_entropy is None else [unigram_entropy]
    ends = 0.94 * min(values, default=0), 1.05 * max(values, default=1)
    y = ChartAxis("nats per token", "{:g}".format, ends)

    def draw(width: float) -> Panel:
        chart = Chart(_steps(metrics), y, width, 300, right=76, top=30)
        words = f"unigram entropy {unigram_entropy:.2f}" if unigram_entropy is not None else ""
        level = [chart.level(unigram_entropy, words, "muted")] if unigram_entropy is not None else []
        return chart.panel("", draw_curves(chart, curves), *level)

    return at_widths(draw, HALF, PHONE)


def step_time_panel(metrics: Sequence[JsonDocument], planned_seconds: float | None) -> Panel:
    """Measured milliseconds of each logged step, and the planned step time as a level."""
    measured = points(metrics, "step_seconds", "{:.4g} ms", scale=1e3)
    planned = 1e3 * (planned_seconds or 0)
    # From zero: the distance to the plan is a share of the step, and must look like one.
    top = 1.18 * max([planned, *(point.y for point in measured)]) or 1
    y = ChartAxis("ms per step", "{:,g}".format, (0, top))

    def draw(width: float) -> Panel:
        chart = Chart(_steps(metrics), y, width, 300, top=30)
        curve = draw_curves(chart, [Curve("measured", "compute", measured, joined=False)])
        if not planned_seconds:
            return chart.panel("", curve)
        # On the side with fewer points.
        below = sum(point.y > planned for point in measured) > len(measured) / 2
        words = f"planned {format_seconds(planned_seconds)}"
        return chart.panel("", curve, chart.level(planned, words, "fsdp", below=below))

    return at_widths(draw, HALF, PHONE)


def points(metrics: Sequence[JsonDocument], key: str, text: str, scale: float = 1) -> list[ChartPoint]:
    """The finite values of one key by step.

    A long run is cut into equal parts, and only the smallest and the largest value of each are kept.
    """
    known = [
        (line["step"], line[key] * scale) for line in metrics if line.get(key) is not None and "step" in line
    ]
    known = [(step, value) for step, value in known if isfinite(value)]
    if len(known) > _MOST_POINTS:
        size = -(-2 * len(known) // _MOST_POINTS)
        parts = [known[n : n + size] for n in range(0, len(known), size)]
        ends = {pick(part, key=lambda point: point[1]) for part in parts for pick in (min, max)}
        known = sorted(ends)
    return [ChartPoint(step, value, f"step {step:,}: {text.format(value)}") for step, value in known]


def _steps(metrics: Sequence[JsonDocument]) -> ChartAxis:
    steps = [line["step"] for line in metrics if "step" in line] or [1]
    return ChartAxis("step", format_count, (min(0, *steps), max(steps)))
