"""The roofline of a step: operations by arithmetic intensity, under the roofs of HBM and of the links."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import atan2, degrees

from markupsafe import Markup

from meshwright.cost.passes import Dtypes
from meshwright.plan.candidate import Candidate
from meshwright.plan.study.roofline import LinkRoof, StepOperation, link_roofs, operations
from meshwright.report.chart import SMALL, ChartAxes, Scale, dot, label, line, padded_ends, text_width
from meshwright.report.figure import Figure, Panel
from meshwright.units import format_bytes, format_count, format_seconds

_WIDTH, _HEIGHT = 522, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 48, 42
_MAX_LABELS = 12
_LEAST_SHARE_OF_TRAFFIC = 0.05
_COLOUR = {"matmul": "compute", "attention": "tp"}

_Place = Callable[[StepOperation], tuple[float, float]]


def roofline_figure(candidate: Candidate) -> Figure:
    """HBM's roof at the left, the links' at the right."""
    found = operations(candidate)
    step = candidate.step_seconds
    caption = (
        "Operations of the planned step on one chip; an area is a share of the step. Left: achieved FLOP/s "
        "against FLOPs per byte of HBM traffic. Right: achieved FLOP/s, with exposed transfers counted, "
        "against "
        "FLOPs per byte that the operation's collectives move. An operation on a roof is bound by it."
    )
    return Figure.of(
        "roofline",
        "Roofline of the step",
        caption,
        _hbm_panel(found, candidate, step),
        _link_panel(found, candidate, step),
    )


def _peak(candidate: Candidate) -> tuple[float, str]:
    dtype, chip = Dtypes.of(candidate.layout).matmul, candidate.hardware.chip
    # A calibrated chip has been measured to be faster than its peak at some sizes.
    measured = (rate for _, rate in chip.matmul_rates.get(dtype, ()))
    return max([chip.flops(dtype), *measured]), dtype


def _hbm_panel(found: Sequence[StepOperation], candidate: Candidate, step: float) -> Panel:
    shown = [operation for operation in found if operation.flops and operation.hbm_bytes]
    (peak, dtype), chip = _peak(candidate), candidate.hardware.chip
    rate = chip.hbm_bytes_per_second
    x, y = _scales([(o.intensity, o.flops_per_second) for o in shown], peak, [rate])
    axes = ChartAxes(x, y, "FLOPs per byte of HBM", "FLOP/s of a chip", format_count, _rate)
    body = [
        label("Against HBM", 0, 12, weight=600),
        axes.svg(),
        _roof(x, y, rate, peak, f"HBM {format_bytes(rate)}/s"),
        _ceiling(x, y, peak, dtype),
        _points(shown, step, x, y, lambda o: (o.intensity, o.flops_per_second)),
        _without_flops([operation for operation in found if not operation.flops], step),
    ]
    return Panel(_WIDTH, _HEIGHT, Markup().join(body))


def _link_panel(found: Sequence[StepOperation], candidate: Candidate, step: float) -> Panel:
    shown = [operation for operation in found if operation.flops and operation.link_bytes]
    if not shown:
        words = "No operation of this step communicates."
        return Panel(_WIDTH, 40, label("Against the links", 0, 12, weight=600) + label(words, 0, 34, "muted"))
    peak, dtype = _peak(candidate)
    roofs = _worth_drawing(link_roofs(candidate))
    rates = [roof.bytes_per_second for roof in roofs]
    x, y = _scales([(o.link_intensity, o.linked_flops_per_second) for o in shown], peak, rates)
    axes = ChartAxes(x, y, "FLOPs per byte moved between chips", "FLOP/s of a chip", format_count, _rate)
    body = [label("Against the links", 0, 12, weight=600), axes.svg(), _ceiling(x, y, peak, dtype)]
    for number, roof in enumerate(roofs):
        words = f"{'·'.join(roof.axes)} {format_bytes(roof.bytes_per_second)}/s"
        # The slowest links' words lie under their line, clear of those above.
        below = number == 0 and len(roofs) > 1
        body.append(_roof(x, y, roof.bytes_per_second, peak, words, below=below))
    body.append(_points(shown, step, x, y, lambda o: (o.link_intensity, o.linked_flops_per_second)))
    return Panel(_WIDTH, _HEIGHT, Markup().join(body))


def _worth_drawing(roofs: Sequence[LinkRoof]) -> list[LinkRoof]:
    """The roofs of the axes that carry most: a collective of a few bytes is all latency, and no roof."""
    whole = sum(roof.seconds for roof in roofs)
    kept = [roof for roof in roofs if roof.seconds > _LEAST_SHARE_OF_TRAFFIC * whole]
    return sorted(kept, key=lambda roof: roof.bytes_per_second)


def _scales(
    places: Sequence[tuple[float, float]], peak: float, rates: Sequence[float]
) -> tuple[Scale, Scale]:
    """Axes that hold the points and the knee of every roof."""
    knees = [peak / rate for rate in rates]
    _, high = padded_ends([*(x for x, _ in places), *knees], 0.1)
    # So much to the left that each roof is seen to rise.
    low = min(min(x for x, _ in places) / 2, min(knees) / 8)
    bottom = min(min(y for _, y in places) / 8, peak / 12)
    x = Scale(low, high, _LEFT, _WIDTH - _RIGHT, True)
    return x, Scale(bottom, peak * 1.7, _HEIGHT - _BOTTOM, _TOP, True)


def _roof(x: Scale, y: Scale, rate: float, peak: float, words: str, *, below: bool = False) -> Markup:
    """The slope that a bandwidth allows up to the peak, its words along the lower part."""
    first, last = max(x.low, y.low / rate), min(x.high, peak / rate)
    if first >= last:
        return Markup()
    start, end = (x.place(first), y.place(first * rate)), (x.place(last), y.place(last * rate))
    turned = degrees(atan2(end[1] - start[1], end[0] - start[0]))
    text = Markup('<g transform="translate({:.1f} {:.1f}) rotate({:.2f})">{}</g>').format(
        *start, turned, label(words, 14, 14 if below else -6, "muted", size=SMALL)
    )
    return line([start, end], "muted", width=1.3) + text


def _ceiling(x: Scale, y: Scale, peak: float, dtype: str) -> Markup:
    height = y.place(peak)
    words = f"{dtype} peak, {_rate(peak)}FLOP/s"
    return line([(x.start, height), (x.end, height)], "muted", width=1.3) + label(
        words, x.start + 4, height - 8, "muted", size=SMALL, halo=True
    )


def _rate(flops_per_second: float) -> str:
    """`459 T`, `1 P`: FLOPs per second but for their unit."""
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if flops_per_second >= unit:
            return f"{flops_per_second / unit:.3g} {letter}"
    return f"{flops_per_second / 1e6:.3g} M"


def _points(found: Sequence[StepOperation], step: float, x: Scale, y: Scale, place: _Place) -> Markup:
    """A disc for each operation, the largest first so that small ones stay in sight; and their names."""
    parts = []
    for operation in sorted(found, key=lambda o: -o.seconds):
        at = place(operation)
        share = operation.seconds / step
        title = (
            f"{operation.name} ({operation.direction}): "
            f"{format_seconds(operation.seconds)} per step, {share:.1%}\n"
            f"{format_count(at[0])} FLOPs per byte, {_rate(at[1])}FLOP/s"
        )
        colour = _COLOUR.get(operation.kind, "fsdp")
        parts.append(dot(x.place(at[0]), y.place(at[1]), _radius(share), colour, title=title))
    return _names(found, step, x, y, place) + Markup().join(parts)


def _radius(share: float) -> float:
    return max(2.5, 26 * share**0.5)


def _names(found: Sequence[StepOperation], step: float, x: Scale, y: Scale, place: _Place) -> Markup:
    """Names beside the points, one for all that lie together, each where it covers nothing else."""
    groups: list[_Group] = []
    for operation in sorted(found, key=lambda o: -o.seconds):
        at = x.place(place(operation)[0]), y.place(place(operation)[1])
        near = next((g for g in groups if abs(g.x - at[0]) < 14 and abs(g.y - at[1]) < 10), None)
        if near:
            near.members.append(operation)
        else:
            groups.append(_Group(*at, _radius(operation.seconds / step), [operation]))
    taken = [_Box(g.x - g.radius, g.x + g.radius, g.y - g.radius, g.y + g.radius) for g in groups]
    lines, words = [], []
    for group in groups[:_MAX_LABELS]:
        written = _written(group.members, groups, 0.55 * (x.end - x.start))
        free = (one for one in _places(group, written) if one.box.is_inside(x, y))
        chosen = next((one for one in free if not any(one.box.meets(box) for box in taken)), None)
        if chosen:
            taken.append(chosen.box)
            if chosen.y > group.y + 8:
                lines.append(line([(group.x, group.y), (group.x, chosen.y - 9)], "hidden", width=0.8))
            words.append(label(written, chosen.x, chosen.y, size=SMALL, anchor=chosen.anchor, halo=True))
    return Markup().join(lines + words)


@dataclass(frozen=True)
class _Group:
    """Points that lie together, as one on paper."""

    x: float
    y: float
    radius: float
    members: list[StepOperation]


@dataclass(frozen=True)
class _Box:
    left: float
    right: float
    top: float
    bottom: float

    def meets(self, other: "_Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def is_inside(self, x: Scale, y: Scale) -> bool:
        return x.start < self.left and self.right < x.end and y.end < self.top and self.bottom < y.start


@dataclass(frozen=True)
class _Words:
    """A place for words: their anchor and the box that they fill."""

    x: float
    y: float
    anchor: str
    width: float

    @property
    def box(self) -> _Box:
        left = self.x - (self.width if self.anchor == "end" else 0)
        return _Box(left - 2, left + self.width + 2, self.y - 11, self.y + 4)


def _places(group: _Group, words: str) -> Iterator[_Words]:
    """Places for a group's words, the best first: beside it, then further and further below."""
    width, reach = text_width(words, SMALL), group.radius + 5
    yield _Words(group.x + reach, group.y + 4, "start", width)
    yield _Words(group.x - reach, group.y + 4, "end", width)
    for row in range(_MAX_LABELS + 6):
        height = group.y + 30 + 15 * row
        yield _Words(group.x + 3, height, "end", width)
        yield _Words(group.x - 3, height, "start", width)


def _written(members: Sequence[StepOperation], groups: Sequence[_Group], room: float) -> str:
    """Names of the members, each once; with the direction where the same name stands elsewhere too.

    As many as `room` pixels take, and how many there are besides.
    """
    elsewhere = {o.name for group in groups if group.members is not members for o in group.members}
    names = [f"{o.name} {o.direction}" if o.name in elsewhere else o.name for o in members]
    written = list(dict.fromkeys(names))
    shown = len(written)
    while shown > 1 and text_width(_joined(written, shown), SMALL) > room:
        shown -= 1
    return _joined(written, shown)


def _joined(names: Sequence[str], shown: int) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest else "")


def _without_flops(found: Sequence[StepOperation], step: float) -> Markup:
    """A line on what has no FLOPs to draw."""
    seconds = sum(operation.seconds for operation in found)
    if not seconds:
        return Markup()
    words = f"operations without FLOPs: {format_seconds(seconds)} per step ({seconds / step:.1%})"
    return label(words, _LEFT, _HEIGHT - 6, "muted", size=SMALL)
