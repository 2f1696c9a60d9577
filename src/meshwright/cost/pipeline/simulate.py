"""A simulation of a schedule: the time of every pass, from seconds of passes and messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.cost.pipeline.order import Ordering, Times
from meshwright.layout.pipelines import PassTable


class PassEvent(NamedTuple):
    """A pass with its start and end in seconds."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """A schedule in seconds.

    busy_seconds: computing, by stage. peak_in_flight: most microbatch-chunks alive, by stage. A microbatch's
    activations of a chunk are alive from its F to the end of its B, or of its W if that is split off.
    peak_at_seconds: time of the first such peak.
    """

    table: PassTable
    events: tuple[PassEvent, ...]
    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_at_seconds: tuple[float, ...]

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        return tuple(self.makespan_seconds - busy for busy in self.busy_seconds)

    @cached_property
    def bubble_share(self) -> float:
        """The idle share of all stages' time."""
        return sum(self.idle_seconds) / (self.makespan_seconds * self.table.num_stages)


def simulate(table: PassTable, times: Times) -> PipelineTimeline:
    """Every pass at the earliest time that its row and its dependencies allow.

    F waits for F of the depth before and a hop, B for B of the depth after and a hop (at the last depth for F
    of its own microbatch), W for its B, which is before it in the row. A stage runs one pass at a time. A
    joined pair starts when both can start, and ends together.
    """
    ordering = Ordering(table)
    ends = ordering.whole().run(times)
    rows = [list(_events(ordering, stage, ends, times)) for stage in range(table.num_stages)]
    peaks = [_peak(row, split) for row, split in zip(rows, table.split, strict=True)]
    seconds, order = times.flat(), ordering.order
    busy = [0.0] * table.num_stages
    for stage, spans in enumerate(ordering.spans):
        entries = dict.fromkeys(entry for first, last in spans for entry in range(first, last + 1))
        busy[stage] = sum(seconds[order.kinds[entry]] for entry in entries)
    return PipelineTimeline(
        table=table,
        events=tuple(
            sorted(
                (event for row in rows for event in row),
                key=lambda event: (event.start, event.stage, event.end),
            )
        ),
        makespan_seconds=max(ends),
        busy_seconds=tuple(busy),
        peak_in_flight=tuple(peak for peak, _ in peaks),
        peak_at_seconds=tuple(at for _, at in peaks),
    )


def _events(ordering: Ordering, stage: int, ends: list[float], times: Times) -> Iterator[PassEvent]:
    """The passes of one stage in order."""
    order = ordering.order
    for each, (first, last) in zip(ordering.table.rows[stage], ordering.spans[stage], strict=True):
        came = ends[order.needs[first]] + order.hops[first] * times.hop_seconds
        start = max(ends[order.before[first]], came)
        yield PassEvent(stage, each.kind, each.microbatch, each.chunk, start, ends[last])


def _peak(events: list[PassEvent], split: frozenset[tuple[int, int]]) -> tuple[int, float]:
    """(most microbatch-chunks alive on a stage, time of that peak); events are in order."""
    alive, peak, at = 0, 0, 0.0
    for event in events:
        if event.kind == "F":
            alive += 1
        elif event.kind == "W" or (event.microbatch, event.chunk) not in split:
            alive -= 1
        if alive > peak:
            peak, at = alive, event.end
    return peak, at
