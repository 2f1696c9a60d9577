"""What a stage of the pipeline runs: its share of the layers, the embedding, the head."""

from collections.abc import Sequence
from functools import lru_cache

from meshwright.cost.graph import Graph, Segment
from meshwright.cost.pipeline import in_flight
from meshwright.layout.pipeline import routes

Counts = tuple[float, ...]
# Whether a stage has the embedding, and whether it has the head.
Ends = tuple[bool, bool]


def stage_counts(graph: Graph, pipe: int, interleave: int, stage: int) -> Counts:
    """How often one microbatch runs each segment of the graph on `stage`.

    The first has what comes before the layers, the last what comes after. Layers of several kinds are
    dealt evenly, so that of 3 dense layers among 61 a stage of 8 may have 0.39.
    """
    share = layers_of_stages(graph.num_layers, pipe, interleave)[stage] / graph.num_layers
    first = next(index for index, segment in enumerate(graph.segments) if segment.source)
    return tuple(
        segment.count * (share if segment.source else stage == (0 if index < first else pipe - 1))
        for index, segment in enumerate(graph.segments)
    )


def chunk_counts(graph: Graph, stages: Sequence[Counts], chunks: int) -> tuple[Counts, dict[int, Counts]]:
    """What a chunk between the ends runs, and by depth what the first and the last do.

    The end chunk, with the embedding or the head, has what layers its stage's others leave. Stages at the
    ends have fewer if layers do not divide.
    """

    def layers(counts: Counts) -> Counts:
        return tuple(
            count if segment.source else 0 for segment, count in zip(graph.segments, counts, strict=True)
        )

    most = layers(max(stages, key=lambda counts: sum(layers(counts))))
    special = {
        depth: tuple(
            max(0.0, count - (chunks - 1) * in_most / chunks) if segment.source else count
            for segment, count, in_most in zip(graph.segments, stages[depth], most, strict=True)
        )
        for depth in (0, -1)
    }
    return tuple(count / chunks for count in most), special


@lru_cache(maxsize=4096)
def stage_ends(schedule: str, pipe: int, stage: int) -> Ends:
    """What lies on a stage where a schedule puts it.

    A V turns at the last stage and ends on the first; of two directions each begins where the other ends.

    >>> [stage_ends("1f1b", 4, s) for s in (0, 3)], [stage_ends("zb-v", 4, s) for s in (0, 3)]
    ([(True, False), (False, True)], [(True, True), (False, False)])
    """
    directions = routes(schedule, pipe)
    first, last = ({route[depth].stage for route in directions} for depth in (0, -1))
    return stage in first, stage in last


def stage_segments(
    graph: Graph, pipe: int, interleave: int, stage: int, ends: Ends
) -> list[tuple[Segment, float]]:
    """(segment, how often one microbatch runs it on `stage`), of those that the stage has."""
    counts = stage_counts(graph, pipe, interleave, stage)
    first = next(index for index, segment in enumerate(graph.segments) if segment.source)
    found = []
    for index, (segment, count) in enumerate(zip(graph.segments, counts, strict=True)):
        runs = count if segment.source else segment.count * ends[0 if index < first else 1]
        if runs:
            found.append((segment, runs))
    return found


@lru_cache(maxsize=4096)
def layers_of_stages(num_layers: int, pipe: int, interleave: int) -> list[int]:
    """Layers of every stage, as even as whole layers allow.

    Those that do not divide over the chunks go to the stages between: the first and the last have the
    embedding and the head besides.

    >>> layers_of_stages(126, 8, 1)
    [15, 16, 16, 16, 16, 16, 16, 15]
    """
    chunks = pipe * interleave
    least, over = divmod(num_layers, chunks)
    own = [least * interleave] * pipe
    for extra in range(over):
        own[_order(pipe)[extra % pipe]] += 1
    return own


def _order(pipe: int) -> Sequence[int]:
    """Stages in the order in which they take a layer more: the last and the first come last."""
    return [*range(1, pipe - 1), 0, pipe - 1] if pipe > 1 else [0]


def num_chunks(schedule: str, interleave: int) -> int:
    """Chunks of layers that one microbatch visits on every stage."""
    return 2 if schedule == "zb-v" else interleave


def alive_microbatches(schedule: str, pipe: int, microbatches: int, interleave: int, stage: int) -> float:
    """Microbatches whose activations a stage holds at once; a chunk's are a part of a microbatch's."""
    if pipe == 1:
        return 1
    chunks = num_chunks(schedule, interleave)
    return in_flight(schedule, pipe, microbatches, interleave, stage) / chunks
