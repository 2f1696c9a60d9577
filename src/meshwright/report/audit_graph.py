"""A layer drawn from top to bottom, with the collectives of each tensor beside it: planned and emitted, and
the time of each. Forward is on the left, backward and update on the right; bars are to one scale."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from markupsafe import Markup

from meshwright.report import svg
from meshwright.report.figures import seconds_text
from meshwright.report.run_files import JsonDocument, audit_rows, collective_text

# A Transformer's tensors in the order of its forward pass; what is not listed comes after.
_LAYER = (
    "attention_norm", "to_wq+wk+wv", "wq", "wk", "wv", "q_norm", "k_norm", "k", "v", "scores", "wo",
    "attention_post_norm", "mlp_norm", "to_w_gate+w_in", "to_w_in", "w_gate", "w_in", "w_out",
    "mlp_post_norm",
)  # fmt: skip
_ORDER = ("embed", "embed_norm", "positions", *_LAYER, "final_norm", "to_unembed", "unembed", "loss")
_WIDTH, _NODE_WIDTH, _LONGEST = 1080, 150, 250
_ROW, _GAP, _TOP = 38, 12, 26
_MIDDLE = _WIDTH / 2


@dataclass(frozen=True)
class _Node:
    """A tensor and its rows on either side."""

    tensor: str
    forward: tuple[JsonDocument, ...]
    backward: tuple[JsonDocument, ...]

    @property
    def height(self) -> int:
        return _ROW * max(1, len(self.forward), len(self.backward))


def layer_svg(audit: JsonDocument) -> Markup | None:
    """The drawing of `rows` that move more than a few numbers; None where they have no times."""
    rows = [row for row in audit_rows(audit) if row.get("status") != "negligible"]
    times = [s for row in rows for side in ("planned", "emitted") if (s := _seconds(row, side)) is not None]
    if not times or max(times) <= 0:
        return None
    nodes = list(_nodes(rows))
    height = _TOP + sum(node.height + _GAP for node in nodes)
    label = "The layer's tensors with the planned and the emitted collectives of each, and their times"
    parts = [*_layer_frame(nodes), *_drawn(nodes, _LONGEST / max(times))]
    return Markup('<svg class="layer" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, height, label, Markup().join(parts)
    )


def _nodes(rows: Iterable[JsonDocument]) -> Iterator[_Node]:
    """A node for each tensor, in the order of the forward pass."""
    by_tensor: dict[str, list[JsonDocument]] = {}
    for row in rows:
        by_tensor.setdefault(str(row.get("tensor")), []).append(row)
    places = {tensor: at for at, tensor in enumerate(_ORDER)}
    for tensor in sorted(by_tensor, key=lambda name: places.get(name, len(places))):
        of_tensor = by_tensor[tensor]
        forward = tuple(row for row in of_tensor if row.get("direction") == "forward")
        yield _Node(tensor, forward, tuple(row for row in of_tensor if row.get("direction") != "forward"))


def _drawn(nodes: list[_Node], scale: float) -> Iterator[Markup]:
    yield svg.text("forward", _MIDDLE - _NODE_WIDTH / 2 - 14, 14, "lane left")
    yield svg.text("backward and update", _MIDDLE + _NODE_WIDTH / 2 + 14, 14, "lane")
    y = _TOP
    for at, node in enumerate(nodes):
        if at:
            yield Markup('<path class="flow" d="M{} {}v{}"/>').format(_MIDDLE, y - _GAP, _GAP)
        yield Markup('<rect class="node" x="{}" y="{}" width="{}" height="{}" rx="7"/>').format(
            _MIDDLE - _NODE_WIDTH / 2, y, _NODE_WIDTH, node.height - 4
        )
        yield svg.text(node.tensor, _MIDDLE, y + node.height / 2 + 2, "tensor")
        for index, row in enumerate(node.forward):
            yield from _edge(row, y + index * _ROW, scale, sign=-1)
        for index, row in enumerate(node.backward):
            yield from _edge(row, y + index * _ROW, scale, sign=1)
        y += node.height + _GAP


def _edge(row: JsonDocument, y: float, scale: float, sign: int) -> Iterator[Markup]:
    """Both sides of a row, the planned one above: a bar as long as its time, and what it is."""
    start = _MIDDLE + sign * (_NODE_WIDTH / 2 + 6)
    for at, side in enumerate(("planned", "emitted")):
        if not row.get(side):
            continue
        seconds, top = _seconds(row, side), y + 2 + at * 16
        length = max(2.0, (seconds or 0) * scale)
        yield Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="11" rx="2"/>').format(
            side, start if sign > 0 else start - length, top, length
        )
        time = "time unavailable" if seconds is None else seconds_text(seconds)
        words = f"{collective_text(row[side])}  {time}"
        name = "edge" if sign > 0 else "edge left"
        yield svg.notation(words, start + sign * (length + 7), top + 9.5, name)


def _layer_frame(nodes: list[_Node]) -> Iterator[Markup]:
    """A frame around what every layer has."""
    inside = [at for at, node in enumerate(nodes) if node.tensor in _LAYER]
    if not inside:
        return
    tops = [_TOP]
    for node in nodes:
        tops.append(tops[-1] + node.height + _GAP)
    top, bottom = tops[inside[0]] - 6, tops[inside[-1] + 1] - _GAP + 2
    yield Markup('<rect class="each" x="2" y="{}" width="{}" height="{}" rx="10"/>').format(
        top, _WIDTH - 4, bottom - top
    )
    yield svg.text("each layer", 14, top + 18, "lane")


def _seconds(row: JsonDocument, side: str) -> float | None:
    return (row.get(side) or {}).get("seconds")
