"""What a stage of the pipeline has: its layers, and the embedding and the head where the schedule puts them.

A schedule cuts the model into depths: chunks of layers in order, of which every stage has one or more
(layout/pipelines/depths.py).
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.graph import Graph
from meshwright.layout import Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.depths import layers_of_depths, stage_routes
from meshwright.layout.pipelines.pipeline import Alive

# How often one microbatch runs each segment of the graph.
SegmentRuns = tuple[float, ...]
# Whether a stage has the embedding, and whether it has the head.
Ends = tuple[bool, bool]


@lru_cache(maxsize=1024)
def stage_depths(schedule: str, pipe: int, interleave: int) -> tuple[tuple[int, ...], ...]:
    """The depths that every stage has; of a schedule with two directions, those of both."""
    own: list[list[int]] = [[] for _ in range(pipe)]
    for route in stage_routes(schedule, pipe, interleave):
        for depth, place in enumerate(route):
            own[place.stage].append(depth)
    return tuple(map(tuple, own))


def joins_passes(schedule: str, pipe: int, interleave: int) -> bool:
    """Whether a stage runs the forward pass of one microbatch beside the backward pass of another.

    >>> joins_passes("dualpipe", 4, 1), joins_passes("1f1b", 4, 1)
    (True, False)
    """
    return len(stage_routes(schedule, pipe, interleave)) > 1


def stage_layers(
    num_layers: int, schedule: str, pipe: int, interleave: int, stage: int, head_layers: float = 0.0
) -> list[int]:
    """The layers whose weights lie on a stage; twice those that both directions pass there.

    >>> stage_layers(8, "interleaved", 4, 2, stage=0)
    [0, 4]
    """
    by_depth = layers_of_depths(num_layers, schedule, pipe, interleave, head_layers)
    depths = stage_depths(schedule, pipe, interleave)[stage]
    return [layer for depth in depths for layer in by_depth[depth]]


def depth_counts(graph: Graph, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    """How often one microbatch runs each segment of the graph at every depth.

    The first depth has what comes before the layers, the last what comes after; or every depth its share of
    both, where stages are alike.
    """
    return _depth_counts(_outline(graph), schedule, pipe, interleave)


def stage_counts(graph: Graph, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    """How often a microbatch runs each segment of the graph on every stage.

    Where half of the microbatches go in each direction it is the mean of both.
    """
    return _stage_counts(_outline(graph), schedule, pipe, interleave)


# Of a graph, all that its cut into stages depends on: runs of each segment outside the layers (0 of those in
# them), the segment of each layer in order, and the head's work in layers where it counts. Graphs of many
# layouts have the same.
_Outline = tuple[tuple[int, ...], tuple[int, ...], float]


def _outline(graph: Graph) -> _Outline:
    outside = tuple(0 if segment.source else segment.count for segment in graph.segments)
    return outside, graph.layers, graph.head_layers


@lru_cache(maxsize=512)
def _depth_counts(outline: _Outline, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    outside, layers, head_layers = outline
    by_depth = layers_of_depths(len(layers), schedule, pipe, interleave, head_layers)
    last, first_segment = len(by_depth) - 1, min(layers)
    found: list[SegmentRuns] = []
    alike = SCHEDULES[schedule].spmd and pipe > 1
    for depth, own in enumerate(by_depth):
        counts = Counter(layers[layer] for layer in own)
        for segment, runs in enumerate(outside):
            if runs and (alike or depth == (0 if segment < first_segment else last)):
                counts[segment] = runs
        found.append(tuple(counts[segment] for segment in range(len(outside))))
    return tuple(found)


@lru_cache(maxsize=512)
def _stage_counts(outline: _Outline, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    by_depth = _depth_counts(outline, schedule, pipe, interleave)
    directions = len(stage_routes(schedule, pipe, interleave))
    return tuple(
        tuple(sum(counts) / directions for counts in zip(*(by_depth[depth] for depth in own), strict=True))
        for own in stage_depths(schedule, pipe, interleave)
    )


class PerStep(NamedTuple):
    """How often a stage updates the weights of each segment in a step, and how often it sums their gradients.

    Both stages that have a depth under DualPipe sum its gradients; the one of the first direction updates it.
    """

    updated: SegmentRuns
    summed: SegmentRuns


def stage_updates(graph: Graph, schedule: str, pipe: int, interleave: int) -> tuple[PerStep, ...]:
    """What every stage does once a step."""
    return _stage_updates(_outline(graph), schedule, pipe, interleave)


@lru_cache(maxsize=512)
def _stage_updates(outline: _Outline, schedule: str, pipe: int, interleave: int) -> tuple[PerStep, ...]:
    by_depth = _depth_counts(outline, schedule, pipe, interleave)

    def total(depths: Iterable[int]) -> SegmentRuns:
        return tuple(
            map(sum, zip(*([0] * len(outline[0]), *(by_depth[depth] for depth in depths)), strict=True))
        )

    first, *_ = stage_routes(schedule, pipe, interleave)
    return tuple(
        PerStep(total(depth for depth, place in enumerate(first) if place.stage == stage), total(own))
        for stage, own in enumerate(stage_depths(schedule, pipe, interleave))
    )


def idle_runs(graph: Graph, layout: Layout, segment: int) -> float:
    """Runs of a segment for each that has a microbatch, idle ones included.

    Of stages that are alike all but the head, which runs where a microbatch leaves, run without one, too.
    """
    is_head = segment > max(graph.layers)
    if layout.pipe == 1 or is_head:
        return 1.0
    return layout.schedule.num_passes(layout.pipe) / layout.schedule.microbatches


def mean_runs(graph: Graph, layout: Layout, stage: int | None = None) -> SegmentRuns:
    """How often the mean chip runs each segment of the graph in a step, idle runs included.

    stage: of the pipeline, whose chips alone are meant.
    """
    of_stages = stage_counts(graph, layout.schedule.pipeline, layout.pipe, layout.schedule.interleave)
    of_stages = of_stages if stage is None else (of_stages[stage],)
    return tuple(
        sum(counts) / len(of_stages) * layout.schedule.microbatches * idle_runs(graph, layout, segment)
        for segment, counts in enumerate(zip(*of_stages, strict=True))
    )


def different_stages(graph: Graph, schedule: str, pipe: int, interleave: int) -> list[int]:
    """The first stage of each kind: of those with the same layers it has the most microbatches alive.

    And the last of each, where gradients of weights may be put off: there they may be for longer.
    """
    counts = stage_counts(graph, schedule, pipe, interleave)
    found = {counts.index(one): None for one in dict.fromkeys(counts)}
    if SCHEDULES[schedule].splits_backward:
        found |= dict.fromkeys(pipe - 1 - counts[::-1].index(one) for one in dict.fromkeys(counts))
    return list(found)


class Stage(NamedTuple):
    """What a stage runs and holds.

    counts: how often a microbatch runs each segment of the graph there. alive: microbatches at once, when
    there may be most.
    """

    number: int
    counts: SegmentRuns
    alive: tuple[Alive, ...]


def stages_of_kinds(graph: Graph, layout: Layout) -> list[Stage]:
    """The first stage of each kind, as of `different_stages`."""
    cut = layout.schedule.pipeline, layout.pipe, layout.schedule.interleave
    return [stage_of(graph, layout, number) for number in different_stages(graph, *cut)]


def stage_of(graph: Graph, layout: Layout, number: int) -> Stage:
    """The stage of that number."""
    schedule, pipe, interleave = layout.schedule.pipeline, layout.pipe, layout.schedule.interleave
    counts = stage_counts(graph, schedule, pipe, interleave)[number]
    alive = alive_microbatches(schedule, pipe, layout.schedule.microbatches, interleave, number)
    return Stage(number, counts, alive)


@lru_cache(maxsize=4096)
def stage_ends(schedule: str, pipe: int, stage: int) -> Ends:
    """What lies on a stage where a schedule puts it.

    A V turns at the last stage and ends on the first; of two directions each begins where the other ends.

    >>> [stage_ends("1f1b", 4, s) for s in (0, 3)], [stage_ends("zb-v", 4, s) for s in (0, 3)]
    ([(True, False), (False, True)], [(True, True), (False, False)])
    """
    if SCHEDULES[schedule].spmd:
        return True, True
    directions = stage_routes(schedule, pipe, 1)
    first, last = ({route[depth].stage for route in directions} for depth in (0, -1))
    return stage in first, stage in last


def alive_microbatches(
    schedule: str, pipe: int, microbatches: int, interleave: int, stage: int
) -> tuple[Alive, ...]:
    """Microbatches of which a stage holds activations, when it may hold most; a chunk is a part of one."""
    if pipe == 1:
        return (Alive(1),)
    record = SCHEDULES[schedule]
    chunks = record.chunks(interleave)
    found = record.alive(pipe, microbatches, interleave, stage)
    return tuple(Alive(*(count / chunks for count in one)) for one in found)
