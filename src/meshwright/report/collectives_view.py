"""Measured collectives beside their model: a page of charts, and a plot for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from string import ascii_uppercase

from meshwright import __version__
from meshwright.report import templating
from meshwright.report.charts import Chart, chart, libraries, script_json, series
from meshwright.report.run_files import JsonDocument
from meshwright.units import format_bytes, format_seconds

_COLOURS = 3  # of the page's charts
_LETTERS = ascii_uppercase
_WIDTH, _HEIGHT = 84, 20  # characters of a plot


def collectives_html(document: JsonDocument) -> str:
    """The document of `mw bench collectives` as one HTML page that loads nothing."""
    return (
        templating.environment()
        .get_template("collectives.html.jinja")
        .render(
            title=f"Collectives of {document['hardware']}",
            version=__version__,
            mesh=document["mesh"],
            charts={
                op: script_json(collective_chart(document["results"], op)) for op in measured_ops(document)
            },
            libraries=libraries(),
        )
    )


def measured_ops(document: JsonDocument) -> list[str]:
    """The collectives that were measured, in order."""
    return list(dict.fromkeys(result["op"] for result in document["results"]))


def collective_chart(results: Sequence[JsonDocument], op: str) -> Chart:
    """Seconds over V for one collective, both logarithmic: points measured, lines of the model."""
    curves: list[Chart] = []
    for number, (axes, points) in enumerate(_by_axes(results, op).items()):
        colour = number % _COLOURS + 1
        sizes = [point["bytes"] for point in points]
        curves.append(series(axes, "points", sizes, [point["seconds"] for point in points], colour))
        model = [point["predicted_seconds"] for point in points]
        curves.append(series(f"{axes}, model", "line", sizes, model, colour, of=axes))
    return chart(curves, "V, bytes of the gathered array", "seconds", logarithmic="xy")


def terminal_plot(document: JsonDocument, op: str) -> str:
    """Seconds over V of one collective as text, both logarithmic: letters measured, dots the model.

    A letter stands for a choice of axes, named below the plot.
    """
    by_axes = _by_axes(document["results"], op)
    points = [point for found in by_axes.values() for point in found]
    across = _Scale.over([point["bytes"] for point in points], _WIDTH)
    up = _Scale.over([point[key] for point in points for key in ("seconds", "predicted_seconds")], _HEIGHT)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for key in ("predicted_seconds", "seconds"):
        for letter, found in zip(_LETTERS, by_axes.values(), strict=False):
            for point in found:
                mark = letter if key == "seconds" else "·"
                rows[-1 - up.place(point[key])][across.place(point["bytes"])] = mark
    labels = [format_seconds(up.high), *[""] * (_HEIGHT - 2), format_seconds(up.low)]
    lines = [f"{label:>10} |{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    ends = f"{format_bytes(int(across.low))} to {format_bytes(int(across.high))}, gathered"
    names = ", ".join(f"{letter} {axes}" for letter, axes in zip(_LETTERS, by_axes, strict=False))
    return "\n".join([op, *lines, f"{'':>11}+{'-' * _WIDTH}", f"{'':>12}{ends}; {names}; · model"])


@dataclass(frozen=True)
class _Scale:
    """Places on a logarithmic axis of so many characters."""

    low: float
    high: float
    length: int

    @classmethod
    def over(cls, values: Sequence[float], length: int) -> "_Scale":
        return cls(min(values), max(values), length)

    def place(self, value: float) -> int:
        span = log(self.high / self.low) or 1.0
        return round(log(value / self.low) / span * (self.length - 1))


def _by_axes(results: Sequence[JsonDocument], op: str) -> dict[str, list[JsonDocument]]:
    found: dict[str, list[JsonDocument]] = {}
    for result in results:
        if result["op"] == op:
            found.setdefault("".join(result["axes"]), []).append(result)
    return found
