"""What a stage of the pipeline runs: its share of the layers, the embedding, the head."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost.graph import Graph
from meshwright.layout import Layout


@dataclass(frozen=True)
class Stage:
    """How often one microbatch runs each segment of the graph here.

    index: 0 is the first. counts: by segment; layers of several kinds are dealt evenly, so that of
    3 dense layers among 61 a stage of 8 may have 0.39.
    """

    index: int
    counts: tuple[float, ...]


def stages_of(graph: Graph, pipe: int, interleave: int = 1) -> list[Stage]:
    """Every stage, the first with what comes before the layers and the last with what comes after.

    Layers that do not divide over the chunks go to the stages between: the first and the last have
    the embedding and the head besides.

    >>> layers_of_stages(126, 8, 1)
    [15, 16, 16, 16, 16, 16, 16, 15]
    """
    layers = [segment.source is not None for segment in graph.segments]
    total = sum(s.count for s, is_layer in zip(graph.segments, layers, strict=True) if is_layer)
    first = layers.index(True)
    stages: list[Stage] = []
    for index, own in enumerate(layers_of_stages(total, pipe, interleave)):
        counts = [
            segment.count * own / total
            if is_layer
            else segment.count * (index == (0 if position < first else pipe - 1))
            for position, (segment, is_layer) in enumerate(zip(graph.segments, layers, strict=True))
        ]
        stages.append(Stage(index, tuple(counts)))
    return stages


def layers_of_stages(num_layers: int, pipe: int, interleave: int) -> list[int]:
    """Layers of every stage, as even as whole chunks allow.

    >>> layers_of_stages(7, 2, 2)
    [4, 3]
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


def pipeline_bubble(
    schedule: str, pipe: int, microbatches: int, interleave: int, chunk: Sequence[float], hop: float
) -> float:
    forward, backward, put_off = chunk
    return (pipe - 1) * (forward + backward + put_off + 2 * hop)


def in_flight(layout: Layout, stage: int) -> float:
    """Microbatches whose activations a stage holds at once."""
    return min(layout.pipe - stage, layout.microbatches) if layout.pipe > 1 else 1
