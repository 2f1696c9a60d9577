"""Stacked bars: the parts of a step and of a chip's memory, planned and measured times."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from markupsafe import Markup

from meshwright.layout import DEGREES, Layout
from meshwright.plan.candidate import Candidate
from meshwright.plan.study.split import split_step
from meshwright.report.draw.figure import HALF, PHONE, Panel, at_widths
from meshwright.report.draw.marks import bar, key, label, line, text_width
from meshwright.report.palette import SERIES
from meshwright.units import format_bytes, format_seconds

_LABELS, _FIGURES = 182, 60  # pixels at the left and at the right of the bars
_BAR, _GAP, _LINE = 16, 14, 15
_LEAST_SHARE_OF_HBM = 0.2  # a fuller chip than that is drawn with the line of its HBM

# Parts of a step in the order of the bar: words and colour.
_STEP_PARTS = (
    ("compute_seconds", "compute", "compute"),
    ("memory_seconds", "HBM-bound work", "memory"),
    ("waiting_seconds", "waiting for activations", "waiting"),
    ("exposed_seconds", "weights and gradients, exposed", "exposed"),
    ("bubble_seconds", "pipeline bubble", "bubble"),
    ("rest_seconds", "launch", "rest"),
)
# State in blues, activations in greens.
_MEMORY_COLOURS = {
    "weights": "compute",
    "gradients": "gradients",
    "optimizer": "memory",
    "activations": "fsdp",
    "buffers": "buffers",
}
_OTHER_CAUSES = ("exposed", "waiting", "dp", "tp", "rest")


@dataclass(frozen=True)
class BarPart:
    """A part of a bar: its words, its value, the value as text, and its colour."""

    words: str
    value: float
    text: str
    colour: str


@dataclass(frozen=True)
class Bar:
    """One bar with its title. end: the figure after it. below: a thinner bar under it."""

    title: str
    subtitle: str
    pieces: Sequence[BarPart]
    end: str
    bold: bool = False
    below: BarPart | None = None


Mark = tuple[float, str]  # a value marked across all bars, and its name


def stacked(
    rows: Sequence[Bar], heading: str = "", *, most: float | None = None, marks: Sequence[Mark] = ()
) -> Panel:
    """Bars to one scale. most: the value of the longest possible bar, by default the largest."""
    longest = most or max(sum(piece.value for piece in row.pieces) for row in rows) or 1
    return at_widths(lambda width: _Bars(rows, heading, longest, marks, width).panel(), HALF, PHONE)


def step_bars(candidates: Sequence[Candidate], chosen: Candidate) -> Panel:
    """The step of each candidate by part, and under it the hidden communication."""
    rows = []
    for candidate in candidates:
        split = split_step(candidate)
        pieces = [
            BarPart(words, getattr(split, part), format_seconds(getattr(split, part)), colour)
            for part, words, colour in _STEP_PARTS
            if getattr(split, part) > 0
        ]
        hidden = split.hidden_seconds
        below = (
            BarPart("hidden communication", hidden, format_seconds(hidden), "hidden") if hidden > 0 else None
        )
        end, bold = format_seconds(candidate.step_seconds), candidate is chosen
        rows.append(Bar(*_titles(candidate, chosen), pieces, end, bold, below))
    return stacked(rows, "step time")


def memory_bars(candidates: Sequence[Candidate], chosen: Candidate) -> Panel:
    """The bytes of a chip by cause for each candidate, and the capacity they must stay under."""
    rows = [
        Bar(
            *_titles(candidate, chosen),
            memory_pieces(candidate.memory.to_dict()),
            format_bytes(candidate.memory.total),
            candidate is chosen,
        )
        for candidate in candidates
    ]
    chips = {one.hardware.chip.name: one.hardware.chip for one in candidates}
    fullest = max(candidate.memory.total for candidate in candidates)
    capacity = max(chip.hbm_bytes for chip in chips.values())
    if fullest < _LEAST_SHARE_OF_HBM * capacity and len(chips) == 1:
        return stacked(rows, f"memory of one chip, of {format_bytes(capacity)}")
    marks = sorted(
        (
            chip.program_bytes,
            f"usable {format_bytes(chip.program_bytes)}" + (f", {name}" if len(chips) > 1 else ""),
        )
        for name, chip in chips.items()
    )
    return stacked(rows, "memory of one chip", most=max(marks[-1][0], fullest) * 1.02, marks=marks)


def memory_pieces(causes: Mapping[str, float]) -> list[BarPart]:
    """The pieces of a memory bar, from bytes by cause; state in the host's memory is left out."""
    on_chip = {name: size for name, size in causes.items() if name not in ("total", "host") and size}
    others = dict(zip((name for name in on_chip if name not in _MEMORY_COLOURS), _OTHER_CAUSES, strict=False))
    colours = _MEMORY_COLOURS | others
    return [
        BarPart(name.replace("_", " "), size, format_bytes(size), colours.get(name, "rest"))
        for name, size in on_chip.items()
    ]


