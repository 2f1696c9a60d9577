"""Contents of a pipeline's stages: layers, and the embedding and the head by schedule.

A schedule cuts the model into depths: chunks of consecutive layers. Every stage has one or more depths
(layout/pipelines/depths.py).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.graph import Graph
from meshwright.layout import Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.depths import layers_of_depths, stage_routes
from meshwright.layout.pipelines.pipeline import Alive

# Runs of each segment of the graph per microbatch.
SegmentRuns = tuple[float, ...]
# Whether a stage has the embedding, and whether it has the head.
Ends = tuple[bool, bool]


@lru_cache(maxsize=1024)
def stage_depths(schedule: str, pipe: int, interleave: int) -> tuple[tuple[int, ...], ...]:
    """The depths of every stage, in both directions if the schedule has two."""
    by_stage: list[list[int]] = [[] for _ in range(pipe)]
    for route in stage_routes(schedule, pipe, interleave):
        for depth, place in enumerate(route):
            by_stage[place.stage].append(depth)
    return tuple(map(tuple, by_stage))


def joins_passes(schedule: str, pipe: int, interleave: int) -> bool:
    """Whether a stage overlaps one microbatch's forward pass with another's backward pass.

    >>> joins_passes("dualpipe", 4, 1), joins_passes("1f1b", 4, 1)
    (True, False)
    """
    return len(stage_routes(schedule, pipe, interleave)) > 1


def stage_layers(
    by_depth: Sequence[Sequence[int]], schedule: str, pipe: int, interleave: int, stage: int
) -> list[int]:
    """The layers with weights on a stage; twice if both directions run them there.

    by_depth: as from `layers_of_depths`.

    >>> stage_layers(layers_of_depths(8, "interleaved", 4, 2), "interleaved", 4, 2, stage=0)
    [0, 4]
    """
    depths = stage_depths(schedule, pipe, interleave)[stage]
    return [layer for depth in depths for layer in by_depth[depth]]


def depth_counts(graph: Graph, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    """Runs of each segment of the graph per microbatch, at every depth.

    The first depth has the segments before the layers, the last the segments after them. Under an SPMD
    schedule every depth has both.
    """
    return _depth_counts(_outline(graph), schedule, pipe, interleave)


def stage_counts(graph: Graph, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    """Runs of each segment of the graph per microbatch, on every stage.

    The mean of both directions if half of the microbatches run in each.
    """
    return _stage_counts(_outline(graph), schedule, pipe, interleave)


# The parts of a graph that determine its cut into stages: runs of each segment outside the layers (0 for
# others), the segment of each layer in order, and the head's work in layers if it counts.
_Outline = tuple[tuple[int, ...], tuple[int, ...], float]


def _outline(graph: Graph) -> _Outline:
    outside = tuple(0 if segment.source else segment.count for segment in graph.segments)
    return outside, graph.layers, graph.head_layers


@lru_cache(maxsize=512)
def _depth_counts(outline: _Outline, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    outside, layers, head_layers = outline
    by_depth = layers_of_depths(len(layers), schedule, pipe, interleave, head_layers)
    last, first_segment = len(by_depth) - 1, min(layers)
    by_depth_runs: list[SegmentRuns] = []
    is_spmd = SCHEDULES[schedule].spmd and pipe > 1
    for depth, numbers in enumerate(by_depth):
        counts = Counter(layers[number] for number in numbers)
        for segment, runs in enumerate(outside):
            if runs and (is_spmd or depth == (0 if segment < first_segment else last)):
                counts[segment] = runs
        by_depth_runs.append(tuple(counts[segment] for segment in range(len(outside))))
    return tuple(by_depth_runs)


@lru_cache(maxsize=512)
def _stage_counts(outline: _Outline, schedule: str, pipe: int, interleave: int) -> tuple[SegmentRuns, ...]:
    by_depth = _depth_counts(outline, schedule, pipe, interleave)
    directions = len(stage_routes(schedule, pipe, interleave))
    return tuple(
        tuple(sum(counts) / directions for counts in zip(*(by_depth[depth] for depth in depths), strict=True))
        for depths in stage_depths(schedule, pipe, interleave)
    )


class PerStep(NamedTuple):
    """Updates of each segment's weights on a stage in a step, and sums of their gradients.

    Under DualPipe both stages of a depth sum its gradients; the stage of the first direction updates it.
    """

    updated: SegmentRuns
    summed: SegmentRuns


def stage_updates(graph: Graph, schedule: str, pipe: int, interleave: int) -> tuple[PerStep, ...]:
    """Updates and sums of every stage in a step."""
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
        PerStep(total(depth for depth, place in enumerate(first) if place.stage == stage), total(depths))
        for stage, depths in enumerate(stage_depths(schedule, pipe, interleave))
    )


def idle_runs(graph: Graph, layout: Layout, segment: int) -> float:
    """Runs of a segment, idle ones included, per run with a microbatch.

    Under an SPMD schedule all segments have idle runs but the head, which runs only at the end of a
    microbatch.
    """
    is_head = segment > max(graph.layers)
    if layout.pipe == 1 or is_head:
        return 1.0
    return layout.schedule.num_passes(layout.pipe) / layout.schedule.microbatches


def mean_runs(graph: Graph, layout: Layout, stage: int | None = None) -> SegmentRuns:
    """Runs of each segment in a step on the mean chip, idle runs included.

    stage: only the chips of this stage; None for all.
    """
    of_stages = stage_counts(graph, layout.schedule.pipeline, layout.pipe, layout.schedule.interleave)
    of_stages = of_stages if stage is None else (of_stages[stage],)
    return tuple(
        sum(counts) / len(of_stages) * layout.schedule.microbatches * idle_runs(graph, layout, segment)
        for segment, counts in enumerate(zip(*of_stages, strict=True))
    )


def different_stages(graph: Graph, schedule: str, pipe: int, interleave: int) -> list[int]:
    """The first stage of each kind: the one with the most microbatches alive among equal layers.

    The last stage of each kind too if gradients of weights may be deferred, since they may wait longer there.
    """
    counts = stage_counts(graph, schedule, pipe, interleave)
    stages = {counts.index(kind): None for kind in dict.fromkeys(counts)}
    if SCHEDULES[schedule].splits_backward:
        stages |= dict.fromkeys(pipe - 1 - counts[::-1].index(kind) for kind in dict.fromkeys(counts))
    return list(stages)


class Stage(NamedTuple):
    """A stage's number, runs and live microbatches.

    counts: runs of each segment of the graph per microbatch. alive: microbatches at once, at each possible
    peak.
    """

    number: int
    counts: SegmentRuns
    alive: tuple[Alive, ...]


def stages_of_kinds(graph: Graph, layout: Layout) -> list[Stage]:
    """The stages of `different_stages`."""
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
    """Whether a stage has the embedding, and whether it has the head.

    A V turns at the last stage and ends on the first. Each of two directions begins where the other ends.

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
    """Microbatches with activations on a stage, at each possible peak.

    A chunk counts as a part of a microbatch.
    """
    if pipe == 1:
        return (Alive(1),)
    record = SCHEDULES[schedule]
    chunks = record.chunks(interleave)
    peaks = record.alive(pipe, microbatches, interleave, stage)
    return tuple(Alive(*(count / chunks for count in peak)) for peak in peaks)
