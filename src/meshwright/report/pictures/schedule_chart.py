"""A pipeline schedule as a Gantt chart: one row per stage, one block per pass; idle time is the bare row.

Forward passes are blue, backward passes teal, gradients of the weights ochre. Later chunks of the model are
paler; in DualPipe, microbatches that enter at the last stage. Two joined passes share the height of a row.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from meshwright.cost.pipeline import PassEvent, PipelineTimeline
from meshwright.layout.pipelines import PassTable
from meshwright.report.draw.chart import Scale, level_axis
from meshwright.report.draw.figure import WIDE, Figure, Panel
from meshwright.report.draw.marks import bar, key, label, text_width
from meshwright.report.palette import COLOURS
from meshwright.units import format_seconds

_KINDS = {"F": "#3f63a3", "B": "#0f7f8c", "W": "#d3a548"}
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 118, 32, 26
_PALEST = 0.5  # share of white in the colour of the last chunk
_NUMBER = 11  # pixels of a microbatch's number
# Passes narrower than this in pixels, or more than this, are drawn as stretches of busy time.
_LEAST_WIDTH, _MOST_PASSES = 1.2, 5000


def pipeline_figure(timeline: PipelineTimeline, title: str) -> str:
    """The chart as an SVG file, with its title and a sentence on bubble and memory."""
    return Figure.of("pipeline", title, pipeline_caption(timeline), pipeline_panel(timeline)).standalone()


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
    """The rows, a key above and seconds below; idle share and peak of every stage at the right."""
    chart = _Gantt(timeline)
    bottom = _TOP + chart.pitch * timeline.table.num_stages
    entries, _ = key([*chart.entries(), ("band", "idle")], WIDE - _RIGHT, 13)
    parts = [
        entries,
        *chart.rows(),
        level_axis(chart.scale, bottom, lambda t: format_seconds(t) if t else "0"),
    ]
    return Panel(WIDE, bottom + _BOTTOM, Markup().join(parts))


@dataclass(frozen=True)
class _Gantt:
    timeline: PipelineTimeline

    @cached_property
    def scale(self) -> Scale:
        return Scale(0, self.timeline.makespan_seconds, _LEFT, WIDE - _RIGHT)

    @cached_property
    def pitch(self) -> float:
        """Pixels from one row to the next, so that all stages fit a screen."""
        return min(30.0, max(5.0, 640 / self.timeline.table.num_stages))

    @property
    def height(self) -> float:
        return self.pitch - (4 if self.pitch > 15 else 1)

    @cached_property
    def joined(self) -> set[tuple[int, str, int]]:
        """(stage, kind, microbatch) of passes that share their time with another."""
        rows = enumerate(self.timeline.table.rows)
        pairs = [(stage, row[at : at + 2]) for stage, row in rows for at, one in enumerate(row) if one.joined]
        return {(stage, one.kind, one.microbatch) for stage, pair in pairs for one in pair}

    @cached_property
    def is_too_fine(self) -> bool:
        """Whether passes cannot be drawn one by one."""
        events = self.timeline.events
        narrowest = min(self._width(event) for event in events if event.end > event.start)
        return narrowest < _LEAST_WIDTH or len(events) > _MOST_PASSES

    @cached_property
    def has_numbers(self) -> bool:
        """Whether the numbers of microbatches fit every F, the narrowest pass."""
        space = min(self._width(event) for event in self.timeline.events if event.kind == "F") - 2
        widest = text_width(str(self.timeline.table.num_microbatches - 1), _NUMBER)
        return widest <= space and self.height / (2 if self.joined else 1) + 1 >= _NUMBER

    def _width(self, event: PassEvent) -> float:
        return self.scale.place(event.end) - self.scale.place(event.start)

    def entries(self) -> list[tuple[list[str], str]]:
        """The key: the colours of each kind of pass and its words."""
        table = self.timeline.table
        if self.is_too_fine:
            return [([_KINDS["F"]], "computing")]
        chunks = "" if table.num_chunks == 1 else f", chunk 0 to {table.num_chunks - 1}"
        if len(table.routes) > 1:
            chunks = f", from stage 0 and from stage {table.num_stages - 1}"
        words = {"F": f"forward{chunks}", "B": _backward(table)}
        if any(table.split):
            words["W"] = "gradient of the weights"
        shown = min(table.num_chunks, 8)
        return [
            ([_shade(kind, chunk, shown) for chunk in range(shown)], text) for kind, text in words.items()
        ]

    def rows(self) -> list[Markup]:
        timeline, end = self.timeline, WIDE - _RIGHT + 52
        parts = [
            label("idle", end, 13, "muted", anchor="end"),
            label("in flight", WIDE - 8, 13, "muted", anchor="end"),
        ]
        every = max(1, round(14 / self.pitch + 0.49))  # rows from one label to the next
        for stage in range(timeline.table.num_stages):
            y = _TOP + self.pitch * stage
            parts.append(bar(_LEFT, y, self.scale.end - _LEFT, self.height, "band"))
            events = [event for event in timeline.events if event.stage == stage]
            parts += [self._busy(events, y)] if self.is_too_fine else self._passes(events, y)
            if stage % every == 0:
                middle = y + self.height / 2 + 4
                idle = timeline.idle_seconds[stage] / timeline.makespan_seconds
                parts += [
                    label(f"stage {stage}", 0, middle),
                    label(f"{idle:.1%}", end, middle, anchor="end"),
                    label(str(timeline.peak_in_flight[stage]), WIDE - 8, middle, anchor="end"),
                ]
        return parts

    def _passes(self, events: Sequence[PassEvent], y: float) -> list[Markup]:
        lines: defaultdict[tuple[str, float, float], list[str]] = defaultdict(list)
        numbers: list[Markup] = []
        for event in events:
            fill = _shade(event.kind, event.chunk, self.timeline.table.num_chunks)
            top, height = self._share_of_row(event, y)
            x, width = self.scale.place(event.start), self._width(event)
            lines[fill, top, height].append(f"M{x:.1f} {top + height / 2:.1f}h{max(width - 0.8, 0.6):.1f}")
            if self.has_numbers:
                ink = COLOURS["ink" if _lightness(fill) > 0.5 else "card"][0]
                numbers.append(
                    Markup(
                        '<text x="{:.1f}" y="{:.1f}" text-anchor="middle" font-size="{}" fill="{}">{}</text>'
                    ).format(x + width / 2 - 0.4, top + height / 2 + 4, _NUMBER, ink, event.microbatch)
                )
        path = Markup('<path stroke="{}" stroke-width="{:.1f}" d="{}"/>')
        drawn = (path.format(fill, height, "".join(d)) for (fill, _, height), d in lines.items())
        return [*drawn, *numbers]

    def _share_of_row(self, event: PassEvent, y: float) -> tuple[float, float]:
        """Top and height. Of two joined passes the forward one is above."""
        if (event.stage, event.kind, event.microbatch) not in self.joined:
            return y, self.height
        half = self.height / 2
        return (y, half - 0.4) if event.kind == "F" else (y + half + 0.4, half - 0.4)

    def _busy(self, events: Sequence[PassEvent], y: float) -> Markup:
        """The times without a pause as one path."""
        places = ((self.scale.place(start), self.scale.place(end)) for start, end in _stretches(events))
        drawn = "".join(f"M{x:.1f} {y:.1f}H{end:.1f}v{self.height:.1f}H{x:.1f}z" for x, end in places)
        return Markup('<path fill="{}" class="f-compute" d="{}"/>').format(COLOURS["compute"][0], drawn)


def _backward(table: PassTable) -> str:
    """The words for B, which some schedules split into gradients of the input and of the weights."""
    num_split = sum(len(split) for split in table.split)
    if not num_split:
        return "backward"
    num_passes = table.num_microbatches * table.num_depths
    return "gradient of the input" if num_split == num_passes else "backward (narrow: only of the input)"


def _stretches(events: Sequence[PassEvent]) -> Iterable[tuple[float, float]]:
    """Start and end of each stretch without a pause, from events in order."""
    start, end = events[0].start, events[0].end
    for event in events[1:]:
        if event.start > end * (1 + 1e-9):
            yield start, end
            start = event.start
        end = event.end
    yield start, end


def _shade(kind: str, chunk: int, num_chunks: int) -> str:
    """The colour of a pass by its kind, paler for later chunks."""
    white = _PALEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = (round(channel + (255 - channel) * white) for channel in bytes.fromhex(_KINDS[kind][1:]))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _lightness(colour: str) -> float:
    """The brightness of a colour from 0 to 1, with the weights of ITU-R BT.601."""
    red, green, blue = bytes.fromhex(colour[1:])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255
