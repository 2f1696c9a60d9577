"""Bytes on one chip at the peak of a training step, itemised.

    weights      stored shards, and a float32 master copy where the layout keeps one
    gradients    as they accumulate: sharded from ZeRO 2 on
    optimizer    Adam's two moments: sharded from ZeRO 1 on
    activations  what the layers of this stage save for the backward pass, for every microbatch that is
                 in flight, and the head's inputs and logits
    buffers      gathered weights and the working set of a backward pass: of one layer, whose next
                 layer's weights arrive meanwhile, or of the head, whichever is larger. In the head's time
                 there are no gradients yet, but for those that add up over microbatches: a single one has
                 their room

The peak is at the start of the backward pass, when the activations of every layer are alive; of the
stages of a pipeline, at the first, where most microbatches are, or the last, which has the head unless the
schedule turns there.

This is the memory of a program that XLA plans as a whole; eager.py has that of one run operation by
operation.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, prod

from meshwright.cost.graph import Graph, Segment, Value, Work, saved_values
from meshwright.cost.pipeline import routes
from meshwright.cost.stages import Ends, alive_microbatches, layers_of_stages, stage_ends, stage_segments
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions, parameters
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


def stored_parameters(
    config: ModelConfig, layout: Layout, stage: int = 0, schedule: str | None = None
) -> Stored:
    """Parameters on one chip of `stage`: its layers, and what the schedule's ends have besides.

    Fractions of a shard round up. A tied table is where the embedding is and where the head is.
    schedule: the layout's, unless given.
    """
    pipe, schedule = layout.pipe, schedule or layout.schedule
    layers = layers_of_stages(config.num_layers, pipe, layout.interleave)[stage] / config.num_layers
    copies = len(routes(schedule, pipe))  # of a stage's layers, one for each direction
    embedding, head = stage_ends(schedule, pipe, stage)
    used = updated = 0.0
    for name, count, sharded in _counts(config, _sharing(layout)):
        if name.endswith("layers"):
            share = layers * copies
        elif name == "embed":
            share = embedding or (config.tied_embeddings and head)
        else:
            share = embedding if name == "positions" else head
        used, updated = used + count * share, updated + sharded * share
    zero = layout.zero_stage
    return Stored(*map(ceil, (used, updated if zero >= 2 else used, updated if zero >= 1 else used)))


_Sharing = tuple[int, int, int, int, int, int | None, bool, int]


def _sharing(layout: Layout) -> _Sharing:
    """The fields of a layout that say how weights are stored; others share the counts."""
    context = layout.context if layout.zero_context else 1
    degrees = layout.data, layout.fsdp, layout.tensor, layout.tensor2, layout.expert
    return (*degrees, layout.zero, layout.zero_context, context)


@lru_cache(maxsize=4096)
def _counts(config: ModelConfig, sharing: _Sharing) -> tuple[tuple[str, int, int], ...]:
    """(stack or parameter, its elements on a chip as used, and as the optimizer has them)."""
    data, fsdp, tensor, tensor2, expert, zero, zero_context, context = sharing
    layout = Layout(
        data=data, fsdp=fsdp, tensor=tensor, tensor2=tensor2, expert=expert,
        zero=zero, zero_context=zero_context, context=context,
    )  # fmt: skip
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
    found = (_stage_memory(config, layout, graph, stage) for stage in {0, layout.pipe - 1})
    return max(found, key=lambda memory: memory.total)


def _stage_memory(config: ModelConfig, layout: Layout, graph: Graph, index: int) -> Memory:
    weights, gradients, optimizer = state_bytes(config, layout, index)
    ends = stage_ends(layout.schedule, layout.pipe, index)
    held = held_bytes(graph, layout.pipe, layout.interleave, index, ends, layout.remat)
    alive = alive_microbatches(layout.schedule, layout.pipe, layout.microbatches, layout.interleave, index)
    saved = held.saved(alive)
    kept = min(saved, held.on_chip) if layout.offload else saved
    buffers = held.buffers(gradients if layout.microbatches == 1 else 0)
    return Memory(weights, gradients, optimizer, round(kept), buffers, round(saved - kept))


def state_bytes(
    config: ModelConfig, layout: Layout, stage: int, schedule: str | None = None
) -> tuple[int, int, int]:
    """Bytes of (weights, gradients, optimizer) on one chip of a stage, as `stored_parameters` counts."""
    stored = stored_parameters(config, layout, stage, schedule)
    master = stored.moments * dtype_bytes("f32") if layout.master_weights else 0
    return (
        round(stored.weights * dtype_bytes(layout.weights_dtype) + master),
        round(stored.gradients * dtype_bytes(layout.gradients_dtype or layout.weights_dtype)),
        round(stored.moments * NUM_MOMENTS * dtype_bytes(layout.optimizer_dtype)),
    )


@dataclass(frozen=True)
class Held:
    """Bytes that the passes of one stage hold.

    a_microbatch: that its layers save for one microbatch. once: that the embedding and the head save,
    which run one at a time, and the last layer's output. on_chip: the part of all that stays on the
    chip where the rest is offloaded. layer, ends: gathered weights and the working set of a layer, and of
    the embedding or the head.
    """

    a_microbatch: float
    once: float
    on_chip: float
    layer: int
    ends: int

    def saved(self, alive: float) -> float:
        """With so many microbatches in flight."""
        return alive * self.a_microbatch + self.once

    def buffers(self, room: int = 0) -> int:
        """Those of the pass that needs most; room: bytes that are not in use yet when the head runs."""
        return max(self.layer, self.ends - room)


@lru_cache(maxsize=16384)
def held_bytes(graph: Graph, pipe: int, interleave: int, stage: int, ends: Ends, remat: str) -> Held:
    """What the passes of one stage hold under one remat policy."""
    here = stage_segments(graph, pipe, interleave, stage, ends)
    layers = [(segment, count) for segment, count in here if segment.source]
    last = layers[-1][0].source if layers else None  # a stage may hold the embedding or the head alone
    return Held(
        a_microbatch=sum(count * _saved(segment, remat) for segment, count in layers),
        once=sum(count * _saved(segment, remat) for segment, count in here if not segment.source)
        + (last.bytes_per_device if last else 0),
        on_chip=sum(_LAYERS_NOT_OFFLOADED * _saved(segment, remat) for segment, _ in here),
        layer=max((_working_set(segment, remat) for segment, _ in layers), default=0),
        ends=max((_working_set(segment, remat) for segment, _ in here if not segment.source), default=0),
    )


@lru_cache(maxsize=16384)
def _saved(segment: Segment, remat: str) -> int:
    """Bytes of activations that one run keeps; a gathered weight that it keeps is a buffer."""
    weights = {id(value) for node in segment.nodes if node.kind == "gather" for value in node.outputs}
    return _bytes([value for value in saved_values(segment, remat) if id(value) not in weights])


@lru_cache(maxsize=16384)
def _working_set(segment: Segment, remat: str) -> int:
    """Gathered weights, what the backward pass recomputed, and a cotangent as large as it all."""
    gathered = gathered_bytes(segment) * (2 if segment.count > 1 else 1)
    everything = [value for node in segment.nodes for value in node.outputs if node.kind != "gather"]
    return gathered + 2 * _bytes(everything) - _saved(segment, remat)


def gathered_bytes(segment: Segment) -> int:
    """Of weights that are copies: gathered, or of another dtype; others are read where they are stored."""
    return _bytes(
        [
            value
            for node in segment.nodes
            if node.kind == "gather"
            for value in node.outputs
            if node.forward_transfers or value.dtype != node.inputs[0].dtype
        ]
    )


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
