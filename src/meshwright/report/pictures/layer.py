"""A layer of an audited program from top to bottom, with planned and emitted collectives of each tensor.

Forward is on the left, backward and update on the right; on a phone they are below each other. Bars are
seconds per step, all to one scale.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.report.draw.figure import PHONE, TABLET, WIDE, Figure, Panel, at_widths
from meshwright.report.draw.marks import bar, key, label, line, subscripted
from meshwright.report.run_documents import JsonDocument, audit_rows, collective_text
from meshwright.report.text import seconds_text

# A Transformer's tensors in the order of its forward pass; others come after them.
_LAYER = (
    "attention_norm", "to_wq+wk+wv", "wq", "wk", "wv", "q_norm", "k_norm", "k", "v", "scores", "wo",
    "attention_post_norm", "mlp_norm", "to_w_gate+w_in", "to_w_in", "w_gate", "w_in", "w_out",
    "mlp_post_norm",
)  # fmt: skip
_ORDER = ("embed", "embed_norm", "positions", *_LAYER, "final_norm", "to_unembed", "unembed", "loss")
_COLOURS = {"planned": "compute", "emitted": "exposed"}
_NODE, _WORDS = 150, 236  # pixels of a tensor, and of the words after the longest bar
_ROW, _GAP, _TOP = 38, 12, 54

_Rows = Sequence[JsonDocument]


def layer_figure(audit: JsonDocument) -> Figure | None:
    """The collectives that move more than a few numbers; None if their times are unknown."""
    rows = [row for row in audit_rows(audit) if row.get("status") != "negligible"]
    times = [seconds for row in rows for side in _COLOURS if (seconds := _seconds(row, side)) is not None]
    if not times or max(times) <= 0:
        return None
    nodes, longest = list(_nodes(rows)), max(times)
    panel = at_widths(lambda width: _panel(nodes, longest, width), WIDE, TABLET, PHONE)
    caption = "Seconds per step of the collectives of each tensor, hidden or exposed."
    return Figure.of("layer", "Collectives of a layer", caption, panel)


def _nodes(rows: Iterable[JsonDocument]) -> Iterator[tuple[str, _Rows, _Rows]]:
    """Each tensor with its rows forward and backward, in the order of the forward pass."""
    by_tensor: dict[str, tuple[list[JsonDocument], list[JsonDocument]]] = {}
    for row in rows:
        sides = by_tensor.setdefault(str(row.get("tensor")), ([], []))
        sides[row.get("direction") != "forward"].append(row)
    places = {tensor: at for at, tensor in enumerate(_ORDER)}
    for tensor in sorted(by_tensor, key=lambda name: places.get(name, len(places))):
        yield tensor, *by_tensor[tensor]


def _panel(nodes: Sequence[tuple[str, _Rows, _Rows]], longest: float, width: float) -> Panel:
    drawn, _ = key([(colour, side) for side, colour in _COLOURS.items()], width, 12)
    if width <= PHONE:
        column, parts = _Column(0, 1, (width - _WORDS) / longest), [drawn]
        y = 30
        for tensor, *sides in nodes:
            parts.append(label(tensor, 0, y + 12, weight=600))
            y += 20
            for row in (row for side in sides for row in side):
                parts.append(column.edge(row, y))
                y += _ROW
        return Panel(width, y, Markup().join(parts))
    middle, scale = width / 2, max(12, width / 2 - _NODE / 2 - _WORDS) / longest
    columns = [_Column(middle + sign * (_NODE / 2 + 6), sign, scale) for sign in (-1, 1)]
    parts = [
        drawn,
        label("forward", middle - _NODE / 2 - 14, _TOP - 12, "muted", anchor="end"),
        label("backward and update", middle + _NODE / 2 + 14, _TOP - 12, "muted"),
    ]
    y, inside = _TOP, list[float]()
    for number, (tensor, *sides) in enumerate(nodes):
        height = _ROW * max(1, *map(len, sides))
        if number:
            parts.append(line([(middle, y - _GAP), (middle, y)], "line", width=2))
        parts.append(bar(middle - _NODE / 2, y, _NODE, height - 4, "band", edge="line", radius=7))
        parts.append(label(tensor, middle, y + height / 2 + 2, anchor="middle", weight=600))
        for column, side in zip(columns, sides, strict=True):
            parts += [column.edge(row, y + n * _ROW) for n, row in enumerate(side)]
        inside += [y - 6, y + height + 2] if tensor in _LAYER else []
        y += height + _GAP
    if inside:
        frame = bar(1, inside[0], width - 2, inside[-1] - inside[0], "none", edge="line", radius=10)
        parts += [frame, label("each layer", 12, inside[0] + 18, "muted")]
    return Panel(width, y, Markup().join(parts))


@dataclass(frozen=True)
class _Column:
    """Bars that start at x and extend to the left (sign -1) or to the right (sign 1)."""

    x: float
    sign: int
    scale: float

    def edge(self, row: JsonDocument, y: float) -> Markup:
        """The planned collective of a row and the emitted one below: bars with their words."""
        parts = []
        for number, (side, colour) in enumerate(_COLOURS.items()):
            if not row.get(side):
                continue
            seconds, top = _seconds(row, side), y + 2 + number * 16
            length = max(2.0, (seconds or 0) * self.scale)
            start = self.x if self.sign > 0 else self.x - length
            time = "time unavailable" if seconds is None else seconds_text(seconds)
            words = collective_text(row[side])
            parts.append(bar(start, top, length, 11, colour, radius=2, title=f"{side}: {words}, {time}"))
            at = self.x + self.sign * (length + 7), top + 10
            anchor = "start" if self.sign > 0 else "end"
            parts.append(label(subscripted(f"{words}  {time}"), *at, "muted", anchor=anchor))
        return Markup().join(parts)


def _seconds(row: JsonDocument, side: str) -> float | None:
    return (row.get(side) or {}).get("seconds")
