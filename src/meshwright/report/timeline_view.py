"""One step along time: what a chip computes, and what each group of links carries meanwhile.

Drawn from the plan's own terms: the work of each pass, and its collectives with the part that compute
waits for. Within a pass work stands first and waiting last; the order of layers is not drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.cost.priced import PricedCollective
from meshwright.plan.candidate import Candidate
from meshwright.report.chart import SMALL, Scale, bar, label, line, text_width
from meshwright.report.figure import Figure, Panel
from meshwright.units import format_seconds

# (pass, what the picture calls it), in the order of a step; a layer is recomputed within its backward pass.
PASSES = (
    ("forward", "forward"),
    ("recompute", "recompute"),
    ("backward", "backward"),
    ("update", "update"),
)
_WORK = {
    "compute": ("compute", "compute"),
    "hbm": ("memory", "HBM-bound work"),
    "launch": ("rest", "launches"),
}
_WAITING, _BUBBLE = ("waiting", "waiting for links"), ("bubble", "pipeline bubble")
_HOST = ("waiting", "waiting for the host's memory")
_CARRIED = {"weights": "fsdp", "gradients": "gradients", "updated weights": "fsdp"}
_OTHER = "exposed"
_WIDTH, _ROW, _GAP, _TOP = 1060.0, 26, 12, 62


@dataclass(frozen=True)
class Block:
    """What a row does from start to end, in seconds of the step. words: with its own seconds.

    colour: of report.chart.
    """

    row: str
    words: str
    start: float
    end: float
    colour: str


def step_blocks(candidate: Candidate) -> list[Block]:
    """The blocks of a step: the row `chip` is busy, waits or idles to its end; other rows are links."""
    blocks: list[Block] = []
    start = 0.0
    for name, _ in PASSES:
        found = list(_pass(candidate, name, start))
        blocks += found
        start = max((block.end for block in found if block.row == "chip"), default=start)
    for seconds, (colour, words) in _idle(candidate):
        blocks.append(Block("chip", f"{words}: {format_seconds(seconds)}", start, start + seconds, colour))
        start += seconds
    return blocks


def _pass(candidate: Candidate, name: str, start: float) -> Iterator[Block]:
    collectives = [one for one in candidate.cost.collectives if one.direction == name]
    at = start
    for bound, (colour, words) in _WORK.items():
        seconds = sum(
            term.seconds for term in candidate.cost.terms if _of(term.name, term.bound) == (name, bound)
        )
        if seconds > 0:
            yield Block("chip", f"{words}, {name}: {format_seconds(seconds)}", at, at + seconds, colour)
            at += seconds
    waiting = sum(one.exposed_seconds for one in collectives)
    if waiting > 0:
        words = f"{_WAITING[1]}, {name}: {format_seconds(waiting)}"
        yield Block("chip", words, at, at + waiting, _WAITING[0])
    for row in dict.fromkeys("·".join(one.axes) for one in collectives):
        own = [one for one in collectives if "·".join(one.axes) == row]
        yield from _carried(row, own, name, start, at + waiting)


def _carried(
    row: str, collectives: list[PricedCollective], name: str, start: float, end: float
) -> Iterator[Block]:
    """One group of links in one pass. The last collective ends with the pass, where it is waited for.

    Links that are busy for longer than the pass (what hides under another pass) fill it.
    """
    total = sum(one.step_seconds for one in collectives)
    scale = min(1.0, (end - start) / total) if total else 0.0
    at = end - total * scale
    for one in sorted(collectives, key=lambda one: one.exposed_seconds / (one.step_seconds or 1)):
        words = f"{one.op} of {one.what} over {row}, {name}: {format_seconds(one.step_seconds)}"
        yield Block(row, words, at, at + one.step_seconds * scale, _CARRIED.get(one.what, _OTHER))
        at += one.step_seconds * scale


def _of(name: str, bound: str) -> tuple[str, str] | None:
    """(pass, bound) of a term of the chip's own work: `matmul (backward)`, `optimizer`."""
    if bound not in _WORK:
        return None
    _, _, within = name.rpartition(" (")
    known = within.removesuffix(")")
    return (known if known in dict(PASSES) else "update"), bound


def _idle(candidate: Candidate) -> Iterator[tuple[float, tuple[str, str]]]:
    """What no pass accounts for: the bubble, and links whose waiting is not in a collective of its own."""
    terms = candidate.cost.terms
    bubble = sum(term.seconds for term in terms if term.bound == "bubble")
    if bubble > 0:
        yield bubble, _BUBBLE
    host = sum(term.seconds for term in terms if term.bound == "host_link")
    if host > 0:
        yield host, _HOST
    links = sum(term.seconds for term in terms if term.bound in ("ici", "dcn"))
    rest = links - sum(one.exposed_seconds for one in candidate.cost.collectives)
    if rest > 1e-9 * candidate.step_seconds:
        yield rest, _WAITING


def timeline_figure(candidate: Candidate) -> Figure:
    """A row for the chip and one for each group of links, from the start of the step to its end."""
    blocks = step_blocks(candidate)
    rows = list(dict.fromkeys(["chip", *(block.row for block in blocks)]))
    end = max(block.end for block in blocks)
    names = [row if row == "chip" else f"links: {row}" for row in rows]
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
    return bar(left, y, max(right - left, 0.6), _ROW, block.colour, title=block.words)


def _boundaries(blocks: list[Block], x: Scale, height: float) -> Iterator[Markup]:
    """A dashed line where a pass begins, and its name where there is room."""
    for name, words in PASSES:
        own = [block for block in blocks if block.row == "chip" and f", {name}: " in block.words]
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
        **dict([*_WORK.values(), _WAITING, _BUBBLE]),
        "fsdp": "weights",
        "gradients": "gradients",
        _OTHER: "activations and the rest",
    }
    used, at = {block.colour for block in blocks}, 0.0
    for colour, words in names.items():
        if colour in used:
            yield bar(at, 8, 9, 9, colour)
            yield label(words, at + 14, 16, "muted", size=SMALL)
            at += text_width(words, SMALL) + 34
