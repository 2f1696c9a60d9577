"""A pipeline schedule as a Gantt chart: one row per stage, one block per pass, idle time as the bare row.

Blue goes forward, teal back, ochre is the gradient of the weights; paler blocks are later chunks of the
model (in DualPipe, microbatches that entered at the last stage). Blocks carry their microbatch's number
where it fits. Joined passes share a row's height.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from meshwright.cost.pipeline import PassEvent, PipelineTimeline
from meshwright.layout.pipelines import PassTable
from meshwright.report.chart import COLOURS, SMALL, Scale, bar, label, line, text_width
from meshwright.report.figure import Figure, Panel
from meshwright.units import format_seconds

_KINDS = {"F": "#3f63a3", "B": "#0f7f8c", "W": "#d3a548"}
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1064, 62, 118, 30, 24
_PALEST = 0.5  # share of white in the last chunk's colour
_SIZES = (11, 10, 9, 8)  # of numbers, in pixels
# Least pixels and largest number of passes that are drawn one by one; else a row shows only busy times.
_LEAST, _MOST = 1.2, 5000


def pipeline_figure(timeline: PipelineTimeline, title: str) -> str:
    """The chart as a lone SVG under its title and a sentence on bubble and memory."""
    figure = Figure.of("pipeline", title, pipeline_caption(timeline), pipeline_panel(timeline))
    return figure.standalone()


def pipeline_caption(timeline: PipelineTimeline) -> str:
    """Seconds, bubble and memory of the step in one sentence."""
    table = timeline.table
    stage = max(range(table.num_stages), key=timeline.peak_in_flight.__getitem__)
    alive, when = timeline.peak_in_flight[stage], format_seconds(timeline.peak_at_seconds[stage])
    parts = table.num_chunks // table.weight_copies
    what = "microbatches" if parts == 1 else f"chunks of microbatches ({parts} per stage)"
    copies = f"; {table.weight_copies} copies of the weights" if table.weight_copies > 1 else ""
    return (
        f"{table.num_stages} stages, {table.num_microbatches} microbatches: "
        f"{format_seconds(timeline.makespan_seconds)}, with a bubble of {timeline.bubble_share:.1%}. "
        f"At most {alive} {what} in flight, first on stage {stage} after {when}{copies}."
    )


def pipeline_panel(timeline: PipelineTimeline) -> Panel:
    """The rows, a legend above and seconds below; idle share and peak of every stage at the right."""
    chart = _Gantt(timeline)
    parts = [chart.legend(), *chart.rows(), chart.axis()]
    return Panel(_WIDTH, chart.bottom + _BOTTOM, Markup().join(parts))


def _entries(table: PassTable) -> list[tuple[list[str], str]]:
    """The legend: colours and what they mean, in the order of a microbatch's way."""
    chunks = "" if table.num_chunks == 1 else f", chunk 0 to {table.num_chunks - 1}"
    if len(table.routes) > 1:
        chunks = f", from stage 0 and from stage {table.num_stages - 1}"
    words = {"F": f"forward{chunks}", "B": _backward(table)}
    if any(table.split):
        words["W"] = "gradient of the weights"
    shown = min(table.num_chunks, 8)
    return [([_shade(kind, chunk, shown) for chunk in range(shown)], said) for kind, said in words.items()]


def _backward(table: PassTable) -> str:
    """What a B of the schedule computes."""
    num_split = sum(len(split) for split in table.split)
    if not num_split:
        return "backward"
    num_passes = table.num_microbatches * table.num_depths
    return "gradient of the input" if num_split == num_passes else "backward (narrow: of the input alone)"


