"""Every layout that the search priced, by memory and step time: why one was chosen over the others."""

from collections.abc import Sequence

from markupsafe import Markup

from meshwright.plan.candidate import Candidate
from meshwright.plan.study.scaling import BEST, STRATEGIES, ScalingPoint
from meshwright.report.bars_view import layout_lines
from meshwright.report.chart import (
    SMALL,
    ChartAxes,
    Scale,
    bar,
    dot,
    kept_apart,
    label,
    line,
    padded_ends,
    text_width,
)
from meshwright.report.figure import Figure, Panel
from meshwright.report.scaling_view import STRATEGY_COLOUR
from meshwright.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 1068, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 250, 48, 42
_MOST_DOTS = 3000


def candidates_figure(found: Sequence[Candidate], chosen: Candidate, usual: Sequence[ScalingPoint]) -> Figure:
    """A dot for each of `found`; the chosen one and the best of each usual strategy have names."""
    caption = (
        "Each dot is a layout. Layouts to the right of the line do not fit in a chip's memory. The best "
        "layout "
        "of each usual strategy is labelled."
    )
    return Figure.of("layouts", "Why this layout", caption, _panel(found, chosen, usual))


def _panel(found: Sequence[Candidate], chosen: Candidate, usual: Sequence[ScalingPoint]) -> Panel:
    named = [(point.strategy, point.candidate) for point in usual if point.strategy in STRATEGIES]
    everyone = [*found[:_MOST_DOTS], chosen, *(candidate for _, candidate in named)]
    bottom = _HEIGHT - _BOTTOM
    usable = chosen.hardware.chip.program_bytes
    sizes = [float(candidate.memory.total) for candidate in everyone]
    x = Scale(*padded_ends([*sizes, usable], 0.04), _LEFT, _WIDTH - _RIGHT, True)
    y = Scale(*padded_ends([candidate.step_seconds for candidate in everyone], 0.06), bottom, _TOP, True)
    axes = ChartAxes(x, y, "memory of one chip", "step time", format_bytes, format_seconds)
    edge = x.place(usable)
    body = [
        bar(edge, _TOP - 10, x.end - edge, bottom - _TOP + 10, "band"),
        axes.svg(),
        line([(edge, _TOP - 10), (edge, bottom)], "waiting", dashes="3 2"),
        _edge_words(f"{format_bytes(usable)} usable", edge, x),
    ]
    body += [_dot(candidate, x, y) for candidate in found[:_MOST_DOTS]]
    body.append(_named(named, chosen, x, y))
    absent = [strategy for strategy in STRATEGIES if strategy not in dict(named)]
    if absent:
        words = f"not drawn, since they do not divide this batch: {', '.join(absent)}"
        body.append(label(words, 0, bottom + 34, "muted", size=SMALL))
    return Panel(_WIDTH, _HEIGHT, Markup().join(body))


def _edge_words(words: str, edge: float, x: Scale) -> Markup:
    """Words at the line of what fits: left of it, or right where there is no room."""
    fits = edge - text_width(words, SMALL) - 8 > x.start
    place, anchor = (edge - 6, "end") if fits else (edge + 6, "start")
    return label(words, place, _TOP - 2, "waiting", anchor=anchor, size=SMALL)


def _dot(candidate: Candidate, x: Scale, y: Scale) -> Markup:
    return dot(*_place(candidate, x, y), 2.2, "hidden", title=_title(candidate))


def _named(named: Sequence[tuple[str, Candidate]], chosen: Candidate, x: Scale, y: Scale) -> Markup:
    """The chosen layout and the usual strategies with their names at the right, joined by thin lines."""
    rows = [*named, (BEST, chosen)]
    places = [_place(candidate, x, y) for _, candidate in rows]
    heights = kept_apart([place[1] for place in places], 34, _TOP + 6, _HEIGHT - _BOTTOM - 16)
    parts = []
    for (name, candidate), (px, py), height in zip(rows, places, heights, strict=True):
        colour, is_chosen = STRATEGY_COLOUR[name], name == BEST
        parts.append(line([(px, py), (x.end + 4, height), (x.end + 10, height)], "hidden", width=0.8))
        parts.append(
            dot(px, py, 5 if is_chosen else 4, colour, hollow=not candidate.fits, title=_title(candidate))
        )
        words = f"{'chosen' if is_chosen else name}: {format_seconds(candidate.step_seconds)}"
        words += "" if candidate.fits else ", does not fit"
        parts.append(label(words, x.end + 14, height + 3, colour, weight=600 if is_chosen else 500))
        degrees = layout_lines(candidate.layout)[0]
        parts.append(label(_cut(degrees), x.end + 14, height + 17, "muted", size=SMALL))
    return Markup().join(parts)


def _cut(words: str) -> str:
    most = int((_RIGHT - 18) / (SMALL * 0.54))
    return words if len(words) <= most else words[: most - 1] + "…"


def _place(candidate: Candidate, x: Scale, y: Scale) -> tuple[float, float]:
    return x.place(candidate.memory.total), y.place(candidate.step_seconds)


def _title(candidate: Candidate) -> str:
    degrees, schedule = layout_lines(candidate.layout)
    figures = f"{format_seconds(candidate.step_seconds)}, {format_bytes(candidate.memory.total)}"
    return f"{degrees}" + (f"; {schedule}" if schedule else "") + f"\n{figures}"
