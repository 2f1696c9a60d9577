"""Charts of points and lines as plain data, which the page's script draws with Observable Plot.

Plot and the part of D3 that it needs are vendored (`vendor/`, with their licences): together half a megabyte,
and a page loads nothing else.
"""

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, Literal

from markupsafe import Markup

Chart = dict[str, Any]
Kind = Literal["line", "points", "steps"]
_LIBRARIES = ("d3.min.js", "plot.min.js")


def chart(
    series: Sequence[Chart],
    x: str,
    y: str,
    *,
    levels: Sequence[Chart] = (),
    logarithmic: Literal["", "x", "xy"] = "",
    span: tuple[float, float] | None = None,
) -> Chart:
    """One chart. x, y: what the axes show, with their units. span: the ends of y; by default the data's."""
    return {
        "series": list(series),
        "levels": list(levels),
        "x": {"title": x, "logarithmic": "x" in logarithmic},
        "y": {"title": y, "logarithmic": "y" in logarithmic, "span": span},
    }


def series(
    name: str,
    kind: Kind,
    x: Sequence[float],
    y: Sequence[float],
    colour: int,
    *,
    notes: Sequence[str] = (),
    of: str = "",
) -> Chart:
    """One curve. colour: 1, 2 or 3 of the page. notes: shown with each point.

    of: the series it belongs to, under whose name it stands in the legend.
    """
    return {
        "name": name,
        "kind": kind,
        "x": list(x),
        "y": list(y),
        "colour": f"var(--chart-{colour})",
        "notes": list(notes),
        "of": of,
    }


def level(value: float, text: str, colour: str) -> Chart:
    """A dashed line across the chart at `value`, with its text. colour: a variable of the page's style."""
    return {"value": value, "text": text, "colour": f"var(--{colour})"}


def script_json(value: object) -> Markup:
    """JSON that may stand inside a <script> element: no `<` can close it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def libraries() -> Markup:
    """The script of Observable Plot and D3, for one <script> element of a page with charts."""
    folder = resources.files("meshwright.report") / "vendor"
    return Markup("\n").join(Markup((folder / name).read_text(encoding="utf-8")) for name in _LIBRARIES)
