"""Bytes on one chip at the peak of a training step, itemised.

    weights      stored shards, and a float32 master copy where the layout keeps one
    gradients    as they accumulate: sharded from ZeRO 2 on
    optimizer    Adam's two moments: sharded from ZeRO 1 on
    activations  what the layers of this stage save for the backward pass, for every microbatch that is
                 in flight, and the head's inputs and logits
    buffers      gathered weights and the working set of a backward pass: of one layer, whose next
                 layer's weights arrive meanwhile, or of the head, whichever is larger

The peak is at the start of the backward pass, when the activations of every layer are alive; of the
stages of a pipeline, at the first, where most microbatches are, or the last, which has the head.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, prod

from meshwright.cost.graph import Graph, Segment, Value, Work, saved_values
from meshwright.cost.stages import Stage, in_flight, layers_of_stages, stages_of
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import dimensions, parameters
from meshwright.notation.array import ShardedArray
from meshwright.units import dtype_bytes

NUM_MOMENTS = 2
# Layers whose activations are on the chip while the others' wait on the host.
_LAYERS_NOT_OFFLOADED = 2


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip by cause.

    host: what waits in the host's memory for this chip; not part of the total.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def to_dict(self) -> dict[str, int]:
        """The keys of contract.md, and `host` where something is offloaded."""
        items = asdict(self)
        if not self.host:
            del items["host"]
        return {**items, "total": self.total}


@dataclass(frozen=True)
class Stored:
    """Parameters on one chip of a stage: as used, as gradients accumulate, as the optimizer has them."""

    weights: int
    gradients: int
    moments: int


def stored_parameters(config: ModelConfig, layout: Layout, stage: int = 0) -> Stored:
    """Parameters on one chip of `stage`: its layers, and what the first and last have besides.

    Fractions of a shard round up. A tied table is on the first stage and again on the last.
    """
    pipe = layout.pipe
    layers = layers_of_stages(config.num_layers, pipe, layout.interleave)[stage] / config.num_layers
    copies = 2 if layout.schedule == "dualpipe" else 1  # it runs the stages in both directions
    used = updated = 0.0
    for name, count, sharded in _counts(config, layout.replace(microbatches=1, remat="none")):
        if name.endswith("layers"):
            share = layers * copies
        elif name == "embed":
            share = stage == 0 or (config.tied_embeddings and stage == pipe - 1)
        else:
            share = stage == (0 if name == "positions" else pipe - 1)
        used, updated = used + count * share, updated + sharded * share
    zero = layout.zero_stage
    return Stored(*map(ceil, (used, updated if zero >= 2 else used, updated if zero >= 1 else used)))


@lru_cache(maxsize=4096)
def _counts(config: ModelConfig, layout: Layout) -> tuple[tuple[str, int, int], ...]:
    """(stack or parameter, its elements on a chip as used, and as the optimizer has them)."""
    sizes, totals = dimensions(config), dict[str, tuple[int, int]]()
    for path, param in parameters(config).items():
        stack, _, name = path.rpartition("/")
        used, updated = totals.get(stack or name, (0, 0))
        totals[stack or name] = (
            used + _elements(layout.weight(name, param.letters), layout, sizes),
            updated + _elements(layout.gradient(name, param.letters), layout, sizes),
        )
    return tuple((name, *counts) for name, counts in totals.items())


def _elements(array: ShardedArray, layout: Layout, sizes: Mapping[str, int]) -> int:
    return prod(
        -(-sizes[dim] // layout.mesh.size(axes)) for dim, axes in zip(array.dims, array.axes, strict=True)
    )


def train_memory(config: ModelConfig, layout: Layout, graph: Graph) -> Memory:
    """The peak of a step whose microbatch is `graph`, on the stage that has most."""
    stages = stages_of(graph, layout.pipe, layout.interleave)
    return max(
        (_stage_memory(config, layout, graph, stage) for stage in {stages[0], stages[-1]}),
        key=lambda memory: memory.total,
    )


def _stage_memory(config: ModelConfig, layout: Layout, graph: Graph, stage: Stage) -> Memory:
    stored = stored_parameters(config, layout, stage.index)
    here = [(s, count) for s, count in zip(graph.segments, stage.counts, strict=True) if count]
    alive = in_flight(layout, stage.index)
    saved = round(sum(_activations(segment, count, alive, layout.remat) for segment, count in here))
    kept = saved
    if layout.offload:
        kept = min(saved, sum(_LAYERS_NOT_OFFLOADED * _saved(s, layout.remat) for s, _ in here))
    weight_bytes = stored.weights * dtype_bytes(layout.weights_dtype)
    master = stored.moments * dtype_bytes("f32") if layout.master_weights else 0
    return Memory(
        weights=round(weight_bytes + master),
        gradients=round(stored.gradients * dtype_bytes(layout.gradients_dtype or layout.weights_dtype)),
        optimizer=round(stored.moments * NUM_MOMENTS * dtype_bytes(layout.optimizer_dtype)),
        activations=kept,
        buffers=max(_working_set(segment, layout.remat) for segment, _ in here),
        host=saved - kept,
    )


def saved_bytes(layout: Layout, graph: Graph) -> int:
    """Bytes that one microbatch's forward pass on the first stage saves for its backward pass."""
    stage = stages_of(graph, layout.pipe, layout.interleave)[0]
    counted = zip(graph.segments, stage.counts, strict=True)
    return round(sum(count * _saved(segment, layout.remat) for segment, count in counted))


def _activations(segment: Segment, count: float, alive: float, remat: str) -> float:
    """Bytes that all runs keep. A layer keeps its input; the last one's output is the head's.

    alive: microbatches in flight; the embedding and the head run one at a time.
    """
    if not segment.source:
        return count * _saved(segment, remat)
    return count * alive * _saved(segment, remat) + segment.source.bytes_per_device


@lru_cache(maxsize=16384)
def _saved(segment: Segment, remat: str) -> int:
    """Bytes of activations that one run keeps; a gathered weight that it keeps is a buffer."""
    weights = {id(value) for node in segment.nodes if node.kind == "gather" for value in node.outputs}
    return _bytes([value for value in saved_values(segment, remat) if id(value) not in weights])


@lru_cache(maxsize=16384)
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


def update_work(config: ModelConfig, layout: Layout) -> Work:
    """Adam on one chip's shard.

    Weight, gradient and both moments are read, all but the gradient written. About 12 FLOPs a
    parameter (Kingma & Ba, 2014, algorithm 1); memory decides.
    """
    params = stored_parameters(config, layout).moments
    weights = 3 * dtype_bytes(layout.weights_dtype) + (2 * dtype_bytes("f32") if layout.master_weights else 0)
    return Work(12 * params, params * (weights + 2 * NUM_MOMENTS * dtype_bytes(layout.optimizer_dtype)))
