"""The phases of a step of post-training along time, a row for each pool of chips."""

from typing import Any

from markupsafe import Markup

from meshwright.report.draw.chart import Scale, level_axis
from meshwright.report.draw.figure import PHONE, TABLET, WIDE, Figure, Panel, at_widths
from meshwright.report.draw.marks import bar, key, label, text_width
from meshwright.units import format_seconds

_COLOURS = {
    "roll out": "compute",
    "score": "gradients",
    "train": "fsdp",
    "move weights": "waiting",
    "messages": "exposed",
    "states from the host": "exposed",
    "states to the host": "exposed",
}
_OTHER = "rest"  # the colour of phases without one of their own
_ROW, _GAP = 26, 12


def phases_figure(form: dict[str, Any]) -> Figure:
    """One step in one form of `mw plan rl --json`."""
    title = f"{form['form']}: {format_seconds(form['step_seconds'])} a step"
    panel = at_widths(lambda width: _panel(form, width), WIDE, TABLET, PHONE)
    name = f"phases-{form['form'].replace(', ', '-').replace(' ', '-')}"
    return Figure.of(name, title, "", panel)


def _panel(form: dict[str, Any], width: float) -> Panel:
    phases = form["phases"]
    rows = list(dict.fromkeys(phase["pool"] for phase in phases if phase["pool"] != "both"))
    left = max(text_width(row, bold=True) for row in rows) + 12 if width > PHONE else 4
    x = Scale(0, form["step_seconds"], left, width - 16)
    shown = dict.fromkeys(phase["what"] for phase in phases)
    drawn, top = key([(_COLOURS.get(what, _OTHER), what) for what in shown], width, 12)
    pitch = _ROW + _GAP + (0 if width > PHONE else 14)
    bottom = top + 8 + len(rows) * pitch
    parts = [drawn, level_axis(x, bottom, format_seconds)]
    for number, row in enumerate(rows):
        y = top + 8 + number * pitch + (0 if width > PHONE else 14)
        parts.append(label(row, 0, y + (_ROW / 2 + 4 if width > PHONE else -4), weight=600))
        for phase in phases:
            if phase["pool"] in (row, "both"):
                start = x.place(phase["start_seconds"])
                end = x.place(phase["start_seconds"] + phase["seconds"])
                title = f"{phase['what']}: {format_seconds(phase['seconds'])}"
                colour = _COLOURS.get(phase["what"], _OTHER)
                parts.append(bar(start, y, max(end - start, 0.6), _ROW, colour, title=title))
    return Panel(width, bottom + 26, Markup().join(parts))
