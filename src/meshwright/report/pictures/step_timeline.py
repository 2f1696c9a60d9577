"""One step along time: the work of a chip, and the collectives that each group of links carries."""

from markupsafe import Markup

from meshwright.plan.candidate import Candidate
from meshwright.plan.study.timeline import CHIP, PASSES, Block, step_blocks
from meshwright.report.draw.chart import Scale, level_axis
from meshwright.report.draw.figure import PHONE, TABLET, WIDE, Figure, Panel, at_widths
from meshwright.report.draw.marks import bar, key, label, line, text_width
from meshwright.units import format_seconds

# The words and the colour of each kind of block.
_ON_CHIP = {
    "compute": ("compute", "compute"),
    "hbm": ("HBM-bound work", "memory"),
    "launch": ("launches", "rest"),
    "links": ("waiting for links", "waiting"),
    "bubble": ("pipeline bubble", "bubble"),
    "host_link": ("waiting for the host's memory", "waiting"),
}
_CARRIED = {"weights": "fsdp", "updated weights": "fsdp", "gradients": "gradients"}
_OTHER = "exposed"
_CARGO = {"fsdp": "weights", "gradients": "gradients", _OTHER: "activations and the rest"}
_ROW, _GAP = 26, 12


def timeline_figure(candidate: Candidate) -> Figure:
    """A row for the chip and one for each group of links, from the start of the step to its end."""
    blocks = step_blocks(candidate)
    caption = (
        "One step of the chosen layout, with the totals of each pass from the plan. Transfers below compute "
        "are hidden; transfers below a wait of the chip are exposed. The order within a pass is not shown."
    )
    panel = at_widths(lambda width: _panel(blocks, width), WIDE, TABLET, PHONE)
    return Figure.of("timeline", "One step along time", caption, panel)


def _panel(blocks: list[Block], width: float) -> Panel:
    """On a phone the name of a row is above it, otherwise at its left."""
    rows = {
        row: "chip" if row == CHIP else f"links: {row}" for row in (CHIP, *(block.row for block in blocks))
    }
    is_wide = width > PHONE
    left = max(text_width(name, bold=True) for name in rows.values()) + 12 if is_wide else 4
    x = Scale(0, max(block.end for block in blocks), left, width - 16)
    colours = dict(map(_words_and_colour, blocks))
    entries = [(colour, words) for words, colour in colours.items()]
    drawn, top = key(entries, width, 12)
    top += 26
    pitch = _ROW + _GAP + (0 if is_wide else 14)
    bottom = top + len(rows) * pitch
    parts = [drawn, _passes(blocks, x, top, bottom - _GAP), level_axis(x, bottom, _time)]
    for number, (row, name) in enumerate(rows.items()):
        y = top + number * pitch + (0 if is_wide else 14)
        parts.append(label(name, 0, y + (_ROW / 2 + 4 if is_wide else -4), weight=600))
        for block in blocks:
            if block.row == row:
                start, end = x.place(block.start), x.place(block.end)
                colour = _words_and_colour(block)[1]
                parts.append(bar(start, y, max(end - start, 0.6), _ROW, colour, title=_title(block)))
    return Panel(width, bottom + 26, Markup().join(parts))


def _words_and_colour(block: Block) -> tuple[str, str]:
    """An entry of the key."""
    if block.row == CHIP:
        return _ON_CHIP[block.kind]
    colour = _CARRIED.get(block.kind, _OTHER)
    return _CARGO[colour], colour


def _title(block: Block) -> str:
    what = _ON_CHIP[block.kind][0] if block.row == CHIP else f"{block.op} of {block.kind} over {block.row}"
    during = f", {block.direction}" if block.direction else ""
    return f"{what}{during}: {format_seconds(block.seconds)}"


def _passes(blocks: list[Block], x: Scale, top: float, bottom: float) -> Markup:
    """A line at the start of each pass, and its name if there is space."""
    parts = []
    for direction in PASSES:
        drawn = [block for block in blocks if block.row == CHIP and block.direction == direction]
        if drawn:
            left, right = x.place(drawn[0].start), x.place(drawn[-1].end)
            parts.append(line([(left, top - 18), (left, bottom)], "line"))
            if right - left > text_width(direction) + 8:
                parts.append(label(direction, left + 4, top - 8, "muted"))
    return Markup().join(parts)


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0"
