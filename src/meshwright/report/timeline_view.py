"""One step along time: the work of a chip, and what each group of links carries meanwhile."""

from collections.abc import Iterator

from markupsafe import Markup

from meshwright.plan.candidate import Candidate
from meshwright.plan.study.timeline import CHIP, PASSES, Block, step_blocks
from meshwright.report.chart import SMALL, Scale, bar, label, line, text_width
from meshwright.report.figure import Figure, Panel
from meshwright.units import format_seconds

_ON_CHIP = {
    "compute": ("compute", "compute"),
    "hbm": ("memory", "HBM-bound work"),
    "launch": ("rest", "launches"),
    "links": ("waiting", "waiting for links"),
    "bubble": ("bubble", "pipeline bubble"),
    "host_link": ("waiting", "waiting for the host's memory"),
}
_CARRIED = {"weights": "fsdp", "gradients": "gradients", "updated weights": "fsdp"}
_OTHER = "exposed"
_WIDTH, _ROW, _GAP, _TOP = 1060.0, 26, 12, 62


def timeline_figure(candidate: Candidate) -> Figure:
    """A row for the chip and one for each group of links, from the start of the step to its end."""
    blocks = step_blocks(candidate)
    rows = list(dict.fromkeys([CHIP, *(block.row for block in blocks)]))
    end = max(block.end for block in blocks)
    names = [row if row == CHIP else f"links: {row}" for row in rows]
    labels = max(text_width(name, bold=True) for name in names) + 12
    x = Scale(0.0, end, labels, _WIDTH - 8)
    height = _TOP + len(rows) * (_ROW + _GAP)
    body = [*_key(blocks), *_boundaries(blocks, x, height), *_axis(x, height)]
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        y = _TOP + number * (_ROW + _GAP)
        body.append(label(name, 0, y + _ROW / 2 + 4, weight=600))
        body += [_drawn(block, x, y) for block in blocks if block.row == row]
    caption = (
        "One step of the chosen layout, with the totals of each pass from the plan. Transfers below compute "
        "are "
        "hidden; transfers below a wait of the chip are exposed. The order within a pass is not shown."
    )
    panel = Panel(_WIDTH, height + 34, Markup().join(body))
    return Figure.of("timeline", "One step along time", caption, panel)


def _drawn(block: Block, x: Scale, y: float) -> Markup:
    left, right = x.place(block.start), x.place(block.end)
    return bar(left, y, max(right - left, 0.6), _ROW, _colour(block), title=_words(block))


def _colour(block: Block) -> str:
    return _ON_CHIP[block.kind][0] if block.row == CHIP else _CARRIED.get(block.kind, _OTHER)


def _words(block: Block) -> str:
    what = _ON_CHIP[block.kind][1] if block.row == CHIP else f"{block.op} of {block.kind} over {block.row}"
    during = f", {block.direction}" if block.direction else ""
    return f"{what}{during}: {format_seconds(block.seconds)}"


def _boundaries(blocks: list[Block], x: Scale, height: float) -> Iterator[Markup]:
    """A dashed line where a pass begins, and its name where there is room."""
    for words in PASSES:
        own = [block for block in blocks if block.row == CHIP and block.direction == words]
        if not own:
            continue
        left, right = x.place(own[0].start), x.place(own[-1].end)
        yield line([(left, _TOP - 16), (left, height - _GAP)], "line")
        if right - left > text_width(words, SMALL) + 8:
            yield label(words, left + 4, _TOP - 8, "muted", size=SMALL)


def _axis(x: Scale, height: float) -> Iterator[Markup]:
    yield line([(x.start, height), (x.end, height)], "muted")
    for value in x.ticks(8):
        place = x.place(value)
        yield line([(place, height), (place, height + 4)], "muted")
        yield label(
            format_seconds(value) if value else "0", place, height + 18, "muted", anchor="middle", size=SMALL
        )


def _key(blocks: list[Block]) -> Iterator[Markup]:
    """The colours that are drawn, in words."""
    names = {
        **dict(list(_ON_CHIP.values())[:5]),
        "fsdp": "weights",
        "gradients": "gradients",
        _OTHER: "activations and the rest",
    }
    used, at = {_colour(block) for block in blocks}, 0.0
    for colour, words in names.items():
        if colour in used:
            yield bar(at, 8, 9, 9, colour)
            yield label(words, at + 14, 16, "muted", size=SMALL)
            at += text_width(words, SMALL) + 34
