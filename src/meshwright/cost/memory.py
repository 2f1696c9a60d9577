"""Bytes on one chip at the peak of a training step, itemised.

    weights      stored shards
    gradients    the same shape, in the weights' dtype
    optimizer    Adam's two moments in float32
    activations  what the layers save for the backward pass, and the head's inputs and logits
    buffers      gathered weights and the working set of a backward pass: of one layer, whose next
                 layer's weights arrive meanwhile, or of the head, whichever is larger

The peak is at the start of the backward pass, when every layer's activations are alive.
"""

from dataclasses import asdict, dataclass
from math import prod

from meshwright.cost.graph import Graph, Segment, Value, Work, saved_values
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import dimensions, parameters
from meshwright.units import dtype_bytes

MOMENT_DTYPE, NUM_MOMENTS = "f32", 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip by cause."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def parameters_per_chip(config: ModelConfig, layout: Layout) -> int:
    """Stored parameters of one chip; fractions of a shard round up."""
    sizes = dimensions(config)
    total = 0
    for path, param in parameters(config).items():
        array = layout.weight(path, param.letters)
        total += prod(
            -(-sizes[d] // layout.mesh.size(axes)) for d, axes in zip(array.dims, array.axes, strict=True)
        )
    return total


def train_memory(layout: Layout, graph: Graph, stored: int) -> Memory:
    """The peak of a step whose microbatch is `graph`; stored: parameters per chip."""
    weight_bytes = round(stored * dtype_bytes(layout.weights_dtype))
    return Memory(
        weights=weight_bytes,
        gradients=weight_bytes,
        optimizer=round(stored * NUM_MOMENTS * dtype_bytes(MOMENT_DTYPE)),
        activations=sum(_activations(segment, layout.remat) for segment in graph.segments),
        buffers=max(_working_set(segment, layout.remat) for segment in graph.segments),
    )


def _activations(segment: Segment, remat: str) -> int:
    """Bytes that all runs keep. A layer keeps its input; the last one's output is the head's."""
    output = segment.source.bytes_per_device if segment.source else 0
    return segment.count * _saved(segment, remat) + output


def _saved(segment: Segment, remat: str) -> int:
    """Bytes of activations that one run keeps; a gathered weight that it keeps is a buffer."""
    weights = [value for node in segment.nodes if node.kind == "gather" for value in node.outputs]
    return _bytes([value for value in saved_values(segment, remat) if value not in weights])


def _working_set(segment: Segment, remat: str) -> int:
    """Gathered weights, what the backward pass recomputed, and a cotangent as large as it all."""
    gathered = _bytes(_gathered(segment)) * (2 if segment.count > 1 else 1)
    everything = [value for node in segment.nodes for value in node.outputs if node.kind != "gather"]
    return gathered + 2 * _bytes(everything) - _saved(segment, remat)


def _gathered(segment: Segment) -> list[Value]:
    """Weights that are copies: gathered, or of another dtype; others are read where they are stored."""
    return [
        value
        for node in segment.nodes
        if node.kind == "gather"
        for value in node.outputs
        if node.forward_transfers or value.dtype != node.inputs[0].dtype
    ]


def _bytes(values: list[Value]) -> int:
    return sum({id(value): value.bytes_per_device for value in values}.values())


def update_work(layout: Layout, stored: int) -> Work:
    """Adam on one chip's shard of `stored` parameters.

    Weight, gradient and both moments are read, all but the gradient written. About 12 FLOPs a
    parameter (Kingma & Ba, 2014, algorithm 1); memory decides.
    """
    bytes_per_param = 3 * dtype_bytes(layout.weights_dtype) + 2 * NUM_MOMENTS * dtype_bytes(MOMENT_DTYPE)
    return Work(12 * stored, stored * bytes_per_param)
