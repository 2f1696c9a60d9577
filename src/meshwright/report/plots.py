"""The charts of a run: its loss and its step time."""

from collections.abc import Sequence
from math import isfinite

from meshwright.report.charts import Chart, Kind, chart, level, series
from meshwright.report.run_files import JsonDocument
from meshwright.units import format_seconds


def loss_chart(metrics: Sequence[JsonDocument], unigram_entropy: float | None) -> Chart:
    """Training and validation loss over the steps, and the unigram entropy that both must beat."""
    curves = [
        _curve(metrics, "loss", "training", "line", 1),
        _curve(metrics, "validation_loss", "validation", "line", 2),
    ]
    curves = [curve for curve in curves if curve["y"]]
    levels = []
    if unigram_entropy is not None:
        levels = [level(unigram_entropy, f"unigram entropy {unigram_entropy:.2f}", "muted")]
    values = [value for curve in (*curves, *levels) for value in curve.get("y", [curve.get("value")])]
    span = (min(values, default=0) * 0.94, max(values, default=1) * 1.05)
    return chart(curves, "step", "nats per token", levels=levels, span=span)


def step_time_chart(metrics: Sequence[JsonDocument], planned_seconds: float | None) -> Chart:
    """Measured milliseconds of each logged step, and the planned step time as a level line."""
    curve = _curve(metrics, "step_seconds", "measured", "points", 1, scale=1e3)
    levels = []
    if planned_seconds is not None:
        levels = [level(planned_seconds * 1e3, f"planned {format_seconds(planned_seconds)}", "chart-3")]
    # From zero: the distance to the plan is a share of the step, and must look like one.
    top = max([*curve["y"], (planned_seconds or 0) * 1e3], default=0) * 1.18 or 1
    return chart([curve] if curve["y"] else [], "step", "ms per step", levels=levels, span=(0, top))


def _curve(
    metrics: Sequence[JsonDocument], key: str, name: str, kind: Kind, colour: int, scale: float = 1
) -> Chart:
    """One curve; steps where the value is absent or not finite (JSON has no NaN) are left out."""
    points = [(line.get("step"), line[key] * scale) for line in metrics if line.get(key) is not None]
    points = [(step, value) for step, value in points if step is not None and isfinite(value)]
    return series(name, kind, [step for step, _ in points], [value for _, value in points], colour)
