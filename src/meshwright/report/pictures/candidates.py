"""Every layout that the search ranked, by memory and step time, and the best of each usual strategy."""

from collections.abc import Sequence

from markupsafe import Markup

from meshwright.plan.candidate import Candidate
from meshwright.plan.study.scaling import BEST, STRATEGIES, ScalingPoint
from meshwright.report.draw.chart import Chart, ChartAxis, padded_ends
from meshwright.report.draw.figure import PHONE, TABLET, WIDE, Figure, Panel, at_widths
from meshwright.report.draw.marks import bar, disc, fitted, kept_apart, label, line, text_width
from meshwright.report.pictures.bars import layout_lines
from meshwright.report.pictures.strategy_curves import STRATEGY_COLOUR
from meshwright.units import format_bytes, format_seconds

_HEIGHT, _RIGHT, _ENTRY = 380, 250, 34  # of the plot, for names at its right, for one name


def candidates_figure(
    candidates: Sequence[Candidate], chosen: Candidate, usual: Sequence[ScalingPoint]
) -> Figure:
    """A dot for each candidate; the chosen layout and the best of each usual strategy have names."""
    named = {point.strategy: point.candidate for point in usual if point.strategy in STRATEGIES} | {
        BEST: chosen
    }
    absent = [strategy for strategy in STRATEGIES if strategy not in named]
    caption = (
        "Each dot is a layout. Layouts to the right of the line do not fit in a chip's memory. The best "
        "layout of each usual strategy is labelled."
    )
    if absent:
        caption += f" Not drawn, since they do not divide this batch: {', '.join(absent)}."
    panel = at_widths(lambda width: _panel(candidates, named, width), WIDE, TABLET, PHONE)
    return Figure.of("layouts", "Why this layout", caption, panel)


def _panel(candidates: Sequence[Candidate], named: dict[str, Candidate], width: float) -> Panel:
    """On a phone the names are below the plot, otherwise at its right."""
    is_wide, drawn = width > PHONE, [*candidates, *named.values()]
    usable = named[BEST].hardware.chip.program_bytes
    sizes = padded_ends([usable, *(float(one.memory.total) for one in drawn)], 0.04)
    times = padded_ends([one.step_seconds for one in drawn], 0.06)
    x, y = (
        ChartAxis("memory of one chip", format_bytes, sizes, True),
        ChartAxis("step time", format_seconds, times, True),
    )
    below = 0 if is_wide else _ENTRY * len(named) + 14
    right = _RIGHT if is_wide else 16
    chart = Chart(x, y, width, _HEIGHT + below, right=right, top=34, bottom=42 + below)
    places = {name: chart.place(one.memory.total, one.step_seconds) for name, one in named.items()}
    ends = (chart.y.end + 6, chart.y.start - 16) if is_wide else (chart.y.start + 64, chart.height)
    heights = kept_apart([y for _, y in places.values()], _ENTRY, *ends)
    left = chart.x.end + 14 if is_wide else 14
    marks = [
        disc(
            *chart.place(candidate.memory.total, candidate.step_seconds),
            2.2,
            "hidden",
            title=_title(candidate),
        )
        for candidate in candidates
    ]
    for (name, candidate), (px, py), height in zip(named.items(), places.values(), heights, strict=True):
        colour, is_chosen = STRATEGY_COLOUR[name], name == BEST
        end = [(left - 10, height), (left - 4, height)]
        marks.append(
            line([(px, py), *end], "hidden", width=0.8) if is_wide else disc(4, height - 1, 4, colour)
        )
        marks.append(
            disc(px, py, 5 if is_chosen else 4, colour, hollow=not candidate.fits, title=_title(candidate))
        )
        words = f"{'chosen' if is_chosen else name}: {format_seconds(candidate.step_seconds)}"
        words += "" if candidate.fits else ", does not fit"
        marks.append(label(words, left, height + 3, colour, weight=600 if is_chosen else 500))
        degrees = fitted(layout_lines(candidate.layout)[0], width - left)
        marks.append(label(degrees, left, height + 17, "muted"))
    return chart.panel("", _edge(chart, usable), *marks)


def _edge(chart: Chart, usable: float) -> Markup:
    """A line at the usable memory, labelled on the side with space, and the area beyond it."""
    x, top, bottom = chart.x.place(usable), chart.y.end - 10, chart.y.start
    words = f"{format_bytes(usable)} usable"
    fits = x - text_width(words) - 8 > chart.x.start
    return Markup().join(
        [
            bar(x, top, chart.x.end - x, bottom - top, "band"),
            line([(x, top), (x, bottom)], "waiting", dashes="3 2"),
            label(words, x + (-6 if fits else 6), top + 8, "waiting", anchor="end" if fits else "start"),
        ]
    )


def _title(candidate: Candidate) -> str:
    layout = "; ".join(filter(None, layout_lines(candidate.layout)))
    return f"{layout}\n{format_seconds(candidate.step_seconds)}, {format_bytes(candidate.memory.total)}"
