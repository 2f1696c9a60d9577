"""What a stage of the pipeline runs: its share of the layers, the embedding, the head."""

from collections.abc import Sequence
from functools import lru_cache

from meshwright.cost.graph import Graph, Segment
from meshwright.cost.pipeline import in_flight

Counts = tuple[float, ...]


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


def stage_segments(graph: Graph, pipe: int, interleave: int, stage: int) -> list[tuple[Segment, float]]:
    """(segment, how often one microbatch runs it on `stage`), of those that run there."""
    counts = stage_counts(graph, pipe, interleave, stage)
    return [(segment, count) for segment, count in zip(graph.segments, counts, strict=True) if count]


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
