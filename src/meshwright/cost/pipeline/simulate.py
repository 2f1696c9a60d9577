"""When every pass of a schedule runs, given the seconds of each pass and of a hop between stages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from meshwright.layout.pipeline.schedule import Pass, Schedule


class PassSeconds(NamedTuple):
    """Seconds of one microbatch through one chunk.

    backward: the gradient of the input, with what it recomputes. weight: the gradient of the weights.
    A whole backward pass takes both.
    """

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Times:
    """Seconds of the passes and hops of one step.

    body: of a chunk. special: of chunks at other depths, which count from the end if negative:
    `{0: embedding, -1: head}`. hop_seconds: to send 2 B_micro D bytes to the next stage. A hop that is
    not hidden also holds the stage that sends, which computes nothing meanwhile.
    """

    body: PassSeconds
    special: Mapping[int, PassSeconds] = field(default_factory=dict)
    hop_seconds: float = 0.0
    hops_hidden: bool = True

    def at(self, num_depths: int) -> tuple[PassSeconds, ...]:
        """Seconds by depth."""
        found = [self.body] * num_depths
        for depth, seconds in self.special.items():
            found[depth] = seconds
        return tuple(found)


class Event(NamedTuple):
    """A pass and when it ran."""

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in seconds. By stage: busy (computing), and how many microbatch-chunks are alive at most.

    A microbatch's activations of a chunk are alive from its F to the end of its B, or of its W where
    that stands apart. peak_at_seconds: when the first such peak is reached.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_at_seconds: tuple[float, ...]

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        return tuple(self.makespan_seconds - busy for busy in self.busy_seconds)

    @cached_property
    def bubble_share(self) -> float:
        """Of all stages' time, the share in which they do not compute."""
        return sum(self.idle_seconds) / (self.makespan_seconds * self.schedule.num_stages)


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Every pass at the earliest time that its row and its dependencies allow.

    F waits for F of the depth before and a hop, B for B of the depth after and a hop (at the last depth
    for its own F), W for its B, which stands before it in the row. A stage makes one pass at a time,
    two where they are joined: then both start when both can, and end together.
    """
    run = _Run(schedule, _links(schedule, times), times.hops_hidden)
    run.advance(range(schedule.num_stages))
    peaks = [_peak(found, split) for found, split in zip(run.events, schedule.split, strict=True)]
    events = [event for found in run.events for event in found]
    return Timeline(
        schedule=schedule,
        events=tuple(sorted(events, key=lambda event: (event.start, event.stage, event.end))),
        makespan_seconds=max(event.end for event in events),
        busy_seconds=tuple(run.busy),
        peak_in_flight=tuple(peak for peak, _ in peaks),
        peak_at_seconds=tuple(at for _, at in peaks),
    )


class _Link(NamedTuple):
    """What a pass takes, waits for and makes. A result is the number of its place plus its microbatch's.

    needs: None where nothing is waited for but the passes before in the row. hop: until the next stage
    has the result.
    """

    seconds: float
    needs: int | None
    makes: int
    hop: float


# By stage, for (kind, chunk, whether the backward pass is split).
_Links = list[dict[tuple[str, int, bool], _Link]]


def _links(schedule: Schedule, times: Times) -> _Links:
    """The links of every kind of pass on every stage."""
    by_depth, m = times.at(schedule.num_depths), schedule.num_microbatches
    last = schedule.num_depths - 1
    stage_of = [place.stage for place in schedule.routes[0]]
    hops = [times.hop_seconds if one != two else 0.0 for one, two in pairwise(stage_of)]
    after, before = [*hops, 0.0], [0.0, *hops]
    found: _Links = [{} for _ in schedule.rows]
    for (stage, chunk), depth in schedule.depths.items():
        forward, backward, weight = (m * (kind * schedule.num_depths + depth) for kind in range(3))
        seconds, given = by_depth[depth], forward if depth == last else backward + m
        for split, taken in ((True, seconds.backward), (False, seconds.backward + seconds.weight)):
            came = forward - m if depth else None
            found[stage]["F", chunk, split] = _Link(seconds.forward, came, forward, after[depth])
            found[stage]["B", chunk, split] = _Link(taken, given, backward, before[depth])
        found[stage]["W", chunk, True] = _Link(seconds.weight, None, weight, 0.0)
    return found


@dataclass
class _Run:
    """The state of a simulation: how far each stage is, and when each result is where it is needed."""

    schedule: Schedule
    links: _Links
    hops_hidden: bool
    arrived: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_stages = self.schedule.num_stages
        self.position, self.free, self.busy = [0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
        self.events: list[list[Event]] = [[] for _ in range(num_stages)]

    def advance(self, stages: Iterable[int]) -> None:
        """Runs every stage as far as it gets; a result wakes the stage that waits for it."""
        awake = list(stages)
        while awake:
            stage = awake.pop()
            row = self.schedule.rows[stage]
            while self.position[stage] < len(row):
                one = row[self.position[stage]]
                passes = (one, row[self.position[stage] + 1]) if one.joined else (one,)
                woken = self._run(stage, passes)
                if woken is None:
                    break
                awake += woken
        at_end = (at == len(row) for at, row in zip(self.position, self.schedule.rows, strict=True))
        assert all(at_end), "the table deadlocks"

    def _run(self, stage: int, passes: tuple[Pass, ...]) -> list[int] | None:
        """Runs one pass, or two together; the stages that waited for them, or None if they cannot start."""
        split, links = self.schedule.split[stage], self.links[stage]
        start, seconds, hops = self.free[stage], 0.0, 0.0
        found: list[tuple[Pass, _Link]] = []
        for one in passes:
            link = links[one.kind, one.chunk, (one.microbatch, one.chunk) in split]
            if link.needs is not None:
                came = self.arrived.get(link.needs + one.microbatch)
                if came is None:
                    self.waiting[link.needs + one.microbatch] = stage
                    return None
                start = max(start, came)
            seconds, hops = seconds + link.seconds, hops + link.hop
            found.append((one, link))
        end = start + seconds
        self.free[stage] = end if self.hops_hidden else end + hops
        self.busy[stage] += seconds
        self.position[stage] += len(passes)
        woken: list[int] = []
        for one, link in found:
            self.events[stage].append(Event(stage, one.kind, one.microbatch, one.chunk, start, end))
            made = link.makes + one.microbatch
            self.arrived[made] = end + link.hop
            if made in self.waiting:
                woken.append(self.waiting.pop(made))
        return woken


def _peak(events: list[Event], split: frozenset[tuple[int, int]]) -> tuple[int, float]:
    """The most microbatch-chunks that are alive on a stage, whose events come in order, and when."""
    alive, peak, at = 0, 0, 0.0
    for event in events:
        if event.kind == "F":
            alive += 1
        elif event.kind == "W" or (event.microbatch, event.chunk) not in split:
            alive -= 1
        if alive > peak:
            peak, at = alive, event.end
    return peak, at
