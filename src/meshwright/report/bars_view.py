"""The candidates as stacked bars: where the step of each goes, and what fills the memory of its chips."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from markupsafe import Markup

from meshwright.layout import DEGREES, Layout
from meshwright.plan.candidate import Candidate
from meshwright.plan.study.split import StepSplit, split_step
from meshwright.report.chart import SMALL, bar, label, line, text_width
from meshwright.report.figure import Panel
from meshwright.units import format_bytes, format_seconds

WIDTH = 506
_LABELS, _FIGURES = 182, 60  # pixels at the left and at the right of the bars
_BAR, _ROW_GAP = 16, 14
_LEAST_SHARE_OF_HBM = 0.2  # below it the line of the HBM would leave no room for the bars
_KEY = 16  # pixels of one line of the key

# Part of a step: its words and its colour, in the order of the bar.
STEP_PARTS = (
    ("compute_seconds", "compute", "compute"),
    ("memory_seconds", "HBM-bound work", "memory"),
    ("waiting_seconds", "waiting for activations", "waiting"),
    ("exposed_seconds", "weights and gradients, exposed", "exposed"),
    ("bubble_seconds", "pipeline bubble", "bubble"),
    ("rest_seconds", "launch", "rest"),
)
# State in blues, what a microbatch leaves in greens.
MEMORY_COLOURS = {
    "weights": "compute",
    "gradients": "gradients",
    "optimizer": "memory",
    "activations": "fsdp",
    "buffers": "buffers",
}
_OTHER_CAUSES = ("exposed", "waiting", "dp", "tp", "rest")


@dataclass(frozen=True)
class _Piece:
    words: str
    value: float
    text: str
    colour: str


@dataclass(frozen=True)
class _Row:
    """One candidate's bar; below: a thinner bar under it; end: the figure after it."""

    title: str
    subtitle: str
    pieces: tuple[_Piece, ...]
    end: str
    bold: bool
    below: _Piece | None = None


def step_panel(candidates: Sequence[Candidate], chosen: Candidate) -> Panel:
    """The step of each candidate by part, and under it the communication that hides."""
    rows = [
        _step_row(_titles(candidate, chosen), candidate, split_step(candidate), candidate is chosen)
        for candidate in candidates
    ]
    longest = max(sum(piece.value for piece in row.pieces) for row in rows)
    return _panel(rows, longest, "step time", ())


def memory_panel(candidates: Sequence[Candidate], chosen: Candidate) -> Panel:
    """The bytes of a chip by cause for each candidate, and the lines they must stay under."""
    rows = [_memory_row(_titles(one, chosen), one, one is chosen) for one in candidates]
    chips = {one.hardware.chip.name: one.hardware.chip for one in candidates}.values()
    fullest = max(candidate.memory.total for candidate in candidates)
    capacity = max(chip.hbm_bytes for chip in chips)
    if fullest < _LEAST_SHARE_OF_HBM * capacity and len(chips) == 1:
        heading = f"memory of one chip, of {format_bytes(capacity)}"
        return _panel(rows, fullest, heading, ())
    lines = [
        (
            chip.program_bytes,
            f"usable {format_bytes(chip.program_bytes)}" + (f", {chip.name}" if len(chips) > 1 else ""),
            "waiting",
        )
        for chip in sorted(chips, key=lambda chip: chip.program_bytes)
    ]
    return _panel(rows, max(lines[-1][0], fullest) * 1.02, "memory of one chip", lines)


def layout_lines(layout: Layout) -> tuple[str, str]:
    """A layout in two lines for people: its degrees, then how a step is scheduled.

    >>> layout_lines(Layout.of(data=2, fsdp=64, tensor=4, sequence_parallel=True, remat="full"))
    ('data 2 · fsdp 64 · tensor 4', 'sequence parallel, full remat')
    """
    degrees = [f"{axis} {layout.word(axis)}" for axis in DEGREES if layout.word(axis) > 1]
    default = Layout.of()
    schedule = [
        write(layout.word(name))
        for name, write in _SETTINGS.items()
        if layout.word(name) != default.word(name)
    ]
    return " · ".join(degrees) or "one device", ", ".join(schedule)


# How a layout's other fields are said where they are not the default; dtypes are those of the whole plan.
_SETTINGS: dict[str, Callable[[Any], str]] = {
    "sequence_parallel": lambda _: "sequence parallel",
    "zero": "ZeRO-{}".format,
    "context_method": "{} attention".format,
    "microbatches": "{} microbatches".format,
    "schedule": str,
    "interleave": "{} chunks per stage".format,
    "remat": "{} remat".format,
    "offload": lambda _: "offloaded",
}


def _titles(candidate: Candidate, chosen: Candidate) -> tuple[str, str]:
    """The two lines of a candidate's layout; before the second its hardware, where the chosen has another."""
    title, subtitle = layout_lines(candidate.layout)
    elsewhere = candidate.hardware.spec != chosen.hardware.spec
    return title, ", ".join(
        filter(None, [f"on {candidate.hardware.spec}", subtitle])
    ) if elsewhere else subtitle


