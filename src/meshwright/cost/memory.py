"""Bytes on one chip at the peak of a training step, itemised.

    weights      stored shards, and a float32 master copy where the layout keeps one
    gradients    as they accumulate: sharded from ZeRO 2 on
    optimizer    its state, such as Adam's two moments: sharded from ZeRO 1 on
    activations  what the layers of this stage save for the backward pass, for every microbatch that is
                 in flight, and the head's inputs and logits
    buffers      gathered weights and the working set of a backward pass: of one layer, whose next
                 layer's weights arrive meanwhile, or of the head, whichever is larger. The gradients of
                 a microbatch come after the head; where there are several they lie beside their sum
                 until they are added to it. In a pipeline they are taken to be added as they are made,
                 unless it is one of lanes

The peak is at the start of the backward pass, when the activations of every layer are alive. Of the stages
of a pipeline, the first of those that have the same layers is asked: it has the most microbatches alive.

This is the memory of a program that XLA plans as a whole; eager.py has that of one run operation by
operation.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from meshwright.cost.figures import ceiling, larger, largest, smaller
from meshwright.cost.graph import Graph, Segment, Value, Work, kept_with, saved_values
from meshwright.cost.stages import (
    Counts,
    alive_microbatches,
    different_stages,
    stage_counts,
    stage_ends,
    stage_layers,
)
from meshwright.layout import Layout
from meshwright.units import dtype_bytes, whole

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
    """Parameters on one chip of a stage: as stored, as gradients accumulate, as the optimizer has them.

    optimizer: elements of its state. update_flops: of an update.
    """

    weights: int
    gradients: int
    updated: int
    optimizer: int
    update_flops: int


def stored_parameters(graph: Graph, layout: Layout, stage: int = 0) -> Stored:
    """Parameters on one chip of `stage`: its layers, and what the schedule's ends have besides.

    A tied table is where the embedding is and where the head is.
    """
    pipe, schedule = layout.pipe, layout.schedule.pipeline
    own = stage_layers(len(graph.layers), schedule, pipe, layout.interleave, stage, graph.head_layers)
    first, last = stage_ends(schedule, pipe, stage)
    here = {"first": first, "last": last, "first and last": first or last}
    totals: list[Any] = [0] * len(fields(Stored))
    for part in graph.weights:
        if part.place == "layers" and pipe > 1 and layout.schedule.is_alike:
            share = 1.0  # recorded as its stage's rows: L is split over pipe
        elif part.place == "layers":
            share = sum(layer in part.layers for layer in own) / len(part.layers)
        else:
            share = here[part.place]
        counts = (part.stored, part.accumulated, part.updated, part.optimizer, part.update_flops)
        totals = [total + share * count for total, count in zip(totals, counts, strict=True)]
    return Stored(*map(ceiling, totals))


def train_memory(graph: Graph, layout: Layout) -> Memory:
    """The peak of a step whose microbatch is `graph`, on the stage that has most."""
    stages = different_stages(graph, layout.schedule.pipeline, layout.pipe, layout.interleave)
    found = (_stage_memory(graph, layout, stage) for stage in stages)
    return max(found, key=lambda memory: memory.total)


def _stage_memory(graph: Graph, layout: Layout, index: int) -> Memory:
    counts = stage_counts(graph, layout.schedule.pipeline, layout.pipe, layout.interleave)[index]
    held = held_bytes(graph, counts, layout.remat)
    alive = alive_microbatches(
        layout.schedule.pipeline, layout.pipe, layout.microbatches, layout.interleave, index
    )
    return peak(state_bytes(graph, layout, index), held, alive, layout.microbatches, layout)


def peak(
    states: tuple[Any, Any, Any], held: "HeldBytes", alive: Any, microbatches: Any, layout: Layout
) -> Memory:
    """Peak memory of one stage with `alive` microbatches; arguments may be arrays, one entry per layout."""
    weights, gradients, optimizer = states
    saved = held.saved(alive)
    kept = smaller(saved, held.on_chip) if layout.offload else saved
    buffers = held.buffers(gradients, microbatches, layout.pipe == 1 or layout.schedule.is_alike)
    return Memory(weights, gradients, optimizer, whole(kept), buffers, whole(saved - kept))


def state_bytes(graph: Graph, layout: Layout, stage: int) -> tuple[Any, Any, Any]:
    """Bytes of (weights, gradients, optimizer) on one chip of a stage."""
    stored = stored_parameters(graph, layout, stage)
    master = stored.updated * dtype_bytes("f32") if layout.master_weights else 0
    return (
        whole(stored.weights * dtype_bytes(layout.weights_dtype) + master),
        whole(stored.gradients * dtype_bytes(layout.gradients_dtype or layout.weights_dtype)),
        whole(stored.optimizer * dtype_bytes(layout.optimizer_dtype)),
    )


class HeldBytes(NamedTuple):
    """Bytes that the passes of one stage hold.

    a_microbatch: that its layers save for one microbatch. once: that the embedding and the head save,
    which run one at a time, and the last layer's output. on_chip: the part of all that stays on the
    chip where the rest is offloaded. layer, ends: gathered weights and the working set of a layer, and of
    the embedding or the head. Arrays of bytes where the graph was recorded for many layouts.
    """

    a_microbatch: Any
    once: Any
    on_chip: Any
    layer: Any
    ends: Any

    def saved(self, alive: Any) -> Any:
        """Bytes of saved activations with `alive` microbatches in flight."""
        return alive * self.a_microbatch + self.once

    def buffers(self, gradients: Any, microbatches: Any, apart: bool) -> Any:
        """Bytes of the buffers of the largest pass, including one microbatch's gradients.

        apart: whether these lie beside their sum before they are added to it. They are not there yet when
        the head runs. Those of a single one are counted as the step's.
        """
        alone = microbatches == 1
        own = gradients * (alone | apart)
        return larger(self.layer + own, self.ends) - own * alone


@kept_with
def held_bytes(graph: Graph, counts: Counts, remat: str) -> HeldBytes:
    """What the passes of a stage with these counts hold under one remat policy."""
    here = [pair for pair in zip(graph.segments, counts, strict=True) if pair[1]]
    layers = [(segment, count) for segment, count in here if segment.source]
    last = layers[-1][0].source if layers else None  # a stage may hold the embedding or the head alone
    return HeldBytes(
        a_microbatch=sum(count * _saved(segment, remat) for segment, count in layers),
        once=sum(segment.count * _saved(segment, remat) for segment, _ in here if not segment.source)
        + (last.bytes_per_device if last else 0),
        on_chip=sum(_LAYERS_NOT_OFFLOADED * _saved(segment, remat) for segment, _ in here),
        layer=largest(_working_set(segment, remat) for segment, _ in layers),
        ends=largest(_working_set(segment, remat) for segment, _ in here if not segment.source),
    )


@kept_with
def _saved(segment: Segment, remat: str) -> int:
    """Bytes of activations that one run keeps; a gathered weight that it keeps is a buffer."""
    weights = {id(value) for node in segment.nodes if node.kind == "gather" for value in node.outputs}
    return _bytes([value for value in saved_values(segment, remat) if id(value) not in weights])


@kept_with
def _working_set(segment: Segment, remat: str) -> int:
    """Gathered weights, what the backward pass recomputed, and a cotangent as large as it all."""
    gathered = gathered_weights_bytes(segment) * (2 if segment.count > 1 else 1)
    everything = [value for node in segment.nodes for value in node.outputs if node.kind != "gather"]
    return gathered + 2 * _bytes_of_copies(everything) - _saved(segment, remat)


def gathered_weights_bytes(segment: Segment) -> int:
    """Bytes of gathered weights and of casts; other weights are read where they are stored."""
    return _bytes_of_copies(
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


def _bytes_of_copies(values: list[Value]) -> int:
    return sum({id(value): value.bytes_per_device * value.is_copy for value in values}.values())


def update_work(graph: Graph, layout: Layout) -> Work:
    """The optimizer on one chip's shard.

    Weight, gradient and state are read, all but the gradient written; but for Muon memory decides.
    """
    stored = stored_parameters(graph, layout)
    weights = 3 * dtype_bytes(layout.weights_dtype) + (2 * dtype_bytes("f32") if layout.master_weights else 0)
    state = 2 * dtype_bytes(layout.optimizer_dtype)
    return Work(stored.update_flops, stored.updated * weights + stored.optimizer * state)