@dataclass(frozen=True)
class _Gantt:
    timeline: PipelineTimeline

    @cached_property
    def scale(self) -> Scale:
        return Scale(0, self.timeline.makespan_seconds, _LEFT, _WIDTH - _RIGHT)

    @cached_property
    def pitch(self) -> float:
        """Pixels from one row to the next: as many as show all stages on one screen."""
        return min(30.0, max(5.0, 640 / self.timeline.table.num_stages))

    @property
    def height(self) -> float:
        return self.pitch - (4 if self.pitch > 15 else 1)

    @property
    def bottom(self) -> float:
        return _TOP + self.pitch * self.timeline.table.num_stages

    @cached_property
    def by_stage(self) -> list[list[PassEvent]]:
        found: list[list[PassEvent]] = [[] for _ in range(self.timeline.table.num_stages)]
        for event in self.timeline.events:
            found[event.stage].append(event)
        return found

    @cached_property
    def joined(self) -> set[tuple[int, str, int]]:
        """(stage, kind, microbatch) of passes that share their time with another."""
        rows = enumerate(self.timeline.table.rows)
        pairs = [(stage, row[at : at + 2]) for stage, row in rows for at, one in enumerate(row) if one.joined]
        return {(stage, one.kind, one.microbatch) for stage, pair in pairs for one in pair}

    def width(self, event: PassEvent) -> float:
        return self.scale.place(event.end) - self.scale.place(event.start)

    def rows(self) -> list[Markup]:
        parts = [
            label("idle", _WIDTH - _RIGHT + 52, 13, "muted", anchor="end", size=SMALL),
            label("in flight", _WIDTH - 8, 13, "muted", anchor="end", size=SMALL),
        ]
        every = max(1, round(14 / self.pitch + 0.49))  # rows whose words stay apart
        for stage in range(self.timeline.table.num_stages):
            y = _TOP + self.pitch * stage
            parts.append(bar(_LEFT, y, self.scale.end - _LEFT, self.height, "band"))
            parts += self._passes(stage, y)
            if stage % every == 0:
                parts += self._words(stage, y + self.height / 2 + 4)
        return parts

    def _words(self, stage: int, y: float) -> list[Markup]:
        idle = self.timeline.idle_seconds[stage] / self.timeline.makespan_seconds
        alive = self.timeline.peak_in_flight[stage]
        return [
            label(f"stage {stage}", 0, y, size=SMALL),
            label(f"{idle:.1%}", _WIDTH - _RIGHT + 52, y, anchor="end", size=SMALL),
            label(str(alive), _WIDTH - 8, y, anchor="end", size=SMALL),
        ]

    def _passes(self, stage: int, y: float) -> list[Markup]:
        events = self.by_stage[stage]
        if self._too_fine:
            return [self._stretches(_stretches(events), y)]
        lines: defaultdict[tuple[str, float, float], list[str]] = defaultdict(list)
        numbers: list[Markup] = []
        for event in events:
            fill = _shade(event.kind, event.chunk, self.timeline.table.num_chunks)
            top, height = self._share_of_row(event, y)
            x, width = self.scale.place(event.start), self.width(event)
            lines[fill, top, height].append(f"M{x:.1f} {top + height / 2:.1f}h{max(width - 0.8, 0.6):.1f}")
            if self._size:
                numbers.append(_number(event.microbatch, x + width / 2, top + height / 2, self._size, fill))
        path = Markup('<path stroke="{}" stroke-width="{:.1f}" d="{}"/>')
        drawn = (path.format(fill, height, "".join(d)) for (fill, _, height), d in lines.items())
        return [*drawn, *numbers]

    def _share_of_row(self, event: PassEvent, y: float) -> tuple[float, float]:
        """Top and height: of two joined passes F is above."""
        if (event.stage, event.kind, event.microbatch) not in self.joined:
            return y, self.height
        half = self.height / 2
        return (y, half - 0.4) if event.kind == "F" else (y + half + 0.4, half - 0.4)

    def _stretches(self, stretches: Iterable[tuple[float, float]], y: float) -> Markup:
        places = ((self.scale.place(start), self.scale.place(end)) for start, end in stretches)
        drawn = "".join(f"M{x:.1f} {y:.1f}H{end:.1f}v{self.height:.1f}H{x:.1f}z" for x, end in places)
        return Markup('<path fill="{}" class="f-compute" d="{}"/>').format(COLOURS["compute"], drawn)

    @cached_property
    def _too_fine(self) -> bool:
        events = self.timeline.events
        narrowest = min(self.width(event) for event in events if event.end > event.start)
        return narrowest < _LEAST or len(events) > _MOST

    @cached_property
    def _size(self) -> int:
        """Pixels of the numbers: the largest that fit every F, which are the narrowest; 0 if none do."""
        room = min(self.width(event) for event in self.timeline.events if event.kind == "F") - 2
        most = text_width(str(self.timeline.table.num_microbatches - 1), 1)
        high = self.height / (2 if self.joined else 1) + 1
        return next((size for size in _SIZES if size * most <= room and size <= high), 0)

    def legend(self) -> Markup:
        """What each colour is."""
        entries = [([_KINDS["F"]], "computing")] if self._too_fine else _entries(self.timeline.table)
        parts, x = [], float(_LEFT)
        for colours, words in [*entries, ([COLOURS["band"]], "idle")]:
            for colour in colours:
                parts.append(_block(x, colour))
                x += 13
            parts.append(label(words, x + 5, 13, size=SMALL))
            x += text_width(words, SMALL) + 26
        return Markup().join(parts)

    def axis(self) -> Markup:
        """Seconds under the rows."""
        parts = [line([(_LEFT, self.bottom), (self.scale.end, self.bottom)], "muted")]
        for value in self.scale.ticks(8):
            x = self.scale.place(value)
            parts.append(line([(x, self.bottom), (x, self.bottom + 4)], "muted"))
            words = format_seconds(value) if value else "0"
            parts.append(label(words, x, self.bottom + 17, "muted", anchor="middle", size=SMALL))
        return Markup().join(parts)


def _stretches(events: Sequence[PassEvent]) -> Iterable[tuple[float, float]]:
    """Start and end of every time without a pause; events in order."""
    start, end = events[0].start, events[0].end
    for event in events[1:]:
        if event.start > end * (1 + 1e-9):
            yield start, end
            start = event.start
        end = event.end
    yield start, end


def _number(number: int, x: float, y: float, size: int, fill: str) -> Markup:
    ink = COLOURS["ink"] if _lightness(fill) > 0.5 else COLOURS["page"]
    return Markup(
        '<text x="{:.1f}" y="{:.1f}" text-anchor="middle" font-size="{}" fill="{}">{}</text>'
    ).format(x - 0.4, y + size * 0.36, size, ink, number)


def _block(x: float, fill: str) -> Markup:
    """A square of the legend; the bare row's is recoloured in the dark, as the row is."""
    if fill == COLOURS["band"]:
        return bar(x, 3, 12, 12, "band")
    return Markup('<rect x="{:.1f}" y="3" width="12" height="12" fill="{}"/>').format(x, fill)


def _shade(kind: str, chunk: int, num_chunks: int) -> str:
    """The colour of a pass: its kind's, the paler the later the chunk."""
    white = _PALEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = (round(channel + (255 - channel) * white) for channel in _channels(_KINDS[kind]))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


def _lightness(colour: str) -> float:
    """The brightness of a colour from 0 to 1, with the channels weighed as in ITU-R BT.601."""
    red, green, blue = _channels(colour)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255