def share_pieces(seconds: Mapping[str, float], order: Sequence[str], total: float) -> list[BarPart]:
    """The pieces of a bar of `total` seconds, in the shares of operations that may overlap.

    order: all operations, the largest first. Those after the seventh share one piece.
    """
    named, rest = list(order), []
    if len(order) > len(SERIES):
        named, rest = named[: len(SERIES) - 1], named[len(SERIES) - 1 :]
    pieces = {name: seconds.get(name, 0) for name in named}
    pieces |= {f"other ({len(rest)})": sum(seconds.get(name, 0) for name in rest)} if rest else {}
    scale = total / (sum(pieces.values()) or 1)
    return [
        BarPart(name, value * scale, format_seconds(value), colour)
        for (name, value), colour in zip(pieces.items(), SERIES, strict=False)
        if value > 0
    ]


def layout_lines(layout: Layout) -> tuple[str, str]:
    """A layout in two lines: its degrees, then the schedule.

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


# The words of a layout's other settings, if they are not the default. Dtypes belong to the whole plan.
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
    """The two lines of a candidate's layout; the second begins with its hardware if that is another."""
    title, subtitle = layout_lines(candidate.layout)
    machine = f"on {candidate.hardware.spec}" if candidate.hardware.spec != chosen.hardware.spec else ""
    return title, ", ".join(filter(None, [machine, subtitle]))


@dataclass(frozen=True)
class _Bars:
    """Bars of one width: titles at their left, or above them on a phone."""

    rows: Sequence[Bar]
    heading: str
    longest: float
    marks: Sequence[Mark]
    width: float

    @property
    def _left(self) -> float:
        return _LABELS if self.width > PHONE else 0

    def _place(self, value: float) -> float:
        return self._left + value * (self.width - self._left - _FIGURES) / self.longest

    def panel(self) -> Panel:
        pieces = [piece for row in self.rows for piece in (*row.pieces, *([row.below] if row.below else []))]
        colours = {piece.words: piece.colour for piece in sorted(pieces, key=lambda p: p.colour == "hidden")}
        parts, top = [label(self.heading, 0, 12, weight=600)], 34 if self.heading else 12
        if len(colours) > 1:
            drawn, top = key([(colour, words) for words, colour in colours.items()], self.width, top)
            parts.append(drawn)
        y = top = top + (14 if self.marks else -4)
        for row in self.rows:
            drawn, height = self._row(row, y)
            parts.append(drawn)
            y += height
        for number, (value, words) in enumerate(self.marks):
            x = self._place(value)
            parts.append(line([(x, top - 6), (x, y - _GAP + 4)], "waiting", dashes="3 2"))
            # The first name ends at its line and the second begins there: the lines may be pixels apart.
            anchor, shift = ("start", min(-2, self.width - x - text_width(words))) if number else ("end", -4)
            parts.append(label(words, x + shift, top - 9, "waiting", anchor=anchor))
        return Panel(self.width, y, Markup().join(parts))

    def _row(self, row: Bar, y: float) -> tuple[Markup, float]:
        """The row from `y` on, and its height."""
        weight = 600 if row.bold else 400
        # Axis, size and the dot after them stay on one line.
        title = re.sub(r" (?=[\d·])", "\N{NO-BREAK SPACE}", row.title)
        space = (self._left or self.width) - 8
        lines = [(words, "ink", weight) for words in wrap(title, int(space / text_width("0", bold=row.bold)))]
        lines += [(words, "muted", 400) for words in wrap(row.subtitle, int(space / text_width("0")))]
        above = 0 if self._left else _LINE * len(lines) + 2
        parts = [
            label(words, 0, y + _LINE * n + (_BAR / 2 + 4 if self._left else 10), colour, weight=bold)
            for n, (words, colour, bold) in enumerate(lines)
        ]
        x, top = 0.0, y + above
        for piece in row.pieces:
            left, right = self._place(x), self._place(x + piece.value)
            words = f"{piece.words}: {piece.text}"
            parts.append(bar(left, top, right - left, _BAR, piece.colour, title=words))
            x += piece.value
        parts.append(label(row.end, self.width, top + _BAR / 2 + 4, anchor="end", weight=weight))
        if row.below:
            words = f"{row.below.words}: {row.below.text}"
            length = self._place(row.below.value) - self._left
            parts.append(bar(self._left, top + _BAR + 2, length, 4, row.below.colour, title=words))
        height = max(_BAR + 6, _LINE * len(lines)) if self._left else above + _BAR + 6
        return Markup().join(parts), height + _GAP