def _step_row(titles: tuple[str, str], candidate: Candidate, split: StepSplit, bold: bool) -> _Row:
    pieces = tuple(
        _Piece(words, getattr(split, key), format_seconds(getattr(split, key)), colour)
        for key, words, colour in STEP_PARTS
        if getattr(split, key) > 0
    )
    hidden = split.hidden_seconds
    below = (
        _Piece("communication that hides", hidden, format_seconds(hidden), "hidden") if hidden > 0 else None
    )
    return _Row(*titles, pieces, format_seconds(candidate.step_seconds), bold, below)


def _memory_row(titles: tuple[str, str], candidate: Candidate, bold: bool) -> _Row:
    # What waits on the host takes no memory of the chip.
    causes = {
        name: size for name, size in candidate.memory.to_dict().items() if name not in ("total", "host")
    }
    others = dict(zip((name for name in causes if name not in MEMORY_COLOURS), _OTHER_CAUSES, strict=False))
    colours = MEMORY_COLOURS | others
    pieces = tuple(
        _Piece(name.replace("_", " "), size, format_bytes(size), colours.get(name, "rest"))
        for name, size in causes.items()
        if size > 0
    )
    return _Row(*titles, pieces, format_bytes(candidate.memory.total), bold)


def _panel(
    rows: Sequence[_Row], longest: float, heading: str, lines: Sequence[tuple[float, str, str]]
) -> Panel:
    """Rows of bars to one scale; lines: values marked across all bars, with their names."""
    key, top = _key(rows)
    top += 18 if lines else 4
    scale = (WIDTH - _LABELS - _FIGURES) / longest
    body, y = [label(heading, 0, 12, weight=600), key], top
    for row in rows:
        body.append(_bars(row, y, scale))
        y += _height(row)
    for number, (value, words, colour) in enumerate(lines):
        x = _LABELS + value * scale
        body.append(line([(x, top - 6), (x, y - _ROW_GAP + 4)], colour, dashes="3 2"))
        # The first name leans away from the second, which ends before the panel: they may be pixels apart.
        anchor, shift = (
            ("end", -4) if number == 0 else ("start", min(-2, WIDTH - x - text_width(words, SMALL)))
        )
        body.append(label(words, x + shift, top - 9, colour, anchor=anchor, size=SMALL))
    return Panel(WIDTH, y, Markup().join(body))


def _key(rows: Sequence[_Row]) -> tuple[Markup, float]:
    """The words of all pieces with their colours, in the order of the bars; and where the key ends."""
    pieces = [piece for row in rows for piece in (*row.pieces, *((row.below,) if row.below else ()))]
    names = {piece.words: piece.colour for piece in sorted(pieces, key=lambda p: p.colour == "hidden")}
    x, y, parts = 0.0, 34.0, []
    for words, colour in names.items():
        width = 14 + text_width(words, SMALL) + 12
        if x + width > WIDTH:
            x, y = 0.0, y + _KEY
        parts += [bar(x, y - 8, 9, 9, colour), label(words, x + 14, y, "muted", size=SMALL)]
        x += width
    return Markup().join(parts), y + 10


def _words(row: _Row) -> tuple[list[str], list[str]]:
    """The lines of the title and of what stands under it, as they fit at the left of the bar."""
    most = int((_LABELS - 8) / text_width("0", bold=row.bold))
    # Axis, size and the dot after them stay on one line.
    title = re.sub(r" (?=[\d·])", "\N{NO-BREAK SPACE}", row.title)
    return wrap(title, most), wrap(row.subtitle, int((_LABELS - 8) / text_width("0", SMALL)))


def _height(row: _Row) -> float:
    title, subtitle = _words(row)
    return max(_BAR + 6, 14 * (len(title) + len(subtitle))) + _ROW_GAP


def _bars(row: _Row, y: float, scale: float) -> Markup:
    weight = 600 if row.bold else 400
    title, subtitle = _words(row)
    baseline = y + _BAR / 2 + 4
    parts = [label(words, 0, baseline + 14 * n, weight=weight) for n, words in enumerate(title)]
    for number, words in enumerate(subtitle, start=len(title)):
        parts.append(label(words, 0, baseline + 14 * number, "muted", size=SMALL))
    x = float(_LABELS)
    for piece in row.pieces:
        width = piece.value * scale
        parts.append(bar(x, y, width, _BAR, piece.colour, title=f"{piece.words}: {piece.text}"))
        x += width
    parts.append(label(row.end, WIDTH, baseline, anchor="end", weight=weight))
    if row.below:
        text = f"{row.below.words}: {row.below.text}"
        parts.append(bar(_LABELS, y + _BAR + 2, row.below.value * scale, 4, row.below.colour, title=text))
    return Markup().join(parts)
