"""The charts as plotly figures in plain JSON, so that this module needs no plotly to be imported.

A colour is written `var(--name)`: the page's script puts in the value of the theme, light or dark.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from meshwright.report.documents import Document
from meshwright.units import format_seconds

Figure = dict[str, Any]


def loss_figure(metrics: Sequence[Document], unigram_entropy: float | None) -> Figure:
    """Training and validation loss over the steps, and the unigram entropy that both must beat."""
    traces = [
        _trace(metrics, "loss", "training", color="var(--chart-1)", mode="lines", width=1.8),
        _trace(
            metrics, "validation_loss", "validation", color="var(--chart-2)", mode="lines+markers", width=2.4
        ),
    ]
    traces = [trace for trace in traces if trace["y"]]
    lines = []
    if unigram_entropy is not None:
        lines = [
            _level(unigram_entropy, f"unigram entropy {unigram_entropy:.2f}", "var(--muted)", label="bottom")
        ]
    figure = _figure(traces, lines, "nats per token")
    values = [value for trace in traces for value in trace["y"]] + [line["y0"] for line in lines]
    # A shape does not stretch the axis by itself, and the entropy must be in the picture.
    _set_range(figure, min(values, default=0) * 0.94, max(values, default=1) * 1.05)
    return figure


def step_time_figure(metrics: Sequence[Document], planned_seconds: float | None) -> Figure:
    """Measured milliseconds of each logged step, and the planned step time as a level line."""
    trace = _trace(
        metrics, "step_seconds", "measured", color="var(--chart-1)", mode="markers", width=2, scale=1e3
    )
    lines = []
    if planned_seconds is not None:
        text = f"planned {format_seconds(planned_seconds)}"
        # Below: a run is seldom faster than its plan, and its points should stay clear of the text.
        lines = [_level(planned_seconds * 1e3, text, "var(--chart-3)", label="top")]
    top = max([*trace["y"], (planned_seconds or 0) * 1e3], default=0)
    figure = _figure([trace] if trace["y"] else [], lines, "ms per step")
    # From zero: the distance to the plan is a share of the step, and must look like one.
    _set_range(figure, 0, top * 1.18 or 1)
    return figure


def _trace(
    metrics: Sequence[Document], key: str, name: str, *, color: str, mode: str, width: float, scale: float = 1
) -> Figure:
    """One curve; steps where the value is absent or not finite (JSON has no NaN) are left out."""
    points = [(line.get("step"), line[key] * scale) for line in metrics if line.get(key) is not None]
    points = [(step, value) for step, value in points if isfinite(value)]
    return {
        "type": "scatter",
        "name": name,
        "mode": mode,
        "x": [step for step, _ in points],
        "y": [value for _, value in points],
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 6},
        "hovertemplate": "step %{x}<br>%{y:.4g}<extra>" + name + "</extra>",
    }


def _level(value: float, text: str, color: str, *, label: str) -> Figure:
    """A dashed horizontal line across the plot, its text above ("bottom" of the text) or below ("top")."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"color": color, "width": 1.6, "dash": "dash"},
        "label": {
            "text": text,
            "textposition": "end",
            "xanchor": "right",
            "yanchor": label,
            "font": {"color": color, "size": 12},
        },
    }


def _set_range(figure: Figure, low: float, high: float) -> None:
    figure["layout"]["yaxis"] |= {"range": [low, high], "autorange": False}


def _figure(traces: list[Figure], lines: list[Figure], unit: str) -> Figure:
    axis = {
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--line)",
        "tickfont": {"color": "var(--muted)", "size": 11},
        "title": {"font": {"color": "var(--muted)", "size": 12}},
    }
    return {
        "data": traces,
        "layout": {
            "height": 320,
            "margin": {"l": 54, "r": 16, "t": 34, "b": 44},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "Inter, system-ui, sans-serif", "color": "var(--ink)", "size": 12},
            "hovermode": "x unified",
            "hoverlabel": {
                "bgcolor": "var(--card)",
                "bordercolor": "var(--line)",
                "font": {"color": "var(--ink)"},
            },
            "showlegend": len(traces) > 1,
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
                "font": {"color": "var(--ink)"},
            },
            "xaxis": axis
            | {"title": {"text": "step", **axis["title"]}, "showgrid": False, "rangemode": "tozero"},
            "yaxis": axis | {"title": {"text": unit, **axis["title"]}},
            "shapes": lines,
        },
    }
