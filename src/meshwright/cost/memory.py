"""Bytes on one chip at the peak of a training step, itemised.

    weights      stored shards
    gradients    the same shape, in the weights' dtype
    optimizer    Adam's two moments in float32
    activations  what the layers save for the backward pass, and the head's logits
    buffers      gathered weights of two layers (one computes while the next arrives), the gathered
                 table of the head, and the working set of one layer's backward pass

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
    saved = [(segment, _bytes(saved_values(segment, layout.remat))) for segment in graph.segments]
    return Memory(
        weights=weight_bytes,
        gradients=weight_bytes,
        optimizer=round(stored * NUM_MOMENTS * dtype_bytes(MOMENT_DTYPE)),
        activations=sum(num_bytes * segment.count for segment, num_bytes in saved),
        buffers=_buffers(graph, layout),
    )


def _buffers(graph: Graph, layout: Layout) -> int:
    layer = next(segment for segment in graph.segments if segment.source)
    gathered = 2 * _bytes(_gathered(layer))
    # One layer's backward holds what it recomputed and a cotangent as large.
    everything = [value for node in layer.nodes for value in node.outputs if node.kind != "gather"]
    working = 2 * _bytes(everything) - _bytes(saved_values(layer, layout.remat))
    return gathered + working


def _gathered(segment: Segment) -> list[Value]:
    return [
        value
        for node in segment.nodes
        if node.kind == "gather"
        for value in node.outputs
        if node.inputs != (value,)
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
