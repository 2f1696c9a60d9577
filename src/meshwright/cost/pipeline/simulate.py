"""When every pass of a schedule runs, given the seconds of each pass and of a hop between stages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from meshwright.cost.pipeline.schedule import Pass, Schedule


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
    run = _Run(schedule, times)
    rows = [run.steps(stage) for stage in range(schedule.num_stages)]
    position, free = [0] * len(rows), [0.0] * len(rows)
    events: list[Event] = []
    arrived: dict[_Key, float] = {}
    waiting: dict[_Key, int] = {}
    ready = list(range(len(rows)))
    while ready:
        stage = ready.pop()
        while position[stage] < len(rows[stage]):
            step = rows[stage][position[stage]]
            missing = next((key for key in step.needs if key not in arrived), None)
            if missing is not None:
                waiting[missing] = stage
                break
            start = max([free[stage], *(arrived[key] for key in step.needs)])
            end = start + step.seconds
            position[stage] += 1
            free[stage] = end + step.held_seconds
            for one, key, hop in step.results:
                events.append(Event(stage, one.kind, one.microbatch, one.chunk, start, end))
                arrived[key] = end + hop
                if key in waiting:
                    ready.append(waiting.pop(key))
    assert all(at == len(row) for at, row in zip(position, rows, strict=True)), "the table deadlocks"
    return _timeline(schedule, rows, events)


_Key = tuple[str, int, int]


class _Step(NamedTuple):
    """One pass of a row, or two that are joined."""

    needs: tuple[_Key, ...]
    seconds: float
    held_seconds: float
    results: tuple[tuple[Pass, _Key, float], ...]


@dataclass(frozen=True)
class _Run:
    """The rows of a schedule as steps that know what they wait for."""

    schedule: Schedule
    times: Times

    @cached_property
    def _by_depth(self) -> tuple[PassSeconds, ...]:
        return self.times.at(self.schedule.num_depths)

    @cached_property
    def _turns(self) -> frozenset[int]:
        """Depths whose next depth lies on the same stage."""
        route = self.schedule.routes[0]
        return frozenset(d for d in range(len(route) - 1) if route[d].stage == route[d + 1].stage)

    def steps(self, stage: int) -> list[_Step]:
        steps: list[_Step] = []
        row = iter(self.schedule.rows[stage])
        for one in row:
            steps.append(self._step(stage, (one, next(row)) if one.joined else (one,)))
        return steps

    def _step(self, stage: int, passes: Iterable[Pass]) -> _Step:
        needs: list[_Key] = []
        results: list[tuple[Pass, _Key, float]] = []
        seconds = 0.0
        for one in passes:
            depth = self.schedule.depths[stage, one.chunk]
            needs += self._needs(one, depth)
            results.append((one, (one.kind, one.microbatch, depth), self._hop_seconds(one, depth)))
            seconds += self._seconds(stage, one, depth)
        held = 0.0 if self.times.hops_hidden else sum(hop for _, _, hop in results)
        return _Step(tuple(needs), seconds, held, tuple(results))

    def _needs(self, one: Pass, depth: int) -> list[_Key]:
        if one.kind == "F":
            return [("F", one.microbatch, depth - 1)] if depth else []
        if one.kind == "B":
            last = depth == self.schedule.num_depths - 1
            return [("F", one.microbatch, depth) if last else ("B", one.microbatch, depth + 1)]
        return []

    def _seconds(self, stage: int, one: Pass, depth: int) -> float:
        seconds = self._by_depth[depth]
        if one.kind == "F":
            return seconds.forward
        if one.kind == "W":
            return seconds.weight
        split = (one.microbatch, one.chunk) in self.schedule.split[stage]
        return seconds.backward if split else seconds.backward + seconds.weight

    def _hop_seconds(self, one: Pass, depth: int) -> float:
        """Seconds until the next stage has what the pass made."""
        if one.kind == "F":
            sends = depth < self.schedule.num_depths - 1 and depth not in self._turns
        else:
            sends = one.kind == "B" and depth > 0 and depth - 1 not in self._turns
        return self.times.hop_seconds if sends else 0.0


def _timeline(schedule: Schedule, rows: list[list[_Step]], events: list[Event]) -> Timeline:
    by_stage: list[list[Event]] = [[] for _ in rows]
    for event in events:
        by_stage[event.stage].append(event)
    peaks = [_peak(found, schedule.split[stage]) for stage, found in enumerate(by_stage)]
    return Timeline(
        schedule=schedule,
        events=tuple(sorted(events, key=lambda event: (event.start, event.stage, event.end))),
        makespan_seconds=max(event.end for event in events),
        busy_seconds=tuple(sum(step.seconds for step in row) for row in rows),
        peak_in_flight=tuple(peak for peak, _ in peaks),
        peak_at_seconds=tuple(at for _, at in peaks),
    )


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
